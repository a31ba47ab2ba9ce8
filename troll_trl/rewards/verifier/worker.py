"""
serve(): the process that runs math-verify. It may be killed at any moment, and nothing is lost.

It imports math-verify once and forks a child that answers. The kernel kills a child at its limit of processor time,
without asking Python. The next child starts in milliseconds; an import would take seconds. Questions and
replies are lines of JSON, since reading a pickle may run code.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

MEMORY_BYTES = 1 << 30
# The limit is processor time. A child that only waits ends after this many times the limit in elapsed time
WALL_FACTOR = 30
RETIRED, OUT_OF_MEMORY = 3, 4  # exit codes
ALARMS = (signal.SIGPROF, signal.SIGALRM)


def serve() -> None:
    """Answer the questions of the standard input until it closes."""
    from troll_trl.rewards.verifier.symbolic import answer

    replies = os.fdopen(os.dup(1), "w", buffering=1)  # what a library prints is no reply
    os.dup2(2, 1)
    answer({"gold": "2x", "answer": "x+x"})  # every child starts warm
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        if (child := os.fork()) == 0:
            _answer_questions(replies, answer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != RETIRED:
            print(json.dumps({"died": "timeout" if -status in ALARMS else "crash"}), file=replies)


def _answer_questions(replies: TextIO, answer: Callable[[dict], bool]) -> NoReturn:
    try:
        for alarm in ALARMS:
            signal.signal(alarm, signal.SIG_DFL)
        while line := sys.stdin.readline():
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, question["seconds"])
            signal.setitimer(signal.ITIMER_REAL, question["seconds"] * WALL_FACTOR)
            reply = {"right": answer(question)}
            reply["spent"] = question["seconds"] - signal.setitimer(signal.ITIMER_PROF, 0)[0]
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(reply), file=replies)
            if _resident_bytes() > MEMORY_BYTES // 2:  # caches of sympy grow
                os._exit(RETIRED)
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""
The process that runs computer algebra, one question at a time: it may be killed at any moment, and nothing is lost.

`WorkerPool` (pool.py) starts it with a main module of its own. A supervisor imports math-verify once and waits; its
child answers. The kernel kills a child that is over its processor time, or over a far longer time of the clock. The
supervisor then forks another, which takes milliseconds; a new import would take seconds. The supervisor has a single
thread and no accelerator, so forking is safe.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import NoReturn

# Exit codes of a child, besides 0 for the end of the questions
RETIRED, OUT_OF_MEMORY = 3, 4
REASONS = {-signal.SIGPROF: "timeout", -signal.SIGALRM: "timeout", OUT_OF_MEMORY: "memory"}


def send(connection: Connection, message: dict) -> None:
    """Send a question or a reply as JSON, because reading a pickle may run code."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict:
    """The next message. Raises an `EOFError` if the other process has closed the connection."""
    return json.loads(connection.recv_bytes())


def main(descriptor: int, memory_bytes: int) -> None:
    """Answer questions until the connection is closed. Each child has this much address space."""
    connection = Connection(descriptor)
    try:
        from math_answers.rewards.verifier.symbolic import answer_question, warm_up

        warm_up()  # in the supervisor: every child then starts warm
    except BaseException as error:
        send(connection, {"failed": f"{type(error).__name__}: {error}"})
        raise
    with contextlib.suppress(ValueError, OSError):  # a lower limit than ours is set already
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(connection, {"ready": True})
    while True:
        child = os.fork()
        if child == 0:
            _serve(connection, answer_question, memory_bytes // 2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != RETIRED:
            by_clock = {"by_clock": True} if status == -signal.SIGALRM else {}  # which says nothing about the next time
            send(connection, {"died": REASONS.get(status, "crash")} | by_clock)


def _serve(connection: Connection, answer_question, retire_bytes: int) -> NoReturn:
    for alarm in (signal.SIGPROF, signal.SIGALRM):  # the kernel kills at the alarm; Python is not asked
        signal.signal(alarm, signal.SIG_DFL)
    try:
        while True:
            question = receive(connection)
            signal.setitimer(signal.ITIMER_PROF, question["seconds"])
            signal.setitimer(signal.ITIMER_REAL, question["wall_seconds"])
            began = time.process_time()
            reply = answer_question(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, reply | {"spent": time.process_time() - began})
            # Caches of sympy grow. Kilobytes on Linux, bytes on macOS
            unit = 1 if sys.platform == "darwin" else 1024
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > retire_bytes:
                os._exit(RETIRED)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (EOFError, OSError):  # nobody asks any more
        os._exit(0)
    finally:
        os._exit(1)

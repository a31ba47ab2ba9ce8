"""
The process that runs computer algebra, one question at a time: it may be killed at any moment, and nothing is lost.

`WorkerPool` (pool.py) starts it with a main module of its own. A supervisor imports math-verify once and waits; its
child answers. The kernel kills a child that is over its processor time, or over a far longer time of the clock. The
supervisor then forks another, which takes milliseconds where a new import takes seconds; it has a single thread and no
accelerator, so forking is safe. Questions and replies are JSON after a length of four bytes.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys

LENGTH = struct.Struct("<I")
# Exit codes of a child, beside 0 for the end of the questions
RETIRED, OUT_OF_MEMORY = 3, 4
REASONS = {-signal.SIGPROF: "timeout", -signal.SIGALRM: "timeout", OUT_OF_MEMORY: "memory"}


def read_message(descriptor: int) -> dict | None:
    """The next message of a pipe; `None` at its end."""
    header = _read_exactly(descriptor, LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(descriptor, LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def write_message(descriptor: int, message: dict) -> None:
    """Write a message to a pipe, whole."""
    body = json.dumps(message).encode()
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(descriptor, size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main(memory_bytes: int) -> None:
    """Answer questions until standard input ends, each child in so much address space."""
    questions, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b") as nothing:  # what a library prints must not end up between the replies
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    try:
        from troll_trl.rewards.verifier.symbolic import answer_question, warm_up

        warm_up()  # in the supervisor, so that every child is born warm
    except BaseException as error:
        write_message(replies, {"failed": f"{type(error).__name__}: {error}"})
        raise
    with contextlib.suppress(ValueError, OSError):  # a lower limit than ours is set already
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_message(replies, {"ready": True})
    while True:
        child = os.fork()
        if child == 0:
            _serve(questions, replies, answer_question, memory_bytes // 2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != RETIRED:
            write_message(replies, {"died": REASONS.get(status, "crash")})


def _serve(questions: int, replies: int, answer_question, retire_bytes: int) -> None:
    for alarm in (signal.SIGPROF, signal.SIGALRM):  # the kernel kills at the alarm; Python is not asked
        signal.signal(alarm, signal.SIG_DFL)
    try:
        while (question := read_message(questions)) is not None:
            signal.setitimer(signal.ITIMER_PROF, question["seconds"])
            signal.setitimer(signal.ITIMER_REAL, question["wall_seconds"])
            reply = answer_question(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            write_message(replies, reply)
            # Caches of sympy grow. Kilobytes on Linux, bytes on macOS
            unit = 1 if sys.platform == "darwin" else 1024
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > retire_bytes:
                os._exit(RETIRED)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except OSError:  # nobody reads the replies any more
        os._exit(0)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)

"""WorkerPool: processes for computer algebra that may be killed, shared by all calls and threads of this process."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from troll_trl.rewards.verifier.worker import read_message, write_message

# What a worker imports takes one to three seconds; on a machine that is busy starting a training, far longer
START_SECONDS = 120
# A worker ends itself at the limit of a question. One that has not done so by then is stuck in the kernel.
GRACE_SECONDS = 5
# A worker that shares its processor with so many others still gets its time. Against what waits and does not compute
WALL_FACTOR = 30
# What any worker can answer
TRIVIAL = {"gold": "2x", "answer": "x+x"}

# A main module of its own, with the import path of this process: neither the user's script nor what it would need is
# looked at, and this package is found wherever it was imported from.
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from troll_trl.rewards.verifier.worker import main
main(int(sys.argv[2]))
"""


class WorkerError(RuntimeError):
    """A worker process could not be started, or is gone."""


class Worker:
    """One worker process with so much address space, and the pipes to it; [`WorkerError`] if it cannot start."""

    def __init__(self, memory_bytes: int):
        if not sys.executable:
            raise WorkerError("this Python does not know its own executable")
        command = [sys.executable, "-c", _MAIN, json.dumps(sys.path), str(memory_bytes)]
        # One thread per worker, and no accelerator, whatever a sitecustomize may import
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the trainer, which closes the pipe
            )
        except OSError as error:
            raise WorkerError(str(error)) from error
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        hello = self._receive(START_SECONDS)
        if hello is None or "ready" not in hello:
            self.kill()
            raise WorkerError(hello["failed"] if hello else f"it ended with code {self.process.returncode}")

    def ask(self, question: dict, seconds: float) -> dict:
        """
        The reply to one question, or `{"died": "timeout"}`, `"memory"` or `"crash"`; of [`WorkerPool.ask`] also
        `"broken"`, if a fresh worker dies of a trivial question too. `seconds` is processor time; by the clock it is
        [`WALL_FACTOR`] times as long. Only one thread may ask. Raises [`WorkerError`] if the process is gone.
        """
        try:
            write_message(self._questions, question | {"seconds": seconds, "wall_seconds": WALL_FACTOR * seconds})
        except OSError as error:
            raise WorkerError(str(error)) from error
        reply = self._receive(WALL_FACTOR * seconds + GRACE_SECONDS)
        if reply is None:
            raise WorkerError("it did not reply")
        return reply

    def _receive(self, seconds: float) -> dict | None:
        poll = select.poll()  # select() cannot watch descriptors above 1023, which a trainer may well have
        poll.register(self._replies, select.POLLIN)
        return read_message(self._replies) if poll.poll(seconds * 1000) else None

    def kill(self) -> None:
        """End the process and its child, and wait until it is gone. A thread that waits for a reply gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes. No other thread may be using them."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Worker processes with so much address space each, started when needed; by default [`default_size`] of them."""

    def __init__(self, size: int | None = None, memory_bytes: int = 1 << 30):
        self.size = size or default_size()
        self.memory_bytes = memory_bytes
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="troll-verifier")
        self.closed = False

    def ask(self, questions: Sequence[dict], seconds: float) -> list[dict]:
        """
        A reply to each question, in parallel; see [`Worker.ask`]. Any thread may call this; a slow question delays only
        its worker. Raises [`WorkerError`] if no worker can be started.
        """
        futures: list[Future] = []
        try:
            for question in questions:
                futures.append(self._executor.submit(self._ask_one, question, seconds))
            return [future.result() for future in futures]
        except (CancelledError, RuntimeError) as error:  # closed meanwhile, or the interpreter is ending
            raise WorkerError(str(error) or "the pool is closed") from error
        finally:
            for future in futures:
                future.cancel()

    def start(self) -> None:
        """Start the workers in the background. A failure shows when they are needed."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            for _ in range(self.size):
                self._executor.submit(lambda: self._idle.put(self._take()))

    def _ask_one(self, question: dict, seconds: float) -> dict:
        # A worker may have been killed from outside while it was idle, or have had its memory filled by the questions
        # before: once more, on a new one
        for _ in range(2):
            reply = self._ask_worker(question, seconds)
            if reply.get("died") not in ("crash", "memory"):
                return reply
        # Either the answer kills its worker, or workers die here whatever they are asked
        if reply["died"] == "crash" and "result" not in self._ask_worker(TRIVIAL, max(seconds, 1.0)):
            return {"died": "broken"}
        return reply

    def _ask_worker(self, question: dict, seconds: float) -> dict:
        worker = self._take()
        try:
            reply = worker.ask(question, seconds)
        except WorkerError:
            reply = {"died": "crash"}
        if reply.get("died") == "crash":
            self._discard(worker)
        else:
            self._idle.put(worker)
        return reply

    def _take(self) -> Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = Worker(self.memory_bytes)  # at most `size` threads come here at a time
        with self._lock:
            self._workers.add(worker)
            closed = self.closed
        if closed:
            self._discard(worker)
            raise WorkerError("the pool is closed")
        return worker

    def _discard(self, worker: Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.kill()

    def close(self) -> None:
        """Kill all workers. Questions that are being answered count as crashed, those that wait are cancelled."""
        with self._lock:
            self.closed = True
            workers, self._workers = self._workers, set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()

    def forget(self) -> None:
        """In a forked child: let go of the parent's pipes, or its workers would not see that the parent ends."""
        for worker in self._workers:
            worker.close_pipes()


def default_size() -> int:
    """Workers for each process of a training: one for each of its CPUs, shared among the local ranks, at most 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))))

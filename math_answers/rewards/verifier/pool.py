"""WorkerPool: processes for computer algebra that may be killed, shared by all calls and threads of this process."""

import contextlib
import itertools
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing.connection import Pipe

from math_answers.rewards.verifier.worker import receive, send

START_SECONDS = 120  # imports take one to three; on a machine that is busy starting a training, far longer
GRACE_SECONDS = 5  # a worker ends itself at the limit of a question; later than this, it is stuck in the kernel
# Clock time over processor time: a worker that waits and does not compute ends, one that shares its processor does not
WALL_FACTOR = 30
TRIVIAL = {"gold": "2x", "answer": "x+x"}  # any worker can answer it


class WorkerError(RuntimeError):
    """A worker process could not be started, or is gone."""


class Worker:
    """One worker process with this much address space, and the connection to it; [`WorkerError`] if it cannot start."""

    def __init__(self, memory_bytes: int):
        if not sys.executable:
            raise WorkerError("this Python does not know its own executable")
        self.connection, theirs = Pipe()
        # A main module of its own, with the import path of this process: the user's script is not run again, and this
        # package is found wherever it was imported from
        code = f"""
import sys
sys.path[:] = {[str(folder) for folder in sys.path]!r}
from math_answers.rewards.verifier.worker import main
main({theirs.fileno()}, {memory_bytes})
"""
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread per worker, and no accelerator, whatever a sitecustomize may import
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is for the trainer, which closes the connection
            )
        except OSError as error:
            raise WorkerError(str(error)) from error
        finally:
            theirs.close()
        hello = self._receive(START_SECONDS)
        if hello is None or "ready" not in hello:
            self.kill()
            raise WorkerError(hello["failed"] if hello else f"it ended with code {self.process.returncode}")

    def ask(self, question: dict, seconds: float) -> dict:
        """
        The reply to one question, or `{"died": "timeout"}`, `"memory"` or `"crash"`; [`WorkerPool.ask`] adds
        `"broken"`, if a fresh worker dies of a trivial question too. `seconds` is processor time; by the clock it is
        [`WALL_FACTOR`] times as long. Only one thread may ask. Raises [`WorkerError`] if the process is gone.
        """
        with contextlib.suppress(OSError):
            send(self.connection, question | {"seconds": seconds, "wall_seconds": WALL_FACTOR * seconds})
            reply = self._receive(WALL_FACTOR * seconds + GRACE_SECONDS)
            if reply is not None:
                return reply
        raise WorkerError("it did not reply")

    def _receive(self, seconds: float) -> dict | None:
        with contextlib.suppress(EOFError, OSError):
            return receive(self.connection) if self.connection.poll(seconds) else None
        return None

    def kill(self) -> None:
        """End the process and its child, and wait until it is gone. A thread that waits for a reply gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Budget:
    """Processor time for the questions of one batch, in seconds. Any thread may spend it."""

    def __init__(self, seconds: float):
        self.left = seconds
        self._lock = threading.Lock()

    def spend(self, seconds: float) -> None:
        with self._lock:
            self.left -= seconds


class WorkerPool:
    """Worker processes with this much address space each, started if needed; by default [`default_size`] of them."""

    def __init__(self, size: int | None = None, memory_bytes: int = 1 << 30):
        self.size = size or default_size()
        self.memory_bytes = memory_bytes
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="troll-verifier")
        self.closed = False

    def ask(self, questions: Sequence[dict], seconds: float, budget: Budget | None = None) -> list[dict]:
        """A reply to each question, in parallel; see [`Worker.ask`]. `{"died": "budget"}` if the others have spent the
        `budget`. Any thread may call this; a slow question delays only its worker. Raises [`WorkerError`] if no worker
        can be started."""
        budget = budget or Budget(math.inf)
        try:
            return list(
                self._executor.map(self._ask_one, questions, itertools.repeat(seconds), itertools.repeat(budget))
            )
        except (CancelledError, RuntimeError) as error:  # closed meanwhile, or the interpreter is ending
            raise WorkerError(str(error) or "the pool is closed") from error

    def start(self) -> None:
        """Start the workers in the background. A failure shows when they are needed."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            for _ in range(self.size):
                self._executor.submit(lambda: self._idle.put(self._take()))

    def _ask_one(self, question: dict, seconds: float, budget: Budget) -> dict:
        if budget.left <= 0:
            return {"died": "budget"}
        # A worker may have been killed from outside while it was idle, or have had its memory filled by the questions
        # before: once more, on a new one
        for _ in range(2):
            reply = self._ask_worker(question, seconds)
            budget.spend(reply.pop("spent", seconds))
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
        """In a forked child: close the parent's connections, or its workers would not see that the parent ends."""
        for worker in self._workers:
            worker.connection.close()


def default_size() -> int:
    """Workers for each process of a training: one for each of its CPUs, shared among the local ranks, at most 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))))

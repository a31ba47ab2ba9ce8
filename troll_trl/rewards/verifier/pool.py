"""Pool: worker processes for math-verify. What a policy writes may take years or gigabytes there."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

MAX_WORKERS = 8


class Worker:
    """One process that answers questions, see `worker.serve`."""

    def __init__(self):
        # Its own main module, since the user's would run again; its own session, since Ctrl-C is meant for the trainer
        code = f"import sys; sys.path[:] = {[str(folder) for folder in sys.path]!r}\n"
        code += "from troll_trl.rewards.verifier.worker import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )

    def ask(self, question: dict, seconds: float) -> dict:
        """Return `{"right": bool, "spent": seconds}`, or `{"died": ...}` with `"timeout"`, `"crash"`, or `"worker"` if
        the process is gone."""
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps(question | {"seconds": seconds}), file=self.process.stdin, flush=True)
            if self.process.stdout and (line := self.process.stdout.readline()):
                return json.loads(line)
        self.kill()
        return {"died": "worker"}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pool:
    """Workers, started as needed: one for each processor of this rank, at most `MAX_WORKERS`. Any thread may ask."""

    def __init__(self):
        cpus = len(os.sched_getaffinity(0))
        self.size = max(1, min(MAX_WORKERS, cpus // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._workers: list[Worker] = []
        self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="verifier")

    def ask(self, questions: list[dict], seconds: float, budget: float) -> list[dict]:
        """Reply to each question within `seconds`; with `{"died": "budget"}` if the others have used up `budget`."""
        left = [budget]

        def ask_one(question: dict) -> dict:
            if left[0] <= 0:
                return {"died": "budget"}
            worker = self._take()
            reply = worker.ask(question, seconds)
            left[0] -= reply.get("spent", seconds)
            if reply.get("died") == "worker":
                self._workers.remove(worker)
            else:
                self._idle.put(worker)
            return reply

        return list(self._executor.map(ask_one, questions))

    def _take(self) -> Worker:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        self._workers.append(worker := Worker())
        return worker

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()

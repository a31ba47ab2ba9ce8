"""The rollout worker's process ends with the trainer's, and names a reward that hangs. The trainer notices its end."""

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from troll_trl.experimental.async_grpo.trl_compat import _AsyncRolloutLoop, is_async_callable


class WatchedRolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, in a process that ends when the trainer's does. A reward function that takes longer than
    `hang_seconds` ends the run, with its name."""

    reward_funcs: list[Callable[..., Any]]  # TRL's, declared for the type checker

    def __init__(self, *, hang_seconds: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.hang_seconds = hang_seconds
        named = zip(self.reward_funcs, self.reward_func_names, strict=False)  # environments have names too
        self.reward_funcs = [self._watched(function, name) for function, name in named]
        if (trainer := multiprocessing.parent_process()) is not None:
            threading.Thread(target=_end_after, args=[trainer], daemon=True).start()

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        async def watched_async(**kwargs: Any):
            with self._watch(name):
                return await function(**kwargs)

        def watched(**kwargs: Any):
            with self._watch(name):
                return function(**kwargs)

        return watched_async if is_async_callable(function) else watched

    @contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        timer = threading.Timer(self.hang_seconds, self._report_hang, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report_hang(self, name: str) -> None:
        advice = f"it has not returned for {self.hang_seconds:g} s. If it may take longer, raise"
        info = ("TimeoutError", f"the reward function `{name}` hangs: {advice} `heartbeat_stale_after_s`.", "")
        self._exception_info_queue.put(info)  # before the event, as TRL does
        self._failed_event.set()


class StopEvent:
    """The part of multiprocessing's `Event` that TRL's worker uses. `Event.set` would wait for ever for a process that
    was killed while it waited."""

    def __init__(self, context: Any):
        self._semaphore = context.Semaphore(0)

    def set(self) -> None:
        self._semaphore.release()

    def wait(self) -> None:
        self._semaphore.acquire()
        self._semaphore.release()


def check_worker(worker: AsyncRolloutWorker) -> None:
    """Raise a `RuntimeError` with what happened if the worker's process has failed or is gone. TRL's `check_health`
    asks only after the queue is empty, and misses a process that was killed for `heartbeat_stale_after_s` seconds."""
    process = worker._process
    if process is None or not (worker._failed_event.is_set() or process.exitcode is not None):
        return
    try:
        name, message, trace = worker._exception_info_queue.get(timeout=5)
        reason = f"{name}: {message}\n{trace}"
    except queue.Empty:
        killed = ", killed by this signal" if (process.exitcode or 0) < 0 else ""
        reason = f"it ended with exit code {process.exitcode}{killed}"
    raise RuntimeError(
        f"The rollout worker's process failed: {reason.strip()}\nMend the cause, then continue from the newest "
        "checkpoint with `trainer.train(resume_from_checkpoint=True)`."
    )


def _end_after(trainer: Any) -> None:
    trainer.join()
    os._exit(1)  # threads that wait for a reward or the server would keep the process alive

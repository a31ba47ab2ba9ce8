"""CheckedQueue: the samples between rollout worker and trainer, without those whose old policy is incomplete."""

import math
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from troll_trl.trainers.engine_rows import NO_LOG_PROB

logger = get_logger(__name__)

_MOST_IN_A_ROW = 1000  # then all samples are bad, and the trainer would wait forever
_WAITS_PER_WARNING = 12  # TRL's trainer waits five seconds, then looks after the worker


class CheckedQueue:
    """Takes the place of the worker's `queue`, which TRL's trainer drains."""

    def __init__(
        self,
        queue: Any,
        support_size: int | None,  # K, or `None` if samples carry no support, see `sample_log_probs`
        is_stale: Callable[[RolloutSample], bool],  # whether TRL will drop a sample because of its age
        check_worker: Callable[[], None],  # called before each wait for a sample; raises if none will come
        while_waiting: Callable[[], None],  # called about once a minute while there is no sample
    ):
        self.queue, self.support_size = queue, support_size
        self.is_stale, self.check_worker, self.while_waiting = is_stale, check_worker, while_waiting
        self.dropped = 0  # samples, since it was last set to 0
        self.dropped_groups: set[int] = set()  # groups that lost a sample, here or in TRL
        self._in_a_row = self._waits = 0

    def qsize(self) -> int:
        return self.queue.qsize()

    def get(self, *args: Any, **kwargs: Any) -> RolloutSample:
        """The next sample that can be trained on. Raises a `ValueError` for a sample that does not carry what the trust
        region needs, and a `RuntimeError` after a thousand dropped samples in a row."""
        while True:
            sample = self._take(*args, **kwargs)
            self._check_shape(sample)
            if (reason := _why_unusable(sample)) is None:
                self._in_a_row = 0
                self._check_support(sample)
                if self.is_stale(sample):
                    self.dropped_groups.add(sample.group_id)
                return sample
            self.dropped += 1
            self.dropped_groups.add(sample.group_id)
            self._in_a_row += 1
            if self._in_a_row == 1:
                logger.warning(
                    f"A sample of group {sample.group_id} is dropped: {reason}. See `troll/dropped_samples`."
                )
            if self._in_a_row >= _MOST_IN_A_ROW:
                raise RuntimeError(f"{self._in_a_row} samples in a row were dropped. The last one: {reason}.")

    def _take(self, *args: Any, **kwargs: Any) -> RolloutSample:
        self.check_worker()
        try:
            sample = self.queue.get(*args, **kwargs)
        except queue.Empty:
            self.check_worker()  # says more than TRL, which asks next
            self._waits += 1
            if self._waits % _WAITS_PER_WARNING == 0:
                self.while_waiting()
            raise
        self._waits = 0
        return sample

    def _check_shape(self, sample: RolloutSample):
        length, size = len(sample.input_ids), self.support_size
        expected = (length,) if size is None else (length, 2 * size)
        shape = np.shape(sample.old_log_probs)
        if shape == expected:
            return
        advice = (
            "This trust region reads the sampled token alone: give its log-probability."
            if size is None
            else f"The trust region needs the engine's {size - 1} most likely other tokens. Make `old_log_probs` with "
            "`sample_log_probs`, leave `rollout_worker` out, or choose a mask or a penalty with a binary "
            "`divergence_type`."
        )
        raise ValueError(f"The `old_log_probs` of a sample have shape {shape}, expected {expected}. {advice}")

    def _check_support(self, sample: RolloutSample):
        """Refuse rows whose tokens are no distribution: a token with two masses, or masses above 1."""
        if self.support_size is None:
            return
        trained = np.asarray(sample.completion_mask, dtype=bool)
        rows, sampled = np.asarray(sample.old_log_probs)[trained], np.asarray(sample.input_ids)[trained]
        others, mass = rows[:, self.support_size + 1 :], np.exp(rows[:, : self.support_size]).sum(1)  # (N, K-1), (N,)
        ids = np.sort(np.where(others < 0, -1 - np.arange(others.shape[1]), others), 1)  # unused slots differ
        if (others == sampled[:, None]).any() or (ids[:, 1:] == ids[:, :-1]).any():
            wrong = "name a token twice: the sampled token is among the likely others, or one of them is repeated"
        elif (mass > 1.01).any():
            wrong = f"have a mass of {mass.max():.3g} at a position: they are no log-probabilities after a softmax"
        else:
            return
        raise ValueError(f"The `old_log_probs` of a sample {wrong}. Leave the sampled token out of `others`.")


def _why_unusable(sample: RolloutSample) -> str | None:
    if not math.isfinite(sample.advantage):
        return f"the advantage is {sample.advantage}"
    trained = np.asarray(sample.completion_mask, dtype=bool)
    log_probs = np.asarray(sample.old_log_probs).reshape(len(trained), -1)[trained]  # (tokens, 1) or (tokens, 2K)
    sampled = log_probs[:, 0]
    bad = np.isnan(log_probs).any(1) | ~np.isfinite(sampled) | (sampled <= NO_LOG_PROB)
    if bad.any():
        return f"the engine's log-probabilities of {bad.sum()} of {len(bad)} tokens are missing, NaN or {NO_LOG_PROB:g}"
    return None

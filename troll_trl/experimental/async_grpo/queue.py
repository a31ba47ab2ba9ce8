"""CheckedQueue: the samples between rollout worker and trainer, without those whose old policy is incomplete."""

import math
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from troll_trl.experimental.async_grpo.engine import NO_LOG_PROB

logger = get_logger(__name__)

_MOST_IN_A_ROW = 1000  # then every sample is one to be dropped, and the trainer would wait forever


class CheckedQueue:
    """Takes the place of the worker's `queue`, which TRL's trainer drains. `support_size` is K, or `None` if samples
    carry no support, see [`sample_log_probs`]."""

    def __init__(self, queue: Any, support_size: int | None):
        self.queue, self.support_size = queue, support_size
        self.dropped = 0  # samples, since it was last set to 0
        self._in_a_row = 0

    def qsize(self) -> int:
        return self.queue.qsize()

    def get(self, *args: Any, **kwargs: Any) -> RolloutSample:
        """The next sample that can be trained on. Raises a `ValueError` for a sample without the support that the trust
        region needs, or with a support without need, and a `RuntimeError` after a thousand dropped samples in a row."""
        while True:
            sample = self.queue.get(*args, **kwargs)
            self._check_shape(sample)
            if (reason := _why_unusable(sample)) is None:
                self._in_a_row = 0
                return sample
            self.dropped += 1
            self._in_a_row += 1
            if self._in_a_row == 1:
                logger.warning(
                    f"A sample of group {sample.group_id} is dropped: {reason}. See `troll/dropped_samples`."
                )
            if self._in_a_row >= _MOST_IN_A_ROW:
                raise RuntimeError(f"{self._in_a_row} samples in a row were dropped. The last one: {reason}.")

    def _check_shape(self, sample: RolloutSample):
        length, size = len(sample.input_ids), self.support_size
        expected = (length,) if size is None else (length, 2 * size)
        shape = np.shape(sample.old_log_probs)
        if shape == expected:
            return
        advice = (
            "Binary masks read the sampled token alone: give its log-probability."
            if size is None
            else f"The trust region needs the engine's {size - 1} most likely other tokens. Make `old_log_probs` with "
            "`sample_log_probs`, leave `rollout_worker` out, or choose the mask 'binary_tv' or 'binary_kl'."
        )
        raise ValueError(f"The `old_log_probs` of a sample have shape {shape}, expected {expected}. {advice}")


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

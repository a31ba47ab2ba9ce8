"""The old policy from the pass that scores a rollout batch to the losses that read it: ragged, and on the host."""

from typing import Any

import torch

from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import UNUSED

# Column of the rollout batch that holds the old policy: a list of rows, which TRL shuffles and splits with its tensors;
# then, of each micro-batch, one distribution
COLUMN = "troll_old_policy"
# What the loss reads in its place
TOKEN_IDS, LOG_PROBS = "troll_old_token_ids", "troll_old_log_probs"
# TRL's column of the sampled tokens' old log-probabilities, which is all that a trust region without a support reads
OLD_LOG_PROBS = "old_per_token_logps"

Inputs = dict[str, Any]


def join_rows(micro_batches: list[Inputs], device: torch.device) -> None:
    """Make one distribution of the rows of each micro-batch, in pinned memory if an accelerator trains."""
    for inputs in micro_batches:
        if isinstance(inputs.get(COLUMN), list):
            inputs[COLUMN] = RaggedDistribution.concatenate(inputs[COLUMN]).to_host_of(device)


def with_dense(inputs: Inputs, old: RaggedDistribution) -> Inputs:
    """A micro-batch with its old policy, which is on the device of its tensors, as `(B, C, K)` and `(B, C, K + 1)`."""
    # Tokens that the head scores, tools' among them
    sampled_ids = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, UNUSED)
    dense = old.dense(sampled_ids)
    others = {name: value for name, value in inputs.items() if name != COLUMN}
    return others | {TOKEN_IDS: dense.token_ids, LOG_PROBS: dense.log_probs}


class CopiesAhead:
    """
    Copies the old policies of micro-batches to the device, one while the micro-batch before it is in work.

    On a GPU by a stream of its own, so that the copy waits for no computation, nor any computation for it.

    Args:
        device (`torch.device`):
            Of the training.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._started: tuple[RaggedDistribution, RaggedDistribution] | None = None  # on the host, on the device

    def start(self, old: RaggedDistribution) -> None:
        """Begin the copy of a distribution that [`take`] will ask for next."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            self._started = old, old.to(self._device, non_blocking=True)

    def take(self, old: RaggedDistribution) -> RaggedDistribution:
        """The distribution on the device, copied now unless [`start`] has begun it."""
        if self._started is None or self._started[0] is not old:
            self.start(old)
        assert self._started is not None
        copy, self._started = self._started[1], None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The memory is the other stream's, and must not be given away before this one has read it
            for tensor in copy.tensors.values():
                tensor.record_stream(current)
        return copy

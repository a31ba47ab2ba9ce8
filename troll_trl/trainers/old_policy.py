"""The old policy from the pass that scores a rollout batch to the losses that read it: ragged, and on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from troll_trl.trainers.bounded_policy import equal_to_rounding, without_supports
from troll_trl.trainers.head_check import check_head
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

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


class Recorder:
    """
    Keeps the old policy while TRL scores a rollout, in the pass that TRL makes anyway.

    That pass comes first. The reference pass goes, with PEFT, through the same model, and in an idle GRPO run it is the
    only one: it must not be taken for the old policy. `support_size` and `tail_mass` say how many tokens to keep, as in
    [`~troll_trl.trust_region.sparse.sparsify`]; the head divides logits by `temperature`.
    """

    def __init__(self, support_size: int, tail_mass: float, temperature: float):
        self.support_size, self.tail_mass, self.temperature = support_size, tail_mass, temperature
        self.waits = False  # for the pass that scores the rollout with the current weights
        self.recorded: RaggedDistribution | None = None
        self._log_probs: torch.Tensor | None = None  # (B, C), of the sampled tokens
        self._parts: list[RaggedDistribution] = []
        self._head_checked = False

    @contextmanager
    def recording(self, wanted: bool) -> Iterator[None]:
        """Around TRL's generation and scoring, with an old policy `wanted`, which is `recorded` at the end."""
        self.waits, self.recorded, self._log_probs = wanted, None, None
        try:
            yield
        finally:
            self.waits, self._log_probs = False, None

    def wrap(self, model: Any, completion_length: int) -> Callable:
        """A callable in place of `model` that keeps the sparse distributions of the completions it scores."""
        self.waits, self._parts = False, []

        def old_policy(**model_inputs):
            if not self._head_checked:
                check_head(model, model_inputs, completion_length, self.support_size, self.temperature)
                self._head_checked = True
            selection = {"support_size": self.support_size, "tail_mass": self.tail_mass, "check_finite": False}
            output = model(**model_inputs, **selection)
            kept = slice(-completion_length, None)  # completion tokens, (b, C) of one chunk of rows
            dense = SparseDistribution(output.token_ids[:, kept], output.sparse_log_probs[:, kept])
            self._parts.append(RaggedDistribution.pack(dense).to("cpu"))
            return without_supports(output, output.log_probs)

        return old_policy

    def finish(self, log_probs: torch.Tensor) -> None:
        """After the pass of [`wrap`], with the log-probabilities `(B, C)` that TRL got from it."""
        self.recorded, self._log_probs, self._parts = RaggedDistribution.concatenate(self._parts), log_probs, []

    def equal_where_rounded(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The reference's log-probabilities `(B, C)`, or the old policy's where the two differ only by rounding."""
        return log_probs if self._log_probs is None else equal_to_rounding(log_probs, self._log_probs)

"""The old policy from the pass that scores a rollout batch to the losses that read it: ragged, and on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers.utils import is_peft_available

from troll_trl.trainers.head_check import check_head
from troll_trl.trainers.trust_region_model import snap_to_reference, without_supports
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

# Column of the rollout batch that holds the old policy: a list of rows, which TRL shuffles and splits with its tensors.
# `join_rows` then makes one distribution of the rows of each micro-batch
OLD_POLICY_KEY = "troll_old_policy"
# The loss reads these two in its place
TOKEN_IDS, LOG_PROBS = "troll_old_token_ids", "troll_old_log_probs"
# TRL's column of the sampled tokens' old log-probabilities, which is all that a trust region without a support reads
TRL_OLD_LOG_PROBS = "old_per_token_logps"

Inputs = dict[str, Any]
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # log-probabilities, entropies, MoE loss


def join_rows(micro_batches: list[Inputs], device: torch.device) -> None:
    """Make one distribution of the rows of each micro-batch, in pinned memory if an accelerator trains."""
    for inputs in micro_batches:
        if isinstance(inputs.get(OLD_POLICY_KEY), list):
            inputs[OLD_POLICY_KEY] = RaggedDistribution.concatenate(inputs[OLD_POLICY_KEY]).to_host_of(device)


def with_dense(inputs: Inputs, old: RaggedDistribution) -> Inputs:
    """A micro-batch to which the old policy is added, on the device of its tensors: ids `(B, C, K)` and
    log-probabilities `(B, C, K + 1)`."""
    # The head scores these tokens, and tools' tokens are among them
    sampled_ids = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, UNUSED)
    dense = old.dense(sampled_ids)
    others = {name: value for name, value in inputs.items() if name != OLD_POLICY_KEY}
    return others | {TOKEN_IDS: dense.token_ids, LOG_PROBS: dense.log_probs}


class Pass(Enum):
    """What TRL asks `_get_per_token_logps_and_entropies` for. A [`OldPolicyCache`] tells which of the four it is."""

    OLD_POLICY = "record the old policy"
    ENGINE = "answer for the engine, whose policy is the old one"
    LOSS = "score the policy for the loss"
    REFERENCE = "score a reference"


class OldPolicyCache:
    """
    Keeps the old policy while TRL scores a rollout, in the pass that TRL makes anyway.

    The old policy is the model that generated the rollout, with the adapters that it had then. TRL scores references,
    too: another model, or with PEFT the same one with its adapter off or exchanged. In an idle GRPO run a reference is
    all that it scores. None of them is taken for the old policy, whatever comes first.

    `support_size` and `tail_mass` say how many tokens to keep, as in [`~troll_trl.trust_region.sparse.sparsify`]; the
    head divides logits by `temperature`. A `support_size` of 0 says that the trust region reads the sampled token
    alone.
    """

    own_pass = Pass.OLD_POLICY  # the pass of the policy that generated the rollout
    nothing_scored = False  # whether no token of the last rollout batch was scored, on any rank

    def __init__(self, support_size: int, tail_mass: float, temperature: float):
        self.support_size, self.tail_mass, self.temperature = support_size, tail_mass, temperature
        self._policy: Any = None  # TRL's model, while it generates and scores a rollout
        self._adapters: frozenset[Any] = frozenset()  # the adapters that act in this model
        self._wanted = False  # whether a loss will read the old policy
        self._support: RaggedDistribution | None = None  # the rollout's old policy, once recorded
        self._log_probs: torch.Tensor | None = None  # (B, C), of the sampled tokens, once scored
        self._head_checked = False

    @contextmanager
    def rollout(self, policy: nn.Module, wanted: bool) -> Iterator[None]:
        """Around TRL's generation and scoring of a rollout by a `policy`, which is the old one. If it is `wanted`,
        [`add_to`] must follow."""
        self._policy, self._adapters, self._wanted = unwrapped(policy), acting_adapters(policy), wanted
        self._support = self._log_probs = None
        try:
            yield
        finally:
            self._policy = None

    def pass_of(self, model: Any) -> Pass:
        """The purpose for which TRL has `model` score completions. Once the old policy is scored, any other pass of a
        rollout is a reference's."""
        if self._policy is None:
            return Pass.LOSS
        is_policy = unwrapped(model) is self._policy and acting_adapters(model) == self._adapters
        return self.own_pass if is_policy and self._log_probs is None else Pass.REFERENCE

    def record(self, score: Callable[[Any], Scores], model: Any, completion_length: int) -> Scores:
        """Return what TRL's `score` makes of the `model`, in the pass of the old policy. If a loss will read its sparse
        distributions, they are kept."""
        if not (self._wanted and self.support_size):
            scores = score(model)
        else:
            parts: list[RaggedDistribution] = []  # one for each chunk of rows that TRL scores
            scores = score(self._recording(model, completion_length, parts))
            self._support = RaggedDistribution.concatenate(parts)
        self._log_probs = scores[0]
        return scores

    def _recording(self, model: Any, completion_length: int, parts: list[RaggedDistribution]) -> Callable:
        """A callable in place of `model` that adds the sparse distributions of the completions it scores to `parts`."""

        def old_policy(**model_inputs):
            if not self._head_checked:
                check_head(model, model_inputs, completion_length, self.support_size, self.temperature)
                self._head_checked = True
            selection = {"support_size": self.support_size, "tail_mass": self.tail_mass, "check_finite": False}
            output = model(**model_inputs, **selection)
            kept = slice(-completion_length, None)  # completion tokens, (b, C) of one chunk of rows
            dense = SparseDistribution(output.token_ids[:, kept], output.sparse_log_probs[:, kept])
            parts.append(RaggedDistribution.pack(dense).to("cpu"))
            return without_supports(output, output.log_probs)

        return old_policy

    def answer(self, completion_length: int) -> torch.Tensor:
        """The log-probabilities `(B, completion_length)` of an engine's policy, for its pass: no model scores it."""
        raise NotImplementedError

    def snap_to_old_policy(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The reference's log-probabilities `(B, C)`, but the old policy's for tokens at which both differ by rounding
        alone. If TRL scores the reference first, all stay as they are."""
        own = self._log_probs
        return log_probs if own is None or self._support is None else snap_to_reference(log_probs, own)

    def add_to(self, batch: Inputs) -> int | None:
        """Add the old policy to a rollout batch, if it is wanted. Returns the number of tokens for which an engine gave
        no old policy, over all ranks; `None` without an engine."""
        support, log_probs = self._support, self._log_probs
        self._support = self._log_probs = None
        if not self._wanted:
            return None
        if support is not None:
            if "tool_mask" in batch:  # a tool's tokens are scored, but not trained on
                support = support.keep(batch["tool_mask"].cpu().bool())
            batch[OLD_POLICY_KEY] = support.rows()
        elif log_probs is not None:  # RLOO keeps only their sum over a completion
            batch.setdefault(TRL_OLD_LOG_PROBS, log_probs)
        if (OLD_POLICY_KEY if self.support_size else TRL_OLD_LOG_PROBS) not in batch:
            raise RuntimeError(
                "TRL has not scored the rollout with the model that generated it and the adapters that it had then, so "
                "there is no old policy: TRL scores under another condition than troll_trl expects, or another model; "
                "see trainers/trl_compat.py."
            )
        return None


def unwrapped(model: Any) -> Any:
    """A model without what accelerate and `torch.compile` put around it; anything else as it is."""
    return extract_model_from_parallel(model, keep_torch_compile=False) if isinstance(model, nn.Module) else model


def acting_adapters(model: Any) -> frozenset[Any]:
    """What PEFT's adapters do in a model, to compare two moments: which ones are active in its layers, and whether they
    are switched off. Empty without an adapter."""
    if not (isinstance(model, nn.Module) and is_peft_available()):
        return frozenset()
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: set[Any] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            found.add((module.disable_adapters, *module.active_adapters))
        elif isinstance(module, PeftModel):
            # A learned prompt has no layers: PEFT switches it off by the model's `forward`, and sets this
            found.add((getattr(module, "_adapters_disabled", False), str(module.active_adapter)))
    return frozenset(found)

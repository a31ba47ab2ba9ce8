"""NonFiniteMixin: an update that would read a NaN or an infinity is skipped, on every rank, and said so."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.distributed.tensor import DTensor
from trl.trainer.utils import is_async_callable

from troll_trl.kernels.dispatch import has_float64

if TYPE_CHECKING:  # what stands behind the mixin
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

# Columns of the rollout batch that the loss reads, and what stands at their masked positions instead. Nothing at a
# masked position may enter an exp: 0·exp(200) is NaN, and so is its gradient.
_COLUMNS = {
    "advantages": 0.0,
    "old_per_token_logps": 0.0,
    "old_logps": 0.0,  # RLOO: of a completion
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
    "troll_old_log_probs": None,  # only counted: the loss puts all mass of its masked positions in the rest
}
# What is counted, one slot each. TRL means something by NaN in `sampling_per_token_logps`: vLLM gave no value.
_COUNTED = (*(name for name in _COLUMNS if name != "sampling_per_token_logps"), "logits", "loss", "gradient")
_TOKENS = len(_COUNTED)  # the last slot: live tokens
# What the loss moves of TRL's adaptive entropy bonus
_ENTROPY_CONTROL = ("entropy_coef", "_last_world_entropy")


@dataclass
class SkippedUpdates:
    """Counts of one rank, which are equal on all: updates and skipped ones since the last log line, those skipped in a
    row, and the rewards of the current rollout batch that were not finite, in words."""

    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0
    bad_rewards: list[str] = field(default_factory=list)

    def pop(self) -> dict[str, float]:
        """The metric of a log line; empty when there was no update since the last one."""
        metrics: dict[str, float] = {"troll/skipped_updates": self.skipped} if self.updates else {}
        self.updates = self.skipped = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class NonFiniteMixin(_Trainer):
    """
    Stands before a TROLL trainer in the list of bases, and keeps numbers that are not finite out of the weights.

    What the loss reads (advantages, cached log-probabilities, logits), the loss and the norm of the gradient are
    counted on the device. Once per update the counts of all ranks are gathered, in one small collective. If any is not
    zero, or if no rank has a live token, the gradient is dropped before the optimizer sees it: weights, moments, weight
    decay and the learning rate schedule stay as they are, bit for bit. A rollout batch with a reward that is not finite
    is not trained on at all. `troll/skipped_updates` counts; after `max_skipped_updates` in a row the run stops.

    With a float16 gradient scaler, a gradient that overflows stays the scaler's to skip, uncounted, for as long as it
    can lower its scale; of what is skipped here it learns nothing. DeepSpeed, and layer-wise and LOMO optimizers, take
    their step inside the backward: there the run stops before it, but for an update without a live token, in which
    momentum moves the weights, and for a gradient that alone is not finite.

    Overridden are `train`, `_calculate_rewards`, `_generate_and_score_completions`, `compute_loss`,
    `_compute_loss`, `_get_per_token_logps_and_entropies` and `_get_grad_norm`.
    """

    # Declared for the type checker
    reward_funcs: list[Callable]  # TRL's
    counters: dict[str, dict[str, Any]]  # CheckpointMixin's

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        device = self.accelerator.device
        dtype = torch.float64 if has_float64(device) else torch.float32
        self._bad_counts = torch.zeros(_TOKENS + 1, dtype=dtype, device=device)
        self._live: Any = None  # (B, C) bool while a loss is computed: the tokens that it is over
        self._skips = self.counters["train"]["skipped_updates"] = SkippedUpdates()
        self._entropy_control: dict[str, float] = {}  # TRL's, as it was before the last loss

    def train(self, *args, **kwargs):
        self._bad_counts.zero_()  # an earlier call may have ended in the middle of an update
        self._skips.updates = self._skips.skipped = self._skips.in_a_row = 0
        return super().train(*args, **kwargs)

    # -- Rewards ----------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        functions = self.reward_funcs
        self.reward_funcs = [_nan_to_inf(function) for function in functions]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        # The rewards (completions, functions) of all ranks. To TRL, NaN is a reward that was not given (None), which a
        # reward model never means.
        is_model = torch.tensor([isinstance(function, nn.Module) for function in functions], device=rewards.device)
        bad = rewards.isinf() | (rewards.isnan() & is_model)
        per_rank = len(rewards) // self.accelerator.num_processes
        names = [
            f"reward {self.reward_func_names[column]!r} at row {row} of the rollout batch (rank {row // per_rank}, row "
            f"{row % per_rank} there)"
            for row, column in bad.nonzero().tolist()
        ]
        if self.model.training:
            self._skips.bad_rewards = names
        elif names:
            logger.warning(f"In the evaluation at step {self.state.global_step}, not finite: {_some(names)}.")
        return rewards.masked_fill(bad, torch.nan)  # so that TRL's averages stay those of the other rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self._skips.bad_rewards = []
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and self._skips.bad_rewards:
            # The other rewards of the group, or of the batch, were normalised with it. NaN stays with the rollout
            # batch, also in a checkpoint, until its last update has been skipped.
            output["advantages"] = torch.full_like(output["advantages"], torch.nan)
        return output

    # -- Loss -------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        self._live = mask.bool()  # (B, C)
        inputs, counts = without_masked(inputs, self._live)
        if self.model.training:
            for name, count in counts.items():
                self._count(name, count)
            self._bad_counts[_TOKENS] += self._live.sum()
            self._entropy_control = {name: getattr(self, name) for name in _ENTROPY_CONTROL if hasattr(self, name)}
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._live = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self._count("loss", ~loss.detach().isfinite())
            if stepper := self._steps_in_backward():
                self._stop_before_its_step(stepper)
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._live is None:
            return log_probs, entropies, aux_loss
        log_probs = log_probs.masked_fill(~self._live, 0.0)  # (B, C), also where a tool's tokens have a value
        if entropies is not None:  # of all logits of a position
            finite = entropies.detach().isfinite()
            if self.model.training:
                self._count("logits", (self._live & ~finite).sum())
            entropies = entropies.masked_fill(~(self._live & finite), 0.0)
        return log_probs, entropies, aux_loss

    def _count(self, name: str, count: torch.Tensor):
        self._bad_counts[_COUNTED.index(name)] += count

    # -- Update -----------------------------------------------------------------------------------------------------

    def _get_grad_norm(self, model, grad_norm=None):
        # The last call before the optimizer's step that knows the norm, with `max_grad_norm` 0 too
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._skips.updates += 1
        if self._steps_in_backward():
            return grad_norm
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else torch.as_tensor(grad_norm)
        if not norm.isfinite() and not self._scaler_handles_overflow():
            self._count("gradient", torch.ones((), device=self._bad_counts.device))
        bad, tokens = self._gather_counts()
        skip = bool(bad) or tokens == 0
        self._skips.skipped += skip
        if skip:
            model.zero_grad()  # without gradients the optimizer does nothing, weight decay included
            for name, value in self._entropy_control.items():
                setattr(self, name, value)  # the loss has moved it by an entropy that says nothing
        self._pass_by_the_scaler(skip)
        self._report(bad, tokens)
        return grad_norm

    def _pass_by_the_scaler(self, skip: bool):
        scaler = self.accelerator.scaler
        if scaler is None or skip:
            # As after an overflow in float16, the Trainer then leaves the learning rate schedule where it is
            self.optimizer._is_overflow = skip
        if scaler is not None:
            # It would lower its scale for a bad reward, and take an update without gradients for a good one
            self.optimizer.scaler = None if skip else scaler
            if skip:
                scaler.update(scaler.get_scale())  # forgets the gradient, and keeps its scale

    def _steps_in_backward(self) -> str | None:
        """Who takes the step of the optimizer before all gradients are there, if anyone does."""
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if optimizer.endswith("_layerwise") or optimizer in ("lomo", "adalomo"):
            return f"`optim` {optimizer}"
        return "DeepSpeed" if self.is_deepspeed_enabled else None

    def _scaler_handles_overflow(self) -> bool:
        return self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1

    def _gather_counts(self) -> tuple[str, float]:
        """What was not finite since the last update, in words, and the live tokens; the same on all ranks."""
        counts = self.accelerator.gather(self._bad_counts.unsqueeze(0)).tolist()  # (ranks, slots)
        self._bad_counts.zero_()
        found = []
        for rank, row in enumerate(counts):
            names = [name for name, count in zip(_COUNTED, row[:_TOKENS], strict=True) if count > 0]
            # After the reduction every rank has the sum of all gradients
            local = [name for name in names if name != "gradient"]
            if local:
                found.append(f"rank {rank}: {', '.join(local)}")
            elif names and rank == 0:
                found.append("gradient (its norm over all ranks)")
        return "; ".join(found), sum(row[_TOKENS] for row in counts)

    def _report(self, bad: str, tokens: float):
        step = self.state.global_step + 1
        if not bad:
            # Neither good nor bad: an update without a live token leaves the count of those in a row alone
            if tokens > 0:
                self._skips.in_a_row = 0
            else:
                logger.warning(f"Update {step} skipped: every completion in it is masked, on every rank.")
            return
        self._skips.in_a_row += 1
        if self._skips.bad_rewards:
            bad += f", because of {_some(self._skips.bad_rewards)}"
        limit = self.args.max_skipped_updates
        logger.warning(
            f"Update {step} skipped, weights and optimizer unchanged. Not finite: {bad}. "
            f"({self._skips.in_a_row} in a row; `max_skipped_updates` is {limit}.)"
        )
        if self._skips.in_a_row >= limit:
            raise FloatingPointError(
                f"Stopped at update {step}: {self._skips.in_a_row} updates in a row were skipped "
                f"(`max_skipped_updates`). Not finite: {bad}. The weights are those of the last good update. {_ADVICE}"
            )

    def _stop_before_its_step(self, stepper: str):
        bad, _ = self._gather_counts()
        if bad:
            raise FloatingPointError(
                f"Stopped before update {self.state.global_step + 1}, which {stepper} cannot skip. Not finite: {bad}. "
                f"{_ADVICE}"
            )


_ADVICE = (
    "A reward must return finite numbers, or None where it does not apply. If logits or gradients overflow, lower the "
    "learning rate or train in bfloat16 or float32 rather than float16."
)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_masked(inputs: dict[str, Any], live: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    A micro-batch whose masked positions hold harmless values, whatever stood there, and how many of the live values are
    not finite.

    Args:
        inputs (`dict[str, Any]`):
            A micro-batch of TRL's, which is left as it is.
        live (`torch.Tensor` of shape `(B, C)`, bool):
            The tokens that the loss is over.

    Returns:
        `tuple`: the micro-batch, and by name the counts (scalar tensors). −inf is a number among sparse
        log-probabilities, where it stands for an unused slot.
    """
    inputs, counts = dict(inputs), {}
    for name, fill in _COLUMNS.items():
        values = inputs.get(name)
        if values is None:
            continue
        # Of a token (B, C), or of a completion (B,) or (B, 1), which is live if any of its tokens is
        mask = live
        if values.shape[:2] != live.shape:
            mask = live.any(1) if values.dim() == 1 else live.any(1, keepdim=True)
        if fill is None:
            bad = mask & (values.isnan() | (values == math.inf)).any(-1)
        else:
            bad = mask & ~values.isfinite()
            inputs[name] = values.masked_fill(~mask, fill)
        if name in _COUNTED:
            counts[name] = bad.sum()
    return inputs, counts


def _nan_to_inf(function: Callable) -> Callable:
    """A reward function whose NaN is an infinity, since TRL reads NaN as None: this function does not apply."""

    def mark(rewards):
        return [math.inf if reward is not None and reward != reward else reward for reward in rewards]

    if isinstance(function, nn.Module):
        return function
    if is_async_callable(function):

        async def marked_async(**kwargs):
            return mark(await function(**kwargs))

        return marked_async
    return lambda **kwargs: mark(function(**kwargs))

"""FiniteGuard: skips and logs, on all ranks, any update that contains a NaN or an infinity."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from trl.trainer.utils import is_async_callable

from troll_trl.kernels.dispatch import has_float64

logger = get_logger(__name__)

# TRL's columns of the rollout batch that the loss reads; RLOO's `old_logps` is of a completion. At masked positions 0
# replaces their values: nothing there may enter an exp. 0·exp(200) is NaN, and so is its gradient.
_COLUMNS = (
    *("advantages", "old_per_token_logps", "old_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    "importance_sampling_ratio",
)
# Not counted with them. TRL means something by NaN in `sampling_per_token_logps`: vLLM gave no value.
_NOT_COUNTED = "sampling_per_token_logps"
# What TRL's loss moves of its adaptive entropy bonus
ENTROPY_CONTROL = ("entropy_coef", "_last_world_entropy")


class FiniteGuard:
    """
    Keeps numbers that are not finite out of the weights.

    The guard counts on the device what is not finite of all that the loss reads (advantages, cached log-probabilities,
    logits), of the loss and of the norm of the gradient. Once per update it gathers the counts of all ranks, in one
    small collective. If any is not zero, or if no rank has a live token, it drops the gradient before the optimizer
    sees it: weights, moments, weight decay and the learning rate schedule stay as they are, bit for bit. It skips every
    update of a rollout batch with a reward that is not finite. `troll/skipped_updates` counts; after
    `max_skipped_updates` in a row the run stops.

    With a float16 gradient scaler, an overflowing gradient is the scaler's to skip, uncounted, as long as the scaler
    can lower its scale; the scaler ignores what the guard skips. DeepSpeed, and layer-wise and LOMO optimizers, step
    inside the backward. There the run stops before that step, except for an update without a live token, in which
    momentum moves the weights, and for a gradient that alone is not finite.

    `sparse_columns` are columns `(B, C, S)` of log-probabilities. The guard only counts in them, since the loss hides
    their masked positions.
    """

    def __init__(self, accelerator: Accelerator, args: Any, sparse_columns: Sequence[str] = ()):
        self.accelerator, self.args = accelerator, args
        self.columns = (*_COLUMNS, *sparse_columns)
        self._counted = [*(name for name in self.columns if name != _NOT_COUNTED), "logits", "loss", "gradient"]
        dtype = torch.float64 if has_float64(accelerator.device) else torch.float32
        # A slot for each of these, and for the live tokens
        self._counts = torch.zeros(len(self._counted) + 1, dtype=dtype, device=accelerator.device)
        self.live: torch.Tensor | None = None  # (B, C) bool while a loss is computed: the tokens that it is over
        self._counting = False  # whether that loss is one of the training
        self.bad_rewards: list[str] = []  # of the current rollout batch: those not finite, in words
        # Equal on all ranks: updates and skipped ones since the last log line, and the last skipped ones in a row
        self._updates = self._skipped = self._in_a_row = 0

    def start_training(self) -> None:
        self._counts.zero_()  # an earlier call may have ended in the middle of an update
        self._updates = self._skipped = self._in_a_row = 0

    def pop(self) -> dict[str, float]:
        """The metric of a log line; empty without an update since the last one."""
        metrics: dict[str, float] = {"troll/skipped_updates": self._skipped} if self._updates else {}
        self._updates = self._skipped = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        counts = {"updates": self._updates, "skipped": self._skipped, "in_a_row": self._in_a_row}
        return counts | {"bad_rewards": self.bad_rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates, self._skipped, self._in_a_row = (state[name] for name in ("updates", "skipped", "in_a_row"))
        self.bad_rewards = state["bad_rewards"]

    # -- Rewards ----------------------------------------------------------------------------------------------------

    def check_rewards(self, rewards: torch.Tensor, functions: Sequence[Any], names: Sequence[str]) -> list[str]:
        """
        Which rewards `(completions, functions)` of all ranks are not finite, in words. They become NaN in place, and
        TRL then averages the other rewards. To TRL, NaN is a reward that was not given (None), which a
        reward model never means.
        """
        is_model = torch.tensor([isinstance(function, nn.Module) for function in functions], device=rewards.device)
        bad = rewards.isinf() | (rewards.isnan() & is_model)
        per_rank = len(rewards) // self.accelerator.num_processes
        found = [
            f"reward {names[column]!r} at row {row} of the rollout batch (rank {row // per_rank}, row {row % per_rank} "
            "there)"
            for row, column in bad.nonzero().tolist()
        ]
        rewards.masked_fill_(bad, torch.nan)
        return found

    # -- Loss -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watch_loss(self, inputs: dict[str, Any], training: bool) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Around a loss: gives it `inputs` with harmless values at masked positions, and the live tokens `(B, C)`."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        self.live, self._counting = mask.bool(), training
        self._counts[-1] += self.live.sum() * training
        try:
            yield self._without_masked(inputs, self.live), self.live
        finally:
            self.live = None

    def _without_masked(self, inputs: dict[str, Any], live: torch.Tensor) -> dict[str, Any]:
        """A copy of a micro-batch whose masked positions hold harmless values. Counts what is not finite at the others;
        of sparse log-probabilities it counts only: there −inf is a number, which marks an unused slot."""
        inputs = dict(inputs)
        for name in self.columns:
            values = inputs.get(name)
            if values is None:
                continue
            # Of a token (B, C), or of a completion (B,) or (B, 1), which is live if any of its tokens is
            mask = live if values.shape[:2] == live.shape else live.any(1).view(-1, *values.shape[1:])
            if values.dim() == 3:
                bad = mask & (values.isnan() | (values == math.inf)).any(-1)
            else:
                bad = mask & ~values.isfinite()
                inputs[name] = values.masked_fill(~mask, 0.0)
            if self._counting and name != _NOT_COUNTED:
                self._count(name, bad.sum())
        return inputs

    def hide_masked(
        self, log_probs: torch.Tensor, entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What TRL's loss reads of log-probabilities and entropies `(B, C)`; outside of a loss both as they are."""
        if self.live is None:
            return log_probs, entropies
        log_probs = log_probs.masked_fill(~self.live, 0.0)  # also where a tool's tokens have a value
        if entropies is not None:  # of all logits of a position
            finite = entropies.detach().isfinite()
            if self._counting:
                self._count("logits", (self.live & ~finite).sum())
            entropies = entropies.masked_fill(~(self.live & finite), 0.0)
        return log_probs, entropies

    def _count(self, name: str, count: torch.Tensor) -> None:
        """Count numbers that are not finite, of a column, of `logits`, of the `loss` or of the `gradient`."""
        self._counts[self._counted.index(name)] += count

    def check_loss(self, loss: torch.Tensor, update: int) -> None:
        """After a loss of the training: stop if it is not finite and the backward pass would also take the step."""
        self._count("loss", ~loss.detach().isfinite())
        if (stepper := self._steps_in_backward()) and (bad := self._gather()[0]):
            raise FloatingPointError(
                f"Stopped before update {update}, which {stepper} cannot skip. Not finite: {bad}. {_ADVICE}"
            )

    # -- Update -----------------------------------------------------------------------------------------------------

    def skips_update(self, norm: Any, model: nn.Module, optimizer: Any, update: int) -> bool:
        """Between the gradient's norm and the optimizer's step: whether `update` is skipped, its gradient dropped."""
        self._updates += 1
        if self._steps_in_backward():
            return False
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        scaler = self.accelerator.scaler
        scaler_skips = scaler is not None and scaler.get_scale() > 1
        if not norm.isfinite() and not scaler_skips:
            self._count("gradient", torch.ones((), device=self._counts.device))
        bad, tokens = self._gather()
        skip = bool(bad) or tokens == 0
        self._skipped += skip
        if skip:
            model.zero_grad()  # without gradients the optimizer does nothing, weight decay included
        if scaler is None or skip:
            # As after an overflow in float16, the Trainer then leaves the learning rate schedule where it is
            optimizer._is_overflow = skip
        if scaler is not None:
            # It would lower its scale for a bad reward, and take an update without gradients for a good one
            optimizer.scaler = None if skip else scaler
            if skip:
                scaler.update(scaler.get_scale())  # forgets the gradient, and keeps its scale
        self._report(bad, tokens, update)
        return skip

    def _steps_in_backward(self) -> str | None:
        """What takes the optimizer's step inside the backward pass, if anything does."""
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if optimizer.endswith("_layerwise") or optimizer in ("lomo", "adalomo"):
            return f"`optim` {optimizer}"
        return "DeepSpeed" if self.accelerator.distributed_type == DistributedType.DEEPSPEED else None

    def _gather(self) -> tuple[str, float]:
        """What was not finite since the last update, in words, and the live tokens; the same on all ranks."""
        counts = self.accelerator.gather(self._counts.unsqueeze(0)).tolist()  # (ranks, slots)
        self._counts.zero_()
        found = [[name for name, count in zip(self._counted, row, strict=False) if count > 0] for row in counts]
        # The gradient is, once reduced, that of all ranks
        own = [[name for name in names if name != "gradient"] for names in found]
        said = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(own) if names]
        if any(found) and not said:
            said = ["gradient (its norm over all ranks)"]
        return "; ".join(said), sum(row[-1] for row in counts)

    def _report(self, bad: str, tokens: float, update: int) -> None:
        if not bad:
            # Neither good nor bad: an update without a live token leaves the count of those in a row alone
            if tokens > 0:
                self._in_a_row = 0
            else:
                logger.warning(f"Update {update} skipped: every completion in it is masked, on every rank.")
            return
        self._in_a_row += 1
        if self.bad_rewards:
            bad += f", because of {some(self.bad_rewards)}"
        limit = self.args.max_skipped_updates
        logger.warning(
            f"Update {update} skipped: weights and optimizer stay unchanged. Not finite: {bad}. "
            f"({self._in_a_row} in a row; `max_skipped_updates` is {limit}.)"
        )
        if self._in_a_row >= limit:
            raise FloatingPointError(
                f"Stopped at update {update}: {self._in_a_row} updates in a row were skipped "
                f"(`max_skipped_updates`). Not finite: {bad}. The weights are those of the last good update. {_ADVICE}"
            )


_ADVICE = (
    "A reward must return finite numbers, or None where it does not apply. If logits or gradients overflow, lower the "
    "learning rate or train in bfloat16 or float32 rather than float16."
)


def some(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nan_to_inf(function: Callable) -> Callable:
    """A reward function whose NaN is an infinity, since TRL reads NaN as None: this function does not apply."""

    def mark(rewards):
        return [math.inf if reward is not None and reward != reward else reward for reward in rewards]

    if isinstance(function, nn.Module):
        return function
    if is_async_callable(function):

        @functools.wraps(function)
        async def marked_async(**kwargs):
            return mark(await function(**kwargs))

        return marked_async
    return functools.wraps(function)(lambda **kwargs: mark(function(**kwargs)))

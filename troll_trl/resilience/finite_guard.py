"""FiniteGuard: skips and logs, on all ranks, any update that contains a NaN or an infinity."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from troll_trl.kernels.dispatch import has_float64

logger = get_logger(__name__)

# TRL's columns of the rollout batch that the loss reads; RLOO's `old_logps` has one number for a completion. At masked
# positions 0 replaces their values, which must not enter an exp: 0·exp(200) is NaN, and so is its gradient.
_COLUMNS = (
    *("advantages", "old_per_token_logps", "old_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    "importance_sampling_ratio",
)
# The guard does not count in this column: a NaN there says that vLLM gave no value.
_NOT_COUNTED = "sampling_per_token_logps"
# The attributes of TRL's adaptive entropy bonus, which the loss changes
ENTROPY_CONTROL = ("entropy_coef", "_last_world_entropy")


class FiniteGuard:
    """
    Keeps numbers that are not finite out of the weights.

    The guard counts, on the device, the numbers that are not finite: in what the loss reads (advantages, cached
    log-probabilities, logits), the loss, and the norm of the gradient. Once per update it gathers the counts of all
    ranks, in one small collective. If any is not zero, or if the loss mask is empty on all ranks, it drops the gradient
    before the optimizer sees it: weights, moments, weight decay and the learning rate schedule stay as they are, bit
    for bit. It skips every update of a rollout batch with a reward that is not finite. `troll/skipped_updates` counts
    skipped updates; after `max_skipped_updates` in a row the run stops.

    A float16 gradient scaler skips an overflowing gradient itself, as long as it can lower its scale. The guard then
    counts nothing, and the scaler ignores what the guard skips. DeepSpeed, and layer-wise and LOMO optimizers, step
    inside the backward. There the run stops before that step. Two kinds of updates pass: one with an empty loss mask,
    in which momentum moves the weights, and one in which the gradient alone is not finite.

    `sparse_columns` are columns `(B, C, S)` of log-probabilities. The guard only counts in them, since the loss hides
    their masked positions.
    """

    def __init__(self, accelerator: Accelerator, args: Any, sparse_columns: Sequence[str] = ()):
        self.accelerator, self.args = accelerator, args
        self.columns = (*_COLUMNS, *sparse_columns)
        counted = [name for name in self.columns if name != _NOT_COUNTED]
        self._counted = [*counted, "logits", "trust_region", "loss", "gradient"]
        dtype = torch.float64 if has_float64(accelerator.device) else torch.float32
        # One slot for each of these, and one for the tokens that the loss is over
        self._counts = torch.zeros(len(self._counted) + 1, dtype=dtype, device=accelerator.device)
        self.loss_mask: torch.Tensor | None = None  # (B, C) bool while a loss is computed: the tokens that it is over
        self._counting = False  # whether that loss is one of the training
        self._watched_losses = 0  # since the last update; none, if a subclass has a loss of its own
        self.bad_rewards: list[str] = []  # of the current rollout batch, in words
        self.nothing_scored = False  # whether vLLM, whose policy is the old one, scored no token of the rollout batch
        self._ungathered: list[tuple[int, str]] = []  # bad rewards of this rank alone: row and function
        self._norm: Any = None  # norm of the gradient, before its clip
        self._clip_gradient = accelerator.clip_grad_norm_
        accelerator.clip_grad_norm_ = self._clip_and_keep_norm
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
        return counts | {"bad_rewards": self.bad_rewards, "nothing_scored": self.nothing_scored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates, self._skipped, self._in_a_row = (state[name] for name in ("updates", "skipped", "in_a_row"))
        self.bad_rewards = state["bad_rewards"]
        self.nothing_scored = state["nothing_scored"]

    # -- Rewards ----------------------------------------------------------------------------------------------------

    def watch_rewards(self, functions: Sequence[Callable], names: Sequence[str]) -> list[Callable]:
        """Reward functions and models that report what is not finite to the guard, and return None or NaN for it. TRL
        reads this as a reward that was not given, and averages the other ones."""
        return [self._watched(function, name) for function, name in zip(functions, names, strict=True)]

    def _watched(self, function: Callable, name: str) -> Callable:
        def without_bad(rewards):
            try:
                rewards = list(rewards)  # it may be a generator
                values = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
                if values.dim() != 1:
                    raise ValueError(f"{values.dim()} dimensions")
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The reward function {name!r} must return a list with a number or `None` for each completion, got "
                    f"{repr(rewards)[:200]}."
                ) from error
            bad = self._keep_bad(~values.isfinite(), name)
            return [None if row in bad else reward for row, reward in enumerate(rewards)]

        if isinstance(function, nn.Module):
            return _WatchedModel(function, lambda bad: self._keep_bad(bad, name))
        inner: Any = function.func if isinstance(function, functools.partial) else function
        if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__):

            @functools.wraps(function)
            async def watched_async(*args, **kwargs):
                return without_bad(await function(*args, **kwargs))

            return watched_async
        return functools.wraps(function)(lambda *args, **kwargs: without_bad(function(*args, **kwargs)))

    def _keep_bad(self, bad: torch.Tensor, name: str) -> set[int]:
        """Keep which rows of this rank's rewards `(completions,)` are bad, until the ranks exchange them."""
        rows = set(bad.nonzero().flatten().tolist())
        self._ungathered += [(row, name) for row in sorted(rows)]
        return rows

    def gather_bad_rewards(self, rows: int) -> list[str]:
        """Which rewards of a rollout batch, `rows` on each rank, were not finite on any rank, in words. Every rank must
        call this."""
        rank = self.accelerator.process_index
        found = gather_object([(rank, row, name) for row, name in self._ungathered])
        self._ungathered = []
        return [
            f"reward {name!r} at row {rank * rows + row} of the rollout batch (rank {rank}, row {row} there)"
            for rank, row, name in sorted(found)
        ]

    # -- Loss -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watch_loss(self, inputs: dict[str, Any], training: bool) -> Iterator[dict[str, Any]]:
        """Around a loss: yields `inputs` with harmless values at masked positions."""
        self.loss_mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        self._counting = training
        if training:
            self._watched_losses += 1
            self._counts[-1] += self.loss_mask.sum()
        try:
            yield self._without_masked(inputs, self.loss_mask)
        finally:
            self.loss_mask = None

    def _without_masked(self, inputs: dict[str, Any], loss_mask: torch.Tensor) -> dict[str, Any]:
        """A copy of a micro-batch whose masked positions hold harmless values. Counts what is not finite at the others.
        Sparse log-probabilities stay as they are, and −∞, which marks an unused slot there, is not counted."""
        inputs = dict(inputs)
        for name in self.columns:
            values = inputs.get(name)
            if values is None:
                continue
            # A column has a number for each token, (B, C), or one for each completion, (B,) or (B, 1)
            of_tokens = values.shape[:2] == loss_mask.shape
            mask = loss_mask if of_tokens else loss_mask.any(1).view(-1, *values.shape[1:])
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
        """Log-probabilities and entropies `(B, C)` with harmless values at masked positions; outside of a loss, both
        as they are."""
        if self.loss_mask is None:
            return log_probs, entropies
        log_probs = log_probs.masked_fill(~self.loss_mask, 0.0)  # tools' tokens have values, too
        if entropies is not None:  # they read all logits of a position
            finite = entropies.detach().isfinite()
            if self._counting:
                self._count("logits", (self.loss_mask & ~finite).sum())
            entropies = entropies.masked_fill(~(self.loss_mask & finite), 0.0)
        return log_probs, entropies

    def _count(self, name: str, count: torch.Tensor) -> None:
        """Add to the count of one of the names in `_counted`."""
        self._counts[self._counted.index(name)] += count

    def count_bounded(self, bad: torch.Tensor) -> None:
        """Count the `bad` tokens of a loss, for which the trust region gave a NaN or an infinity."""
        if self._counting:
            self._count("trust_region", bad)

    def check_loss(self, loss: torch.Tensor, update: int) -> None:
        """After a loss of the training, stop if it is not finite and the backward pass would also take the step."""
        self._count("loss", ~loss.detach().isfinite())
        if (stepper := self._steps_in_backward()) and (bad := self._gather()[0]):
            raise FloatingPointError(
                f"Stopped before update {update}, which {stepper} cannot skip. Not finite: {bad}. {_advice(bad)}"
            )

    # -- Update -----------------------------------------------------------------------------------------------------

    def _clip_and_keep_norm(self, *args, **kwargs) -> Any:
        """accelerate's `clip_grad_norm_`, whose result no callback gets. A clip by an infinite norm leaves zeros, which
        look harmless."""
        self._norm = self._clip_gradient(*args, **kwargs)
        return self._norm

    def skips_update(self, model: nn.Module, optimizer: Any, update: int) -> bool:
        """Whether `update` is skipped; its gradient is then dropped. This is called between the clip and the
        optimizer's step."""
        self._updates += 1
        norm, self._norm = self._norm, None
        if self._steps_in_backward():
            return False
        if norm is None:  # the Trainer has clipped in another way
            norm = sum(p.grad.detach().abs().sum() for p in model.parameters() if p.grad is not None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        scaler = self.accelerator.scaler
        scaler_skips = scaler is not None and scaler.get_scale() > 1
        if not norm.isfinite() and not scaler_skips:
            self._count("gradient", torch.ones((), device=self._counts.device))
        bad, tokens = self._gather()
        empty = tokens == 0 and self._watched_losses > 0
        self._watched_losses = 0
        skip = bool(bad) or empty
        self._skipped += skip
        if skip:
            model.zero_grad()  # without gradients the optimizer does nothing, weight decay included
        if scaler is None or skip:
            # The Trainer then leaves the learning rate schedule where it is, as after an overflow in float16
            optimizer._is_overflow = skip
        if scaler is not None:
            # The scaler would lower its scale for a bad reward, and take an update without gradients for a good one
            optimizer.scaler = None if skip else scaler
            if skip:
                scaler.update(scaler.get_scale())  # forgets the gradient, and keeps its scale
        self._report(bad, empty, update)
        return skip

    def _steps_in_backward(self) -> str | None:
        """What takes the optimizer's step inside the backward pass, if anything does."""
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if optimizer.endswith("_layerwise") or optimizer in ("lomo", "adalomo"):
            return f"`optim` {optimizer}"
        return "DeepSpeed" if self.accelerator.distributed_type == DistributedType.DEEPSPEED else None

    def _gather(self) -> tuple[str, float]:
        """What was not finite since the last update, in words, and the tokens of the losses; the same on all ranks."""
        counts = self.accelerator.gather(self._counts.unsqueeze(0)).tolist()  # (ranks, slots)
        self._counts.zero_()
        found = [[name for name, count in zip(self._counted, row, strict=False) if count > 0] for row in counts]
        # Once reduced, the gradient belongs to all ranks
        own = [[name for name in names if name != "gradient"] for names in found]
        said = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(own) if names]
        if any(found) and not said:
            said = ["gradient (its norm over all ranks)"]
        tokens = sum(row[-1] for row in counts)
        if self.nothing_scored and tokens == 0:
            said = [f"{_OF_ENGINE} of all tokens of the rollout batch"]
        return "; ".join(said), tokens

    def _report(self, bad: str, empty: bool, update: int) -> None:
        if not bad:
            # An update without a token is neither good nor bad: the count of bad ones in a row stays as it is
            if not empty:
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
                f"(`max_skipped_updates`). Not finite: {bad}. The weights are those of the last good update. "
                + _advice(bad)
            )


_OF_ENGINE = "vLLM's log-probabilities"


def _advice(bad: str) -> str:
    if _OF_ENGINE in bad:
        return (
            "Look at vLLM's log and its dtype: logits that overflow in float16 are NaN. Or use `old_policy='trainer'`."
        )
    if "trust_region" in bad:
        return (
            "The `trust_region` made NaN or infinity of finite log-probabilities. One of your own must return finite "
            "numbers for every token that is not masked; an unused slot is −∞ in both policies, and −∞ − (−∞) is NaN."
        )
    return (
        "A reward must return finite numbers, or None where it does not apply. If logits or gradients overflow, lower "
        "the learning rate or train in bfloat16 or float32 rather than float16."
    )


def some(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _WatchedModel(nn.Module):
    """A reward model whose bad rewards are NaN, after `keep` got which they are."""

    def __init__(self, model: nn.Module, keep: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.model, self.keep = model, keep

    def forward(self, **inputs):
        output = self.model(**inputs)
        bad = ~output.logits[:, 0].isfinite()
        self.keep(bad)
        output.logits[:, 0] = output.logits[:, 0].masked_fill(bad, torch.nan)
        return output


class SkipUpdates(TrainerCallback):
    """Asks a trainer's guard about each update, between the clip of the gradient and the optimizer's step."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self.trainer.finite_guard.skips_update(model, optimizer, state.global_step + 1):
            self.trainer.restore_entropy_coef()

"""GuardedTrainer: skips and logs, on all ranks, any update that contains a NaN or an infinity."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

if TYPE_CHECKING:  # the trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer  # or RLOOTrainer
else:
    _Trainer = object

logger = get_logger(__name__)

# What the guard counts, causes first
_COUNTED = ("logits", "loss", "gradient")
# TRL's adaptive entropy bonus: the loss changes these attributes of the trainer, which the RLOO trainer lacks
_ENTROPY_CONTROL = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


class GuardedTrainer(_Trainer):
    """
    Mixin for TRL's GRPO or RLOO trainer that keeps NaN and infinity out of the weights. It has no effect on the weights
    if all numbers are finite and some token is not masked.

    - `__init__` wraps the reward functions and adds the guard as a callback;
    - `_generate_and_score_completions` sets all advantages of a rollout batch to NaN if a reward is not finite;
    - `_get_per_token_logps_and_entropies` and `compute_loss` count what is not finite;
    - `log` adds `troll/skipped_updates`.

    The `guard` ([`FiniteGuard`]) decides about each update. The config needs the field `max_skipped_updates`.
    """

    reward_funcs: list[Any]  # TRL's, declared for the type checker

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.guard = FiniteGuard(self)
        rewards = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [self.guard.watched(function, name) for function, name in rewards]
        self.add_callback(self.guard)

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        output = super()._generate_and_score_completions(*args, **kwargs)
        bad = self.guard.gather_bad_rewards(len(output["completion_ids"]))
        if not self.model.training:
            if bad:
                logger.warning(f"Evaluation at step {self.state.global_step}: non-finite {_first_three(bad)}.")
            return output
        self.guard.bad_rewards = bad
        if bad:
            # The other rewards of the group, or of the batch, were normalised with the bad reward. NaN stays with the
            # rollout batch, even in a checkpoint, until its last update has been skipped.
            output["advantages"] = torch.full_like(output["advantages"], torch.nan)
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        log_probs, entropies, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if entropies is not None:
            self.guard.count_logits(log_probs, entropies)
        return log_probs, entropies, *rest

    def compute_loss(self, model, inputs, *args, **kwargs):
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self.guard.watch_loss(inputs["completion_mask"] * inputs.get("tool_mask", 1)):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.guard.check_loss(loss, self.state.global_step + 1)
        return loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.model.training:
            logs.update(self.guard.pop())
        super().log(logs, *args, **kwargs)


class FiniteGuard(TrainerCallback):
    """
    Keeps numbers that are not finite out of a `trainer`'s weights.

    The guard counts, on the device, logits and losses that are not finite. Once per update it gathers the counts of
    all ranks, in one small collective, and checks the norm of the gradient. If anything is not finite, or if the loss
    mask is empty on all ranks, it drops the gradient before the optimizer uses it: weights, moments, weight decay and
    the learning rate schedule stay as they are, bit for bit. After `max_skipped_updates` in a row the run stops.

    A float16 gradient scaler skips an overflowing gradient itself, as long as it can lower its scale. The guard then
    counts nothing, and the scaler ignores what the guard skips. DeepSpeed, layer-wise optimizers and LOMO take the step
    inside the backward pass. With these, the run stops before the step if the loss is not finite. The guard does not
    stop two kinds of updates: one with an empty loss mask, in which momentum moves the weights, and one in which only
    the gradient is not finite.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.accelerator = accelerator = trainer.accelerator
        self.args = trainer.args
        # One slot for each of `_COUNTED`, and one for the number of tokens in the losses of an update
        self._counts = torch.zeros(len(_COUNTED) + 1, device=accelerator.device)
        self.skipped_last = False  # whether the last update was skipped, by this guard or a float16 scaler
        self._mask: torch.Tensor | None = None  # (B, C) bool while a loss is computed: the tokens of the loss
        self._losses = 0  # since the last update
        self._entropy_before: dict[str, Any] = {}  # TRL's entropy bonus before the first loss of an update
        self.bad_rewards: list[str] = []  # of the current rollout batch, on any rank, in words
        self._ungathered: list[tuple[int, str]] = []  # bad rewards of this rank alone: row and function
        self._norm: Any = None  # norm of the gradient, before clipping
        self._clip_gradient = accelerator.clip_grad_norm_
        accelerator.clip_grad_norm_ = self._clip_and_keep_norm
        # Equal on all ranks: updates and skipped ones since the last log line, and the last skipped ones in a row
        self._updates = self._skipped = self._in_a_row = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._counts.zero_()  # an earlier call may have ended in the middle of an update
        self._updates = self._skipped = self._in_a_row = self._losses = 0

    def pop(self) -> dict[str, float]:
        """Return the metric of a log line; empty without an update since the last one."""
        metrics: dict[str, float] = {"troll/skipped_updates": self._skipped} if self._updates else {}
        self._updates = self._skipped = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        counts = {"updates": self._updates, "skipped": self._skipped, "in_a_row": self._in_a_row}
        return counts | {"bad_rewards": self.bad_rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates, self._skipped, self._in_a_row = (state[name] for name in ("updates", "skipped", "in_a_row"))
        self.bad_rewards = state["bad_rewards"]

    # -- Rewards ----------------------------------------------------------------------------------------------------

    def watched(self, function: Callable, name: str) -> Callable:
        """Wrap a reward function or model. It reports rewards that are not finite to the guard, and gives TRL `None` or
        NaN instead. TRL treats this as a reward that does not apply, and averages the others."""

        def without_bad(rewards):
            try:
                if isinstance(rewards, Mapping):  # TRL would train on its keys
                    raise TypeError("a dictionary")
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
        unwrapped: Any = function.func if isinstance(function, functools.partial) else function
        if inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(unwrapped.__call__):

            @functools.wraps(function)
            async def watched_async(*args, **kwargs):
                return without_bad(await function(*args, **kwargs))

            return watched_async
        return functools.wraps(function)(lambda *args, **kwargs: without_bad(function(*args, **kwargs)))

    def _keep_bad(self, bad: torch.Tensor, name: str) -> set[int]:
        """Record which rows of this rank's rewards `(completions,)` are `bad`, until the ranks exchange them."""
        rows = set(bad.nonzero().flatten().tolist())
        self._ungathered += [(row, name) for row in sorted(rows)]
        return rows

    def gather_bad_rewards(self, rows: int) -> list[str]:
        """Describe the rewards of a rollout batch, `rows` on each rank, that were not finite on any rank. Every rank
        must call this."""
        rank = self.accelerator.process_index
        found = gather_object([(rank, row, name) for row, name in self._ungathered])
        self._ungathered = []
        return [
            f"reward {name!r} at row {rank * rows + row} of the rollout batch (rank {rank}, row {row} there)"
            for rank, row, name in sorted(found)
        ]

    # -- Loss -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watch_loss(self, mask: torch.Tensor) -> Iterator[None]:
        """Context for a training loss over the tokens that are 1 in `mask` `(B, C)`. The first loss of an update keeps
        the state of the entropy bonus, for the case that the update is skipped."""
        self._mask = mask.bool()
        if self._losses == 0:
            self._entropy_before = {name: x for name, x in vars(self.trainer).items() if name in _ENTROPY_CONTROL}
        self._losses += 1
        self._counts[-1] += self._mask.sum()
        try:
            yield
        finally:
            self._mask = None

    def count_logits(self, log_probs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Count the positions of a loss whose logits contain a NaN or +∞, by log-probabilities and entropies `(B, C)`.
        Outside of a loss, do nothing."""
        if self._mask is None:
            return
        bad = ~entropies.detach().isfinite()
        if getattr(self.args, "top_entropy_quantile", 1.0) == 1.0:  # else TRL's loss reads the entropies
            # A logit of −∞, a probability of 0, makes only the entropy NaN: TRL's and our kernels compute 0·∞
            bad &= ~log_probs.detach().isfinite()
        self._count("logits", (self._mask & bad).sum())

    def check_loss(self, loss: torch.Tensor, update: int) -> None:
        """Count a loss that is not finite. If the backward pass would also take the step, stop the run."""
        self._count("loss", ~loss.detach().isfinite())
        if (stepper := steps_in_backward(self.args, self.accelerator)) and (bad := self._gather()[0]):
            raise FloatingPointError(
                f"Stopped before update {update}, which {stepper} cannot skip. Not finite: {bad}. {_ADVICE}"
            )

    def _count(self, name: str, count: torch.Tensor) -> None:
        self._counts[_COUNTED.index(name)] += count

    # -- Update -----------------------------------------------------------------------------------------------------

    def _clip_and_keep_norm(self, *args, **kwargs) -> Any:
        """Clip as accelerate does, and keep the norm, which no callback gets. Clipping by an infinite norm leaves
        zeros, which look harmless."""
        self._norm = self._clip_gradient(*args, **kwargs)
        return self._norm

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self._skips_update(model, optimizer, state.global_step + 1):
            vars(self.trainer).update(self._entropy_before)  # undo what the losses did to TRL's adaptive entropy bonus

    def _skips_update(self, model: nn.Module, optimizer: Any, update: int) -> bool:
        """Between the clip and the optimizer's step, drop the gradient of an `update` that is not finite or empty.
        Return whether the gradient was dropped."""
        self._updates += 1
        norm, self._norm = self._norm, None
        losses, self._losses = self._losses, 0
        if steps_in_backward(self.args, self.accelerator):
            return False
        if norm is None:  # the Trainer has clipped in another way
            norm = sum(p.grad.detach().abs().sum() for p in model.parameters() if p.grad is not None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        scaler = self.accelerator.scaler
        overflows = scaler is not None and scaler.get_scale() > 1 and not norm.isfinite()  # then the scaler skips
        if not norm.isfinite() and not overflows:
            self._count("gradient", torch.ones((), device=self._counts.device))
        bad, tokens = self._gather()
        empty = tokens == 0 and losses > 0  # a subclass may have a loss of its own
        skip = bool(bad) or empty
        self._skipped += skip
        self.skipped_last = skip or bool(overflows)
        if skip:
            model.zero_grad()  # without gradients the optimizer does nothing, not even weight decay
        if scaler is None or skip:
            # The Trainer then leaves the learning rate schedule where it is, as after an overflow in float16
            optimizer._is_overflow = skip
        if scaler is not None:
            # The scaler would lower its scale for a bad reward, and count an update without gradients as a good one
            optimizer.scaler = None if skip else scaler
            if skip:
                scaler.update(scaler.get_scale())  # forgets the gradient, and keeps its scale
        self._report(bad, empty, update)
        return skip

    def _gather(self) -> tuple[str, float]:
        """Describe what was not finite since the last update, and count the tokens of its losses; the same on all
        ranks."""
        rows = self.accelerator.gather(self._counts.unsqueeze(0)).tolist()  # (ranks, slots)
        self._counts.zero_()
        causes = [[name for name, count in zip(_COUNTED, row, strict=False) if count > 0] for row in rows]
        # Once reduced, the gradient belongs to all ranks
        found = [f"rank {rank}: {names[0]}" for rank, names in enumerate(causes) if names and names != ["gradient"]]
        if any(causes) and not found:
            found = ["gradient (its norm over all ranks)"]
        return "; ".join(found), sum(row[-1] for row in rows)

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
            bad += f", because of {_first_three(self.bad_rewards)}"
        limit = self.args.max_skipped_updates
        logger.warning(
            f"Update {update} skipped: weights and optimizer stay unchanged. Not finite: {bad}. "
            f"({self._in_a_row} in a row; `max_skipped_updates` is {limit}.)"
        )
        if self._in_a_row >= limit:
            raise FloatingPointError(
                f"Stopped at update {update}: {self._in_a_row} updates in a row were skipped "
                f"(`max_skipped_updates`). Not finite: {bad}. The weights are unchanged since the last good "
                f"update. {_ADVICE}"
            )


def steps_in_backward(args: Any, accelerator: Accelerator) -> str | None:
    """Name what takes the optimizer's step inside the backward pass, if anything does."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("_layerwise") or optimizer in ("lomo", "adalomo"):
        return f"`optim` {optimizer}"
    return "DeepSpeed" if accelerator.distributed_type == DistributedType.DEEPSPEED else None


_ADVICE = (
    "A reward function must return finite numbers, or None if it does not apply. Your own trust region must return "
    "finite numbers. If logits or gradients overflow, lower the learning rate or train in bfloat16 or float32."
)


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _WatchedModel(nn.Module):
    """Wraps a reward model: passes its bad rows to `keep`, and sets their rewards to NaN."""

    def __init__(self, model: nn.Module, keep: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.model = model
        self.keep = keep

    def forward(self, **inputs):
        output = self.model(**inputs)
        bad = ~output.logits[:, 0].isfinite()
        self.keep(bad)
        output.logits[:, 0] = output.logits[:, 0].masked_fill(bad, torch.nan)
        return output

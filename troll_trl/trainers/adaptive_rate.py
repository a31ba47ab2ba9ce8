"""
AdaptiveLearningRate: the trust region sets the learning rate.

`k = KL(p‖q)` of a token, which the trust region computes anyway, measures how far the policy `p` has moved from the old
policy `q`. The signal of an update is

    s = Σ k² / Σ k · 8/n,

in nats, with sums over all tokens of the update's loss, on all ranks, and `n` updates per rollout batch. It is a mean
of `k` in which each token is weighted by its own movement. In a language model, most tokens are certain and never move,
so they would dilute a plain mean. At equal rates, the movement in `n` updates grows with `n`, so the signal is divided
by `n`. With 8 updates, for which `LOW` and `HIGH` were chosen, the signal is the mean itself.

The effective number of tokens of this mean is `(Σ k)² / Σ k²`. If it is below `FEW_TOKENS`, a few tokens have jumped,
which happens at any rate, and the signal counts as 0. In a small update, `FEW_SHARE` of its tokens is enough.

The forward passes of an update precede its step. So the signal measures the movement of the earlier updates of the same
rollout batch. It is about 0 at the first update, and never includes the movement of the last update.

A factor `f`, which starts at 1, multiplies the scheduled rate. At each update that is not skipped, `f` follows these
rules, after the gradient and before the step:

1. If `s > HIGH`, and `s` is larger than at the previous update of this batch, `f` is halved.
2. If the update is the batch's last and the batch's largest signal was below `LOW`, `f` is multiplied by
   `√(LOW/largest signal)`, at least 1.5 and at most 2: the KL grows at most with the square of the rate.
   `f` does not grow in three cases: during the warm-up; if fewer than `LEARNING_SHARE` of the batch's tokens had an
   advantage above `SMALLEST_ADVANTAGE` in absolute value; and if an update of the batch was not measured, because it
   was skipped or because a resumed run began the batch anew.
3. `f` stays between 1/100 and 10.

The new factor applies to the step that follows. This is PPO's KL-adaptive rate (`desired_kl` of RSL-RL, `KLAdaptiveLR`
of skrl) with a signal for language models. evidence/adaptive.md describes the study.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from troll_trl.resilience.guard import steps_in_backward
from troll_trl.trust_region.regions import TrustRegion

logger = get_logger(__name__)

LOW, HIGH = 0.15, 0.5  # signals below and above which the rate changes, in nats
LEAST_GROWTH, MOST_GROWTH, DECLINE = 1.5, 2.0, 0.5
SMALLEST, LARGEST = 0.01, 10.0  # factors
# A signal needs this effective number of tokens, or, in a small update, this share of the update's tokens
FEW_TOKENS, FEW_SHARE = 10, 1 / 30
# Without advantages, nothing moves at any rate, so the signal of such a batch carries no information
LEARNING_SHARE = 0.05
# With `beta`, RLOO's rewards contain the reference KL, and the advantages of equal rewards are rounding errors of it
SMALLEST_ADVANTAGE = 0.01


class AdaptiveLearningRate(TrainerCallback):
    """
    Multiplies a `trainer`'s learning rate by a factor that follows its trust region. See the module for the rule.

    The trainer must call `add` for each loss. At every update, also at one that the guard skips, the counts are summed
    over ranks, so all ranks have the same factor, bit for bit.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.updates = trainer.args.updates_per_rollout_batch
        self.scale = 8 / self.updates
        # Σk, Σk², tokens, and tokens with an advantage, over this rank's losses since the last update
        self.sums = torch.zeros(4, device=trainer.accelerator.device)
        self.factor = 1.0
        self.signal = 0.0  # of the last update that was taken; for the log, it outlasts the rollout batch
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget the rollout batch so far: its last and largest signal, the number of its updates that were taken, its
        tokens, and those with an advantage."""
        self.before = self.largest = self.taken = self.tokens = self.learning = 0.0

    def add(self, mask: torch.Tensor, policy_kl: torch.Tensor, advantages: torch.Tensor) -> None:
        """Count the tokens of a loss that are 1 in `mask` `(B, C)`: `policy_kl` `(B, C)`, in nats, and `advantages`
        `(B, 1)` or `(B, C)`."""
        kl = policy_kl.detach().masked_fill(~mask, 0.0).clamp(min=0)  # rounding makes some negative
        learning = mask & (advantages.abs() > SMALLEST_ADVANTAGE)
        self.sums += torch.stack([kl.sum(), (kl * kl).sum(), mask.sum(), learning.sum()])

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        # An earlier call may have ended in the middle of a rollout batch. A resumed run loads its state after this
        self.sums.zero_()
        self.begin_batch()
        if stepper := steps_in_backward(args, self.trainer.accelerator):
            raise ValueError(
                f"`adaptive_learning_rate` is not supported with {stepper}, which takes the step inside of the "
                "backward pass, before the rate can be adapted. Remove one of the two."
            )
        # Another scheduler may compute its next rate from the last one, which the factor has scaled
        if type(lr_scheduler) is not LambdaLR:
            raise ValueError(
                f"`adaptive_learning_rate` multiplies the rates of a schedule, but with `optim` {args.optim} and "
                f"`lr_scheduler_type` {args.lr_scheduler_type}, {type(lr_scheduler).__name__} sets the rates. "
                "Use 'adamw_torch' and one of 'constant_with_warmup', 'linear' and 'cosine'."
            )

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        """Follow an update, after the guard's callback, which decides whether the update is skipped."""
        sums = self.trainer.accelerator.reduce(self.sums, reduction="sum").tolist()
        self.sums.zero_()
        guard = self.trainer.guard
        steps = lr_scheduler.last_epoch  # the optimizer's, without skipped updates
        is_taken = guard is None or not guard.skipped_last
        if is_taken:
            self.follow(*sums, warmed_up=steps >= args.get_warmup_steps(state.max_steps))
        scheduled = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        rates = [self.factor * rate * share(steps) for rate, share in scheduled]
        lr_scheduler._last_lr = rates  # what the Trainer logs, before the scheduler's step
        if is_taken:
            # The scheduler's step writes plain rates again. It does not follow a skipped update, whose rates thus stay
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        micro_batches = args.steps_per_generation * self.trainer.num_iterations  # of a rollout batch
        if self.trainer._step % micro_batches == 0:  # `_step` counts this update's, too
            self.begin_batch()

    def follow(self, kl: float, squared_kl: float, tokens: float, learning: float, *, warmed_up: bool) -> None:
        """
        Apply the rule of the module to an update.

        Args:
            kl, squared_kl (`float`):
                `Σ k` in nats and `Σ k²`, over the tokens of the update's losses on all ranks.
            tokens, learning (`float`):
                The number of these tokens, and of those with an advantage.
            warmed_up (`bool`):
                Whether the warm-up has ended.
        """
        if tokens == 0:
            raise RuntimeError(
                "`adaptive_learning_rate` has counted no token of an update: all were masked, or a subclass that "
                "replaces `_score_policy` or `_compute_loss` does not call `self.adaptive_rate.add`."
            )
        few = kl * kl < min(FEW_TOKENS, FEW_SHARE * tokens) * squared_kl
        self.signal = 0.0 if kl == 0 or few else self.scale * squared_kl / kl
        if math.isnan(self.signal):  # a KL that is not finite
            self.signal = math.inf
        if self.signal > HIGH and self.signal > self.before:
            self.factor *= DECLINE
        self.before, self.largest = self.signal, max(self.signal, self.largest)
        self.taken += 1
        self.tokens += tokens
        self.learning += learning
        # Only at the batch's last update can all of its updates have been measured
        was_measured = self.taken == self.updates and self.learning >= LEARNING_SHARE * self.tokens
        if warmed_up and was_measured and self.largest < LOW:
            growth = math.sqrt(LOW / self.largest) if self.largest > 0 else MOST_GROWTH
            self.factor *= min(max(growth, LEAST_GROWTH), MOST_GROWTH)
        self.factor = min(max(self.factor, SMALLEST), LARGEST)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last update for a log line."""
        return {"troll/rate_factor": self.factor, "troll/rate_signal": self.signal}

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.__dict__.update(state)

    def load_from_first_rank(self, state: Mapping[str, float] | None, checkpoint: Any) -> None:
        """Continue from the first rank's state in a `checkpoint` of another number of ranks, if there is one."""
        if state is None:
            logger.warning(f"{checkpoint} has no factor of the adaptive learning rate: the factor starts at 1.")
        else:
            self.load_state_dict(state)


_STATE = ("factor", "signal", "before", "largest", "taken", "tokens", "learning")


def check_signal(trust_region: TrustRegion) -> None:
    """Raise a `ValueError` if a `trust_region` does not give the signal of [`AdaptiveLearningRate`]."""
    counted = {name for pair in trust_region.mean_metrics.values() for name in pair}
    if "policy_kl" not in counted:
        raise ValueError(
            f"`adaptive_learning_rate` follows KL(p‖q), but the trust region ({trust_region.describe()}) does not "
            "report it. Use 'projection' or 'penalty'. A trust region of your own needs `policy_kl` in its "
            "`token_stats` and `mean_metrics`."
        )

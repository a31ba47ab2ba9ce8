"""
The loss: what TRL's loss reads in place of its own numbers.

`B` is the number of completions, and `C` their length. `p` is the policy, `q` the old policy, `π` the bounded policy,
`a` the sampled token, `A` the advantage, `α` the `regression_coef`, and `r` the ratio `π(a)/q(a)`: see [`Ratio`].

TRL's surrogate is `−r·A`, without a limit, since the clip range is infinite. TRL multiplies it by its masks and by the
vLLM correction, and averages it as the loss type does. All of that stays TRL's. For this, TRL must form `r` from
`log π(a)` in place of `log p(a)`, and add `α·R` to the surrogate, for a regression `R` `(B, C)`. Both follow from the
advantage, with a mask's weight `w` `(B, C)` or 1: with `w·A − α·R/r` in place of `A`,

    −r·(w·A − α·R/r) = −r·w·A + α·R,

in value and gradient, if the gradient flows through both `R` and `r`.

TRL reads the advantages, which may be `(B, C)`, after it has scored the policy. So in the scoring pass, the trainer
changes a copy of the micro-batch, [`LossInputs`], in four steps. Each step is a function:

1. [`bound`] calls the trust region: the policy's `log p(a)` becomes `log π(a)` (the projection changes it), and there
   may be an `R` (projection and penalty) and a `w` (mask). A penalty and a mask leave `log p(a)` as it is.
2. [`limit_log_ratio`] shifts `log q(a)` if `log r` exceeds a limit. Beyond it, `R/r` or `w·r` could overflow.
3. [`change_advantages`] gives `w·A − α·R/r`, with the `r` that step 2 has limited.
4. [`change_reference`] makes the reference KL refer to the policy. TRL computes `d = ref − log π(a)`, and from `d` the
   estimate `k(d) = exp(d) − d − 1`. With `log π(a) + ref − log p(a)` in place of `ref`, `d` is `ref − log p(a)`. With
   `use_bias_correction_kl`, TRL multiplies `k(d)` by `r`, and [`rescale_kl`] makes this `k(d)` times `p(a)/q(a)`.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from troll_trl.trainers.columns import OLD_LOG_PROBS
from troll_trl.trust_region import HIGHEST_LOG_RATIO, LOWEST_LOG_RATIO, ROUNDING
from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput, apply_trust_region
from troll_trl.trust_region.sparse import move_to_rest

_NEWTON_STEPS = 4  # from the first guess of `rescale_kl` to float32's digits


class LossInputs(dict):
    """A copy of a micro-batch for TRL's loss. It is a copy, because with `num_iterations`, TRL reads the micro-batch
    itself again. It knows whether the loss has read the changed advantages, without which nothing would be bounded."""

    def __init__(self, inputs: Mapping[str, Any]):
        super().__init__(inputs)
        self.mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()  # (B, C), tokens of the loss
        self.changed_advantages_are_read = False
        # Before the four steps: log p(a) (B, C), without gradient, and the columns, with 0 at tokens not in the loss
        self.log_probs: torch.Tensor | None = None
        self.before: dict[str, Any] = {}

    @property
    def are_changed(self) -> bool:
        """Whether TRL has scored the policy, and the four steps have changed the columns."""
        return self.log_probs is not None

    def __getitem__(self, name: str) -> Any:
        self.changed_advantages_are_read |= name == "advantages" and self.are_changed
        return super().__getitem__(name)


class Ratio(Enum):
    """What each ratio of TRL's loss belongs to. Its logarithm is a token's log-ratio, or the mean or the sum of the
    log-ratios of a completion's tokens."""

    TOKEN = "token"  # (B, C)
    MEAN = "mean of a completion"  # (B, 1), GSPO
    SUM = "sum of a completion"  # (B, 1), RLOO

    @property
    def old_column(self) -> str:
        """TRL's column with the old policy: `log q(a)` `(B, C)`, or its sum over each completion `(B,)`."""
        return "old_logps" if self is Ratio.SUM else OLD_LOG_PROBS

    def old_from(self, log_probs: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
        """Return what TRL puts into `old_column`, from log-probabilities and their mask, both `(B, C)`."""
        return (log_probs * completion_mask).sum(1) if self is Ratio.SUM else log_probs

    def log(self, log_probs: torch.Tensor, log_q: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Return the log-ratio `(B, C)` or `(B, 1)` that TRL forms from `log_probs` `(B, C)` and from the old policy's
        `log_q`, as in `old_column`. A token outside of `live` `(B, C)` has the number 0."""
        if self is Ratio.SUM:
            return (log_probs.sum(1) - log_q).unsqueeze(1)
        log_ratio = log_probs - log_q
        if self is Ratio.MEAN:
            return log_ratio.sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1)
        return log_ratio


def change_inputs(
    inputs: LossInputs, policy: torch.Tensor, old: torch.Tensor, trust_region: TrustRegion, ratio: Ratio, args: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Take the four steps, which change `inputs`. `policy`, with gradient, and `old` `(B, C, S)`, float32, are
    log-probabilities of policy and old policy, the sampled token's first. `args` is the trainer's config.

    Return `log π(a)` `(B, C)` and the `token_stats` of `trust_region`. If `policy` or `old` has a NaN at a token of the
    loss, `log π(a)` is NaN there, so that a guard skips the update.
    """
    # A token with NaN, whose loss is NaN anyway, does not reach `project`, which would raise on this rank alone
    live = inputs.mask & ~(policy.detach().isnan() | old.isnan()).any(-1)  # (B, C)
    before = dict(inputs) | masked_columns(inputs, live)
    advantages = before["advantages"].reshape(len(live), -1)  # (B, 1) or (B, C): `(B,)` would broadcast over tokens
    before["advantages"] = advantages
    log_p = policy[..., 0].masked_fill(~live, 0.0)
    log_q = before[ratio.old_column]

    bounded = bound(trust_region, policy, old, advantages, live)
    # TRL's RLOO multiplies (B,) by (B,), so a weight (B, C) does not fit. Its GRPO broadcasts GSPO's ratio (B, 1)
    if bounded.weight is not None and ratio is Ratio.SUM:
        raise ValueError(
            f"`trust_region`: {type(trust_region).__name__} gives a `weight` for each token, but this trainer's "
            "loss has one advantage for a whole completion. Use it in GRPO."
        )
    log_pi = bounded.log_probs
    limited_log_q = limit_log_ratio(bounded, log_q, live, ratio)
    changed = {
        ratio.old_column: limited_log_q,
        "advantages": change_advantages(advantages, bounded, limited_log_q, live, ratio, args.regression_coef),
    }
    if (ref := before.get("ref_per_token_logps")) is not None:  # never in RLOO, whose reward has the reference KL
        log_scale = None
        if args.use_bias_correction_kl:
            log_scale = ratio.log(log_p, log_q, live) - ratio.log(log_pi, limited_log_q, live)
        changed["ref_per_token_logps"] = change_reference(ref, log_p, log_pi, log_scale)
    inputs.update(before | changed)
    inputs.log_probs, inputs.before = log_p.detach(), before
    return log_pi.masked_fill(inputs.mask & ~live, math.nan), bounded.token_stats


def masked_columns(inputs: Mapping[str, Any], live: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each column of `inputs` that has a number for each token, with 0 outside of `live` `(B, C)`. TRL
    multiplies a token's loss by the mask, but `exp(200)` is infinite in float32, and `0·inf` is NaN. Masks, which count
    tokens, and pixels may have the same shape, and stay as they are."""
    return {
        name: x.masked_fill(~live, 0.0)
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == live.shape
        if not (name.endswith("_mask") or name.startswith("pixel_"))
    }


def bound(
    trust_region: TrustRegion, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, live: torch.Tensor
) -> TrustRegionOutput:
    """Step 1: apply `trust_region` to `policy` and `old` `(B, C, S)` and `advantages` `(B, 1)` or `(B, C)`, and return
    its output. Only the tokens `live` `(B, C)` reach it. Elsewhere, `log π(a)` and `R` are 0, and `w` is 1."""
    if policy.dtype != torch.float32:  # the trust region would mistake rounding for steps of the policy
        raise TypeError(
            f"The model's log-probabilities are {policy.dtype}, not float32: a wrapper of the model casts its "
            "outputs. Make the wrapper keep the dtype."
        )
    bounded = apply_trust_region(trust_region, move_to_rest(policy, ~live), move_to_rest(old, ~live), advantages)
    return TrustRegionOutput(
        bounded.log_probs.masked_fill(~live, 0.0),
        None if bounded.regression is None else bounded.regression.masked_fill(~live, 0.0),
        bounded.token_stats,
        None if bounded.weight is None else bounded.weight.detach().masked_fill(~live, 1.0),
    )


def limit_log_ratio(bounded: TrustRegionOutput, log_q: torch.Tensor, live: torch.Tensor, ratio: Ratio) -> torch.Tensor:
    """Step 2: return `log_q`, `(B, C)` or `(B,)`, shifted so that TRL's log-ratio is at least `LOWEST_LOG_RATIO` and,
    with a weight, which may be 0, at most `HIGHEST_LOG_RATIO`. The shift has no gradient."""
    log_ratio = ratio.log(bounded.log_probs, log_q, live).detach()  # (B, C) or (B, 1)
    highest = None if bounded.weight is None else HIGHEST_LOG_RATIO
    shift = log_ratio - log_ratio.clamp(LOWEST_LOG_RATIO, highest)
    return log_q + (shift.squeeze(1) if ratio is Ratio.SUM else shift * live)


def change_advantages(
    advantages: torch.Tensor,
    bounded: TrustRegionOutput,
    log_q: torch.Tensor,
    live: torch.Tensor,
    ratio: Ratio,
    regression_coef: float,
) -> torch.Tensor:
    """Step 3: return `w·A − α·R/r`, `(B,)` or `(B, C)`, from the `advantages` `A` `(B, 1)` or `(B, C)` and the limited
    `log_q`, `(B, C)` or `(B,)`."""
    if bounded.weight is not None:
        advantages = advantages * bounded.weight
    if bounded.regression is not None and regression_coef != 0:
        # RLOO's loss has one number for each completion
        regression = bounded.regression.sum(1, keepdim=True) if ratio is Ratio.SUM else bounded.regression
        inverse_ratio = (-ratio.log(bounded.log_probs, log_q, live)).exp()
        advantages = advantages - regression_coef * regression * inverse_ratio
    return advantages.squeeze(1)


def change_reference(
    ref: torch.Tensor, log_p: torch.Tensor, log_pi: torch.Tensor, log_scale: torch.Tensor | None
) -> torch.Tensor:
    """Step 4: return `log π(a) + d`, from which TRL subtracts `log π(a)` again, in place of the reference's `ref`, with
    `d = ref − log p(a)`, all `(B, C)`. If TRL multiplies `k(d)` by `r`, `log_scale` is the logarithm of the policy's
    ratio divided by `r`, and the result has the `d'` of [`rescale_kl`]."""
    log_ref_ratio = ignore_rounding(ref, log_p.detach()) - log_p
    if log_scale is not None:
        log_ref_ratio = rescale_kl(log_ref_ratio, log_scale)
    return log_pi + log_ref_ratio


def ignore_rounding(ref_logps: torch.Tensor, policy_logps: torch.Tensor) -> torch.Tensor:
    """
    Return `ref_logps` `(B, C)`, replaced by `policy_logps` `(B, C)` wherever the two differ only by rounding.

    With the same weights, two passes differ in the last digits. If the loss treated this difference as a step away from
    the reference model, it would give the only gradient of a batch without a learning signal, and Adam would scale that
    gradient up to full steps.
    """
    same = (ref_logps - policy_logps).abs() <= ROUNDING * policy_logps.abs().clamp(min=1)
    return torch.where(same, policy_logps, ref_logps)


def rescale_kl(log_ref_ratio: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """
    Return `d'` `(B, C)` with `k(d') = exp(log_scale)·k(d)`, for `k(d) = exp(d) − d − 1`, `d = log_ref_ratio` `(B, C)`
    and `log_scale` `(B, C)` or `(B, 1)`.

    `d'` has the sign of `d`. Newton's method on `k(d') − T` starts beyond the solution on that side, where it cannot
    overshoot, since `k` is convex. The starts are `log(1 + T + x)` and `−(T + x)` with `x = √(2T)`: there, `k ≥ T`,
    since `e^x ≥ 1 + x + x²/2` and `e^(−x−x²/2) ≥ 1 − x`. The slope is `k'(d') = exp(d') − 1`, so by the implicit
    function theorem, the gradient is `∇d' = ∇(exp(log_scale)·k(d)) / (exp(d') − 1)`.
    """
    k = lambda d: d.expm1() - d
    kl = k(log_ref_ratio) * log_scale.exp()
    with torch.no_grad():
        target = kl.clamp(min=0)  # rounding
        beyond = target + (2 * target).sqrt()
        solution = torch.where(log_ref_ratio > 0, beyond.log1p(), -beyond)
        for _ in range(_NEWTON_STEPS):
            solution = solution - _divided(k(solution) - target, solution.expm1())
    zero = kl - kl.detach()  # with the gradient of `kl`
    # With equal ratios, TRL's estimate is already right, and Newton's rounding would only disturb it
    return torch.where(log_scale == 0, log_ref_ratio, solution + _divided(zero, solution.expm1()))


def _divided(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """`x / slope`, and 0 where the slope is 0: there, `d'` is the minimum of `k`."""
    return torch.where(slope == 0, 0.0, x / torch.where(slope == 0, 1.0, slope))

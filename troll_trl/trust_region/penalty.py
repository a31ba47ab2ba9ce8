"""
The penalty: TROLL's regression, on tokens that have left the trust region, without TROLL's projected surrogate.

With policy `p`, old policy `q`, and `π` the projection of `p` onto the ball KL(π‖q) ≤ ε, the penalty of a token is

    R = KL(p ‖ stopgrad π)  if KL(p‖q) > ε, else 0

on the kept tokens and the rest, or on two outcomes, the sampled token `a` and the rest. With ε = 0 the ball is the
old policy, so the penalty is KL(p‖q) everywhere: the fixed penalty of PPO (arXiv 1707.06347, section 4), with the KL in
the other direction.

On two outcomes, `∂ log(1 − p(a))/∂ log p(a) = −p(a)/(1 − p(a))`, so the gradient is one number for each token:

    ∂R/∂ log p(a) = p(a)·(log(p(a)/π(a)) − log((1 − p(a))/(1 − π(a))))
"""

import math
from typing import NamedTuple

import torch

from troll_trl.trust_region import ROUNDING
from troll_trl.trust_region.binary import binary_log_probs
from troll_trl.trust_region.projection import kl_divergence, project


class Penalty(NamedTuple):
    """Result of [`kl_penalty`]."""

    regression: torch.Tensor  # (...), KL(p ‖ stopgrad π) in nats, differentiable; 0 inside the ball
    policy_kl: torch.Tensor  # (...), KL(p‖q) in nats
    outside: torch.Tensor  # (...) bool, tokens with a penalty


def kl_penalty(policy: torch.Tensor, old: torch.Tensor, kl_bound: float) -> Penalty:
    """
    Compute TROLL's regression (arXiv 2510.03817, equation 6) of every token. See the module for the derivation.

    Args:
        policy, old (`torch.Tensor` of shape `(..., S)`, float32 or float64):
            Log-probabilities of the policy and of the old policy, the sampled token in slot 0: on the kept tokens and
            the rest, or `S = 1` for the penalty on two outcomes.
        kl_bound (`float`):
            Radius ε ≥ 0 of the ball, in nats. At 0, every token whose policy has moved by more than rounding has a
            penalty.

    Returns:
        [`Penalty`]: `regression`, `policy_kl` and `outside`, all `(...)`. Only `regression` carries a gradient, to
        `policy`.

    Raises:
        ValueError: with a `kl_bound` other than 0, what [`~troll_trl.project`] refuses, such as a negative one or NaN.
    """
    binary = policy.shape[-1] == 1  # only the sampled token is known
    fixed = policy.detach()
    p, q = (binary_log_probs(x[..., 0]) for x in (fixed, old)) if binary else (fixed, old)  # (..., 2 or S)
    if kl_bound == 0:
        target = q
        policy_kl = kl_divergence(p, q).clamp(min=0)
        # Two passes of equal weights differ in the last digits. Without another gradient, Adam would scale the gradient
        # of this difference up to full steps. On two outcomes `log p(a)` decides: if `p(a)` is near 1, its rounding
        # changes many digits of `log (1 − p(a))`. In an unused slot, the difference is NaN: not larger.
        moved = (p - q).abs() > ROUNDING * q.abs().clamp(min=1)
        outside = moved[..., 0] if binary else moved.any(-1)
    else:
        projection = project(p, q, kl_bound)
        target = projection.log_probs
        policy_kl = projection.policy_kl
        outside = projection.eta > 0
    regression = _two_outcome_kl(policy[..., 0], p, target) if binary else kl_divergence(policy, target)
    # For other tokens the term is 0. If it were computed, its gradient would be a rounding error
    return Penalty(regression.masked_fill(~outside, 0.0), policy_kl, outside)


def _two_outcome_kl(log_p: torch.Tensor, log_pair: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ target) `(...)` on two outcomes, from the log-probabilities `log_pair` of `p` and `target` `(..., 2)`,
    without gradient, with the module's gradient with respect to `log_p` `(...)`. Autograd's would be 0 where
    `binary_log_probs` clamps a `p(a)` near 1."""
    log_ratios = log_pair - target  # (..., 2), of the sampled token and of the rest
    slope = log_pair[..., 0].exp() * (log_ratios[..., 0] - log_ratios[..., 1])
    impossible = log_p.detach() == -math.inf
    slope = slope.masked_fill(impossible, 0.0)  # 0·log 0 = 0
    zero = (log_p - log_p.detach()).masked_fill(impossible, 0.0)  # its gradient with respect to log p(a) is 1
    return kl_divergence(log_pair, target) + slope * zero

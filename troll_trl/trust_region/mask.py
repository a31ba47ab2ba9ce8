"""
DPPO's mask: a token that has moved too far with its advantage loses its gradient (arXiv 2602.04879).

With policy `p`, old policy `q`, sampled token `a`, ratio `r = p(a)/q(a)` and advantage `A`, the gradient of a token is

    M·min(r, C)·A·∇log p(a)

where `M = 0` if the divergence of `p` from `q` exceeds its bound and the token has moved with its advantage (`A > 0`
and `r > 1`, or `A < 0` and `r < 1`), else 1. A surrogate with an open clip range has the gradient `r·A·∇log p(a)`. In
place of `log p(a)`, this module gives it `s + w·(log p(a) − s)`, with `s = stopgrad log p(a)` and a constant weight
`w`. This has the same value and `w` times the gradient. Hence `w = M·min(1, C/r)`.
"""

import math
from typing import NamedTuple

import torch

from troll_trl.fields import is_number
from troll_trl.trust_region.projection import kl_divergence


class MaskWeight(NamedTuple):
    """Result of [`mask_weight`]."""

    weight: torch.Tensor  # (...), weight `w` of the gradient of `log p(a)`
    divergence: torch.Tensor  # (...), of the policy from the old policy
    masked: torch.Tensor  # (...) bool, tokens without gradient, `M = 0`


def binary_tv(policy: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`|p(a) − q(a)|` `(...)`: the total variation of (a, not a), from log-probabilities `(..., S)`."""
    return (policy[..., 0].exp() - old[..., 0].exp()).abs()


def binary_kl(policy: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) `(...)` of (a, not a), in nats, from the sampled token alone."""
    # Rounding can make a log-probability 0 or more. 1 − q would then have no logarithm
    log_p, log_q = (x[..., 0].clamp(max=-torch.finfo(x.dtype).eps / 2) for x in (policy, old))
    log_other_p, log_other_q = (-torch.expm1(log_p)).log(), (-torch.expm1(log_q)).log()
    sampled = torch.where(log_q > -math.inf, log_q.exp() * (log_q - log_p), 0.0)
    return sampled + log_other_q.exp() * (log_other_q - log_other_p)


def topk_tv(policy: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`½ Σ |p − q|` `(...)` over the kept tokens and the rest, from log-probabilities `(..., S)` of the policy and the
    old policy (DPPO, arXiv 2602.04879). The full total variation exceeds it by at most the smaller rest mass."""
    return 0.5 * (policy.exp() - old.exp()).abs().sum(-1)


def topk_kl(policy: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) `(...)` over the kept tokens and the rest, in nats, as [`topk_tv`]. It is at most the full KL."""
    # A policy's rest, a log-sum-exp, is −∞ only if the support is the whole vocabulary. If an engine's old policy then
    # has mass there, it is rounding: the policy has not lost it.
    empty = policy == -math.inf
    empty[..., :-1] = False
    return kl_divergence(old.masked_fill(empty, -math.inf), policy)


DIVERGENCES = {divergence.__name__: divergence for divergence in (binary_tv, binary_kl, topk_tv, topk_kl)}


def checked_bound(divergence_type: str, divergence_bound: float | None = None) -> float:
    """The bound, by default the paper's 0.15 or 0.05 nats. A `ValueError` names a type or a bound out of range."""
    if divergence_type not in [*DIVERGENCES]:  # a list: what YAML holds may have no hash
        raise ValueError(f"`divergence_type` must be one of {', '.join(DIVERGENCES)}, got {divergence_type!r}.")
    is_tv = divergence_type.endswith("_tv")
    bound = (0.15 if is_tv else 0.05) if divergence_bound is None else divergence_bound
    if not (is_number(bound) and bound > 0 and (bound < 1 or not is_tv)):  # no total variation exceeds 1
        allowed = "(0, 1)" if is_tv else "(0, inf]"
        raise ValueError(f"`divergence_bound` of {divergence_type} must be in {allowed}, got {bound!r}.")
    return bound


@torch.no_grad()
def mask_weight(
    policy: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    divergence_type: str,
    divergence_bound: float,
    ratio_cap: float | None = None,
) -> MaskWeight:
    """
    Weight of each token's gradient under DPPO's mask (arXiv 2602.04879, section 4). See the module for the derivation.

    Args:
        policy, old (`torch.Tensor` of shape `(..., S)`):
            Log-probabilities of the policy and of the old policy, the sampled token in slot 0: on the kept tokens and
            the rest, or `S = 1` for a binary divergence.
        advantages (`torch.Tensor`):
            Advantages, of a shape that broadcasts to `(...)`.
        divergence_type (`str`):
            A key of `DIVERGENCES`.
        divergence_bound (`float`):
            A token whose divergence is at most this keeps its gradient, whichever way it has moved.
        ratio_cap (`float`, *optional*):
            Largest ratio C ≥ 1 by which a gradient is scaled; by default there is no limit. The cap sets no gradient to
            zero.

    Returns:
        [`MaskWeight`]: `weight`, `divergence` and `masked`, all `(...)`.

    Raises:
        ValueError: an unknown divergence, or a bound out of its range.
    """
    divergence_bound = checked_bound(divergence_type, divergence_bound)
    log_ratio = policy[..., 0] - old[..., 0]
    divergence = DIVERGENCES[divergence_type](policy, old)
    masked = (divergence > divergence_bound) & (log_ratio * advantages.sign() > 0)  # it moved with its advantage
    weight = torch.ones_like(log_ratio)
    if ratio_cap is not None:
        weight = (math.log(ratio_cap) - log_ratio).exp().clamp(max=1.0)  # an overflowing ratio would make it 0
    return MaskWeight(weight.masked_fill(masked, 0.0), divergence, masked)


def scale_gradient(log_probs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`log_probs` `(...)`, of any floating dtype, as they are, with `weight` `(...)` times their gradient."""
    return log_probs.detach() + weight * (log_probs - log_probs.detach())

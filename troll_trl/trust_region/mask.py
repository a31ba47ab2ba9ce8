"""
DPPO's mask: a token that has moved too far in the direction of its advantage loses its gradient (arXiv 2602.04879).

With policy `p`, old policy `q`, sampled token `a`, ratio `r = p(a)/q(a)` and advantage `A`, the gradient of a token is

    −M·min(r, C)·A·∇log p(a)

where `M = 0` if the divergence of `p` from `q` exceeds its bound and the token has moved in the direction of its
advantage (`A > 0` and `r > 1`, or `A < 0` and `r < 1`), else 1. A surrogate `−r·A` without a clip has the gradient
`−r·A·∇log p(a)`, so a constant weight `w = M·min(1, C/r)` of the advantage turns it into the mask's.
"""

import math
from typing import NamedTuple

import torch

from troll_trl.fields import is_number
from troll_trl.trust_region import HIGHEST_LOG_RATIO
from troll_trl.trust_region.binary import binary_log_probs
from troll_trl.trust_region.projection import kl_divergence


class MaskWeight(NamedTuple):
    """Result of [`mask_weight`]."""

    weight: torch.Tensor  # (...), weight `w` of the advantage
    divergence: torch.Tensor  # (...), of the policy from the old policy
    masked: torch.Tensor  # (...) bool, tokens without gradient, `M = 0`


def binary_tv(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """Return `|p(a) − q(a)|` `(...)`, the total variation of (a, not a), from `log p(a)` and `log q(a)` `(...)`."""
    return (log_probs.exp() - old_log_probs.exp()).abs()


def binary_kl(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """Return DPPO's KL(q‖p) `(...)` of (a, not a), in nats, from `log p(a)` and `log q(a)` `(...)`. The projection and
    the penalty measure KL(p‖q)."""
    return kl_divergence(binary_log_probs(old_log_probs), binary_log_probs(log_probs))


DIVERGENCES = {divergence.__name__: divergence for divergence in (binary_tv, binary_kl)}


def checked_bound(divergence_type: str, divergence_bound: float | None = None) -> float:
    """Return the bound, by default the paper's 0.15 or 0.05 nats. A `ValueError` names a type or bound out of range."""
    if divergence_type not in [*DIVERGENCES]:  # a list: a value from YAML may not be hashable
        raise ValueError(
            f"A mask's `divergence_type` must be one of {', '.join(DIVERGENCES)}, got {divergence_type!r}."
        )
    is_tv = divergence_type == binary_tv.__name__
    bound = (0.15 if is_tv else 0.05) if divergence_bound is None else divergence_bound
    if not (is_number(bound) and bound > 0 and (bound < 1 or not is_tv)):  # no total variation exceeds 1
        allowed = "(0, 1)" if is_tv else "(0, inf]"
        raise ValueError(f"`divergence_bound` of {divergence_type} must be in {allowed}, got {bound!r}.")
    return bound


@torch.no_grad()
def mask_weight(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    divergence_type: str,
    divergence_bound: float,
    ratio_cap: float | None = None,
) -> MaskWeight:
    """
    Compute the weight of each token's advantage under DPPO's mask (arXiv 2602.04879, section 4). See the module for the
    derivation.

    Args:
        log_probs, old_log_probs (`torch.Tensor` of shape `(...)`):
            Log-probability of the sampled token under the policy and under the old policy.
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
    log_ratio = log_probs - old_log_probs
    divergence = DIVERGENCES[divergence_type](log_probs, old_log_probs)
    masked = (divergence > divergence_bound) & (log_ratio * advantages.sign() > 0)  # in the direction of `A`
    weight = torch.ones_like(log_ratio)
    if ratio_cap is not None:  # the loss, too, limits `log r` to `HIGHEST_LOG_RATIO`, so `w·r` stays at most C
        weight = (math.log(ratio_cap) - log_ratio.clamp(max=HIGHEST_LOG_RATIO)).exp().clamp(max=1.0)
    return MaskWeight(weight.masked_fill(masked, 0.0), divergence, masked)

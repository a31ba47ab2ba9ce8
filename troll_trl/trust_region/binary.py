"""binary_log_probs(): the distribution on two outcomes, the sampled token and all others."""

import math

import torch

_LOG_OF_ALMOST_ONE = -(2.0**-23)  # rounding can give 0 or more, and then 1 − p(a) has no logarithm


def binary_log_probs(log_probs: torch.Tensor) -> torch.Tensor:
    """
    Return `log p(a)` and `log (1 − p(a))`, the latter by log1mexp, which keeps its digits at both ends.

    Args:
        log_probs (`torch.Tensor` of shape `(...)`, float32 or float64):
            Log-probability `log p(a)` of the sampled token. `-inf` is allowed.

    Returns:
        `torch.Tensor` of shape `(..., 2)`.
    """
    log_p = log_probs.clamp(max=_LOG_OF_ALMOST_ONE)
    near_one = log_p > -math.log(2)
    log_rest = torch.where(near_one, (-torch.expm1(log_p)).log(), torch.log1p(-log_p.exp()))
    return torch.stack([log_p, log_rest], -1)

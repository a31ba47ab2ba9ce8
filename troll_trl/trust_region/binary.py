"""binary_log_probs(): the distribution on two outcomes, the sampled token and all others."""

import math

import torch


def binary_log_probs(log_probs: torch.Tensor) -> torch.Tensor:
    """
    Return `log p(a)` and `log (1 − p(a))`, the latter by log1mexp, which is accurate at both ends.

    Args:
        log_probs (`torch.Tensor` of shape `(...)`, float32 or float64):
            Log-probability `log p(a)` of the sampled token. `-inf` is allowed.

    Returns:
        `torch.Tensor` of shape `(..., 2)`.
    """
    # Rounding can give 0 or more, and then 1 − p(a) has no logarithm
    log_p = log_probs.clamp(max=-torch.finfo(log_probs.dtype).eps)
    near_one = log_p > -math.log(2)
    log_rest = torch.where(near_one, (-torch.expm1(log_p)).log(), torch.log1p(-log_p.exp()))
    return torch.stack([log_p, log_rest], -1)

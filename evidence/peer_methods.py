"""
Other methods than TROLL, as trust regions that the grids name by import path.

With `r = p(a)/q(a)`, policy `p`, old policy `q` and advantage `A`, TRL's surrogate of a token is `−r·A`. Both methods
read only the sampled token, and drop the gradient of some tokens: their `weight` of the advantage is 0.
"""

import math
from typing import Any

import torch

from troll_trl import TrustRegion, TrustRegionOutput


class Ipo(TrustRegion):
    """prime-rl's IPO loss with its current defaults: a token with `|p(a) − q(a)| > 0.3` has no gradient, whether it
    moved with its advantage or against it."""

    needs_support = False
    mean_metrics = {"troll/masked_fraction": ("masked", "tokens")}

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        change = policy[..., 0].detach().exp() - old[..., 0].exp()  # (B, C)
        masked = change.abs() > 0.3
        return TrustRegionOutput(policy[..., 0], token_stats={"masked": masked}, weight=(~masked).to(policy.dtype))


class Clip(TrustRegion):
    """
    PPO's clip as a mask, for an adaptive learning rate: a token whose ratio has left `1 ± epsilon` in the direction of
    its advantage has no gradient. The KL of a token is k3, the estimate `r − 1 − ln r` of KL(q‖p), which a clip can
    compute, times 0.05 over `kl_bound`: a bound of 0.2 multiplies the thresholds of the adaptive rate by 4.
    """

    needs_support = False
    mean_metrics = {"troll/masked_fraction": ("masked", "tokens"), "troll/policy_kl_mean": ("policy_kl", "tokens")}

    def __init__(self, config: Any):
        self.low, self.high = math.log1p(-config.epsilon), math.log1p(config.epsilon)
        self.kl_bound = float(config.kl_bound)
        self.scale = 0.05 / self.kl_bound

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        log_ratio = (policy[..., 0] - old[..., 0]).detach()  # (B, C)
        clipped = torch.where(advantages > 0, log_ratio > self.high, log_ratio < self.low)
        stats = {"masked": clipped, "policy_kl": self.scale * (torch.expm1(log_ratio) - log_ratio)}
        return TrustRegionOutput(policy[..., 0], token_stats=stats, weight=(~clipped).to(policy.dtype))

"""
Published peers of TROLL that anchor the policy with a penalty, as trust regions that peers.yaml names by import path.

With `r = p(a)/q(a)`, policy `p`, old policy `q` and advantage `A`, a trust region returns what TRL's surrogate
`−exp(log p(a) − log q(a))·A` reads in place of `log p(a)`, and a term that the trainer weights by `regression_coef`.
"""

import math
from typing import Any

import torch

from troll_trl import TrustRegion, TrustRegionOutput

_MOST_DRIFT = 2.0  # of CPGD's `r − 1`: so does a public implementation (siiRL, `dp_actor.py`)


class Cpgd(TrustRegion):
    """
    CPGD (arXiv 2505.12504): a plain policy gradient whose log-ratio is clipped, and a drift towards the old policy.

    The loss is `−min(ln r·A, clip(ln r, ln(1 − ε), ln(1 + ε))·A)`, with the gradient `A·∇log p(a)` of every token that
    has not moved too far with its advantage. The drift has the gradient `min(r − 1, 2)·∇log p(a)`: the gradient of k3,
    the estimate `r − 1 − ln r` of KL(q‖p), with a cap. `epsilon` is ε.
    """

    needs_support = False
    ratios = {"troll/policy_kl_mean": ("k3", "tokens")}

    def __init__(self, config: Any):
        self.low, self.high = math.log1p(-config.epsilon), math.log1p(config.epsilon)

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        log_p, log_q = policy[..., 0], old[..., 0]  # (B, C)
        change, log_ratio = log_p - log_p.detach(), log_p.detach() - log_q
        clipped = torch.where(advantages > 0, log_ratio > self.high, log_ratio < self.low)
        drift = torch.expm1(log_ratio)
        k3 = drift - log_ratio
        # At the value log q the ratio is 1, so the gradient of the surrogate is A·∇log p(a)
        return TrustRegionOutput(
            log_q + change.masked_fill(clipped, 0.0), k3 + drift.clamp(max=_MOST_DRIFT) * change, {"k3": k3}
        )


class Cfpo(TrustRegion):
    """
    CFPO (arXiv 2601.22801), also known as SPO: `−r·A + |A|·(r − 1)²/(2ε)` per token, without a clip.

    TRL's surrogate is the first term. The second one needs a `regression_coef` of 1. `epsilon`
    is ε.
    """

    needs_support = False
    maxima = {"troll/ratio_max": "ratio"}

    def __init__(self, config: Any):
        self.epsilon = config.epsilon

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        ratio = (policy[..., 0] - old[..., 0]).exp()  # (B, C)
        penalty = advantages.abs() * (ratio - 1).square() / (2 * self.epsilon)
        return TrustRegionOutput(policy[..., 0], penalty, {"ratio": ratio.detach()})

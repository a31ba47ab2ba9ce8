"""
Published peers of TROLL, as trust regions that the grids name by import path.

With `r = p(a)/q(a)`, policy `p`, old policy `q` and advantage `A`, TRL's surrogate of a token is `−r·A`. A trust region
returns what the surrogate reads in place of `log p(a)`, a `regression`, which the trainer weights by `regression_coef`
and adds to the token's loss, and a `weight` of the advantage. All of them read only the sampled token.
"""

import math
from typing import Any

import torch

from troll_trl import TrustRegion, TrustRegionOutput

_MOST_DRIFT = 2.0  # cap of CPGD's `r − 1`, as in a public implementation (siiRL, `dp_actor.py`)
# The defaults of prime-rl's `IPOLossConfig`, at commit 559b44772e471d1538537b8805cc77f3824a5e64
_IPO_THRESHOLD = 0.1
_IPO_TAU = 1e-3
_IPO_THRESHOLD_WITHOUT_KL = 0.3  # the current default, without the KL term


def _require_whole_regression(name: str, config: Any) -> None:
    if config.regression_coef != 1:
        raise ValueError(
            f"`regression_coef` must be 1 for {name}, whose penalty has its published weight, got "
            f"{config.regression_coef}. Leave the option out."
        )


class Cpgd(TrustRegion):
    """
    CPGD (arXiv 2505.12504): a plain policy gradient whose log-ratio is clipped, and a drift towards the old policy.

    The loss is `−min(ln r·A, clip(ln r, ln(1 − ε), ln(1 + ε))·A)`, with the gradient `A·∇log p(a)` of every token that
    has not moved too far in the direction of its advantage. The drift has the gradient `min(r − 1, 2)·∇log p(a)`: the
    gradient of k3, the estimate `r − 1 − ln r` of KL(q‖p), with a cap. `epsilon` is ε.
    """

    needs_support = False
    mean_metrics = {"troll/policy_kl_mean": ("k3", "tokens")}

    def __init__(self, config: Any):
        self.low, self.high = math.log1p(-config.epsilon), math.log1p(config.epsilon)

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        log_p, log_q = policy[..., 0], old[..., 0]  # (B, C)
        change = log_p - log_p.detach()
        log_ratio = log_p.detach() - log_q
        clipped = torch.where(advantages > 0, log_ratio > self.high, log_ratio < self.low)
        drift = torch.expm1(log_ratio)
        k3 = drift - log_ratio
        # At the value log q the ratio is 1, so the gradient of the surrogate is A·∇log p(a)
        regression = k3 + drift.clamp(max=_MOST_DRIFT) * change
        return TrustRegionOutput(log_q + change, regression, {"k3": k3}, (~clipped).to(log_p.dtype))


class Cfpo(TrustRegion):
    """CFPO (arXiv 2601.22801), also known as SPO: `−r·A + |A|·(r − 1)²/(2ε)` per token, without a clip. `epsilon` is
    ε."""

    needs_support = False
    max_metrics = {"troll/ratio_max": "ratio"}

    def __init__(self, config: Any):
        _require_whole_regression("CFPO", config)
        self.epsilon = config.epsilon

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        ratio = (policy[..., 0] - old[..., 0]).exp()  # (B, C)
        penalty = advantages.abs() * (ratio - 1).square() / (2 * self.epsilon)
        return TrustRegionOutput(policy[..., 0], penalty, {"ratio": ratio.detach()})


class Drpo(TrustRegion):
    """
    DRPO (arXiv 2606.09821, equation 8): `−r·A + |A|·(p(a) − q(a))²/(2δ·q(a))` per token, without a clip.

    The weight of `∇log p(a)` is `r·(A − |A|·(p(a) − q(a))/δ)`. At `|p(a) − q(a)| = δ`, DPPO's bound, a token that has
    moved in the direction of its advantage has weight 0; beyond, the weight moves the token back. `epsilon` is δ. The
    paper uses 12.5, with one update per rollout batch in its authors' code: then no weight changes by more than 8 %.
    """

    needs_support = False
    max_metrics = {"troll/divergence_max": "divergence"}

    def __init__(self, config: Any):
        _require_whole_regression("DRPO", config)
        self.delta = config.epsilon

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        log_p, log_q = policy[..., 0], old[..., 0]  # (B, C)
        q = log_q.exp()
        ratio = (log_p - log_q).exp()
        penalty = advantages.abs() * q * (ratio - 1).square() / (2 * self.delta)  # (p − q)²/q = q·(r − 1)²
        return TrustRegionOutput(log_p, penalty, {"divergence": (q * (ratio.detach() - 1)).abs()})


class Ipo(TrustRegion):
    """
    prime-rl's IPO loss: a token with `|p(a) − q(a)| > 0.1` has no surrogate, whether it moved with its advantage or
    against it, and `1e-3·(log r)²` acts on every token.
    """

    needs_support = False
    mean_metrics = {"troll/masked_fraction": ("masked", "tokens")}
    threshold, tau = _IPO_THRESHOLD, _IPO_TAU

    def __init__(self, config: Any):
        _require_whole_regression("IPO", config)

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        log_p, log_q = policy[..., 0], old[..., 0]  # (B, C)
        masked = (log_p.detach().exp() - log_q.exp()).abs() > self.threshold
        penalty = self.tau * (log_p - log_q).square()
        return TrustRegionOutput(log_p, penalty, {"masked": masked}, (~masked).to(log_p.dtype))


class IpoWithoutKl(Ipo):
    """IPO with prime-rl's current defaults: a threshold of 0.3, and no KL term."""

    threshold, tau = _IPO_THRESHOLD_WITHOUT_KL, 0.0


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

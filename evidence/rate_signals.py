"""Other signals for the learning rate that follows the trust region, as trust regions by their import path. Each puts
its signal and its thresholds in place of the rule's in `troll_trl.trainers.adaptive_rate`."""

from typing import Any

from troll_trl.trainers import adaptive_rate
from troll_trl.trust_region.regions import ProjectionTrustRegion


class _OtherSignal(ProjectionTrustRegion):
    """The projection, and a rate that follows `signal`, in multiples of the bound, between the thresholds `low` and
    `high`."""

    low, high = 3.0, 10.0

    def __init__(self, config: Any):
        super().__init__(float(config.kl_bound))
        adaptive_rate.LOW, adaptive_rate.HIGH = self.low, self.high
        rule_class: Any = adaptive_rate.AdaptiveLearningRate
        own = rule_class.follow

        def follow(rule: Any, kl: float, squared_kl: float, tokens: float, learning: float, **where: bool) -> None:
            rule.scale = 1 / self.kl_bound
            own(rule, kl, kl * self.signal(kl, squared_kl, tokens), tokens, learning, **where)

        rule_class.follow = follow

    def signal(self, kl: float, squared_kl: float, tokens: float) -> float:
        """The signal in nats, from `Σk`, `Σk²` and the number of tokens."""
        return squared_kl / kl if kl > 0 else 0.0


class Multiples(_OtherSignal):
    """The self-weighted KL with thresholds that are multiples of the bound, whatever the number of updates."""


class SelfWeighted(_OtherSignal):
    """The same with lower thresholds."""

    low, high = 2.0, 6.0


class Mean(_OtherSignal):
    """The mean KL of all tokens, with the thresholds of the first look."""

    low, high = 0.3, 1.2

    def signal(self, kl: float, squared_kl: float, tokens: float) -> float:
        return kl / max(tokens, 1)

"""Other signals for the learning rate that follows the trust region, as trust regions by their import path. Each puts
its signal and its thresholds in place of those of `troll_trl.trainers.adaptive_rate`."""

from typing import Any

from troll_trl.trainers import adaptive_rate
from troll_trl.trust_region.regions import ProjectionTrustRegion


class Mean(ProjectionTrustRegion):
    """The mean KL of all tokens over the bound, with the thresholds of the first look."""

    low, high = 0.3, 1.2

    def __init__(self, config: Any):
        super().__init__(float(config.kl_bound))
        adaptive_rate.LOW, adaptive_rate.HIGH = self.low, self.high
        own = adaptive_rate.AdaptiveLearningRate.follow

        def follow(
            self: Any, kl: float, squared_kl: float, tokens: float, learning: float, *, is_last: bool, may_grow: bool
        ) -> None:
            if squared_kl > 0:  # the rule divides it by `kl`
                squared_kl = kl * kl / tokens
            own(self, kl, squared_kl, tokens, learning, is_last=is_last, may_grow=may_grow)

        adaptive_rate.AdaptiveLearningRate.follow = follow  # type: ignore[method-assign]


class SelfWeighted(ProjectionTrustRegion):
    """The package's signal with lower thresholds."""

    low, high = 2.0, 6.0

    def __init__(self, config: Any):
        super().__init__(float(config.kl_bound))
        adaptive_rate.LOW, adaptive_rate.HIGH = self.low, self.high

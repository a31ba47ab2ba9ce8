"""Trainers that only the study uses: one logs the gradient of the regression, two have a fault, for docs/curves.md."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from troll_trl import TrollGRPOTrainer


class ShareTrainer(TrollGRPOTrainer):
    """
    TROLL that logs `troll/regression_grad_norm` at the last update of every rollout batch: the length of the gradient
    of the regression alone, to set beside `grad_norm`. It needs one more backward pass and one micro-batch an update.
    """

    def _terms_of_policy(
        self, trust_region_model, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        regression = super()._terms_of_policy(trust_region_model, mask, inputs, mode)
        of_a_batch = self.args.steps_per_generation * self.num_iterations
        if mode == "train" and regression.requires_grad and (self._step + 1) % of_a_batch == 0:
            weights = [weight for weight in self.model.parameters() if weight.requires_grad]
            gradients = torch.autograd.grad(regression, weights, retain_graph=True, allow_unused=True)
            norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
            self._metrics["train"]["troll/regression_grad_norm"].append(norm.item())
        return regression


class Float8RolloutTrainer(TrollGRPOTrainer):
    """TROLL whose rollouts and old policy come from weights in eight bits, as from an engine that quantises them."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.to(torch.float8_e4m3fn))
            batch = super()._generate_and_score_completions(inputs)
            for name, weight in self.model.named_parameters():
                weight.copy_(weights[name])
        return batch


class BrokenRewardTrainer(TrollGRPOTrainer):
    """TROLL whose first reward function returns NaN for all completions of the fifth and the ninth rollout batch."""

    def __init__(self, model, reward_funcs=None, *others, **kwargs):
        first, *rest = reward_funcs
        calls = itertools.count(1)

        @functools.wraps(first)
        def broken(*args, **kwargs):
            rewards = first(*args, **kwargs)
            breaks = self.model.training and next(calls) in (5, 9)  # an evaluation is not counted
            return [math.nan] * len(rewards) if breaks else rewards

        super().__init__(model, [broken, *rest], *others, **kwargs)


VARIANTS: dict[str, Callable[..., TrollGRPOTrainer]] = {
    "share": ShareTrainer,
    "float8-rollout": Float8RolloutTrainer,
    "broken-reward": BrokenRewardTrainer,
}

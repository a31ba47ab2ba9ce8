"""
Trainers that only the study uses: remedies for what TROLL loses where nothing is rare, trainers that record how far
each token moved and what a method left of its gradient, and two with a fault, for docs/curves.md.
"""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from troll_trl import TrollGRPOTrainer
from troll_trl.projection import kl_divergence, project

MOVES = "moves.npz"
KL_BOUND, REGRESSION_COEF, CLIP_RANGE = 0.05, 1.0, 0.2  # TROLL's defaults and TRL's


class MeasuredClipTrainer(TrollGRPOTrainer):
    """TRL's clip as TROLL with an open bound and without a regression. `troll/policy_kl_…` log its KL."""

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        args.kl_bound, args.regression_coef = 1e9, 0.0  # π = p
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high


class SignalTrainer(TrollGRPOTrainer):
    """TROLL without the regression of tokens whose advantage is 0, which have no gradient under a clip either."""

    def _terms_of_policy(self, loss_pass, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        signal = inputs["advantages"].reshape(len(mask), -1) != 0
        loss_pass.bounded.regression = loss_pass.bounded.regression * signal
        return super()._terms_of_policy(loss_pass, mask, inputs, mode)


class MultiplierTrainer(TrollGRPOTrainer):
    """TROLL whose regression is weighted by η / (1 + η): nearly 0 just outside the ball, nearly 1 far away."""

    def _terms_of_policy(self, loss_pass, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        eta = loss_pass.bounded.counted["eta"]  # (B, C)
        loss_pass.bounded.regression = loss_pass.bounded.regression * (eta / (1 + eta))
        return super()._terms_of_policy(loss_pass, mask, inputs, mode)


class ShareTrainer(TrollGRPOTrainer):
    """
    TROLL that logs `troll/regression_grad_norm` at the last update of every rollout batch: the length of the gradient
    of the regression alone, to set beside `grad_norm`. It needs one more backward pass and one micro-batch an update.
    """

    def _terms_of_policy(self, loss_pass, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        regression = super()._terms_of_policy(loss_pass, mask, inputs, mode)
        of_a_batch = self.args.steps_per_generation * self.num_iterations
        if mode == "train" and regression.requires_grad and (self._step + 1) % of_a_batch == 0:
            weights = [weight for weight in self.model.parameters() if weight.requires_grad]
            gradients = torch.autograd.grad(regression, weights, retain_graph=True, allow_unused=True)
            norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
            self._metrics["train"]["troll/regression_grad_norm"].append(norm.item())
        return regression


def gradient_kept(policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    What a clip and TROLL leave of the gradient of each token's unlimited ratio, at the same policy.

    All gradients are with respect to the token's logits. *Kept* is a method's gradient along the gradient of the
    unlimited ratio, as a part of the length of the latter. It is 1 if nothing binds, 0 if a clip binds, and below 0 if
    TROLL takes back what is beyond its bound.

    Args:
        policy, old (`torch.Tensor` of shape `(N, K + 1)`):
            Log-probabilities on the kept tokens, the sampled one first and the rest last.
        advantages (`torch.Tensor` of shape `(N,)`):
            Not 0.

    Returns:
        `dict` of `(N,)` tensors: `length` of the gradient of the unlimited ratio; `clip` and `troll`, what each keeps.
    """
    logits = policy.detach().requires_grad_()
    log_probs = logits.log_softmax(-1)
    ratio = (log_probs[:, 0] - old[:, 0]).exp()
    projection = project(log_probs, old, KL_BOUND)
    regression = kl_divergence(log_probs, projection.log_probs.detach()).masked_fill(projection.eta == 0, 0.0)
    losses = {
        "free": -ratio * advantages,
        "clip": -torch.min(ratio * advantages, ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages),
        "troll": -(projection.log_probs[:, 0] - old[:, 0]).exp() * advantages + REGRESSION_COEF * regression,
    }
    gradients = {
        name: torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0].nan_to_num(0.0)  # of unused slots
        for name, loss in losses.items()
    }
    free = gradients.pop("free")
    square = free.square().sum(-1).clamp(min=1e-30)
    return {"length": square.sqrt()} | {name: (free * g).sum(-1) / square for name, g in gradients.items()}


class Recording(TrollGRPOTrainer):
    """
    TROLL that writes `moves.npz`, with a row for every trained token that has an advantage: `update` within its rollout
    batch, from 0; `old` and `new`, its probability when sampled and at that update; `advantage`; and what
    [`gradient_kept`] returns.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rows: list[dict[str, np.ndarray]] = []

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        if "troll_old_log_probs" not in inputs or not self.model.training:
            return super()._compute_loss(model, inputs)

        def recorded(**model_inputs):
            output = model(**model_inputs)
            self._record(output.sparse_log_probs.detach(), inputs)
            return output

        return super()._compute_loss(recorded, inputs)

    def _record(self, policy: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Append the rows of a micro-batch. The last positions of `policy` `(B, L, K + 1)` are the completions'."""
        old = inputs["troll_old_log_probs"]  # (B, C, K + 1)
        advantages = inputs["advantages"].reshape(len(old), -1).expand(old.shape[:2])  # (B, C)
        chosen = inputs["completion_mask"].bool() & (advantages != 0)
        policy, old, advantages = policy[:, -old.shape[1] :][chosen], old[chosen], advantages[chosen]
        with torch.enable_grad():
            kept = gradient_kept(policy, old, advantages)
        row = {"old": old[:, 0].exp(), "new": policy[:, 0].exp(), "advantage": advantages} | kept
        update = torch.full_like(advantages, self._step % self.args.steps_per_generation)
        self._rows.append({name: value.numpy().astype(np.float32) for name, value in {"update": update, **row}.items()})

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        columns: dict[str, Any] = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        np.savez_compressed(Path(self.args.output_dir, MOVES), **columns)
        return output


class RecordingClipTrainer(Recording, MeasuredClipTrainer):
    """[`MeasuredClipTrainer`] that records its tokens."""


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
    "signal": SignalTrainer,
    "multiplier": MultiplierTrainer,
    "recorded": Recording,
    "recorded-clip": RecordingClipTrainer,
    "share": ShareTrainer,
    "float8-rollout": Float8RolloutTrainer,
    "broken-reward": BrokenRewardTrainer,
}

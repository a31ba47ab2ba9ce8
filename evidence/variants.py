"""Trainers of the study alone: the paper's fill, and clips whose KL is measured as TROLL's is."""

import math
from collections.abc import Callable
from typing import Any

import torch

from troll_trl import TrollGRPOTrainer

_FILL = math.log(1e-12)


def fill_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """
    The kept tokens with 1e-12 for all others, renormalised, in place of their mass.

    Args:
        log_probs (`torch.Tensor`):
            (..., K + 1), the rest last.
    """
    rest = torch.full_like(log_probs[..., -1:], _FILL)
    return torch.cat([log_probs[..., :-1], rest], -1).log_softmax(-1)


class FillTrainer(TrollGRPOTrainer):
    """
    TROLL without a rest bucket: policy and old policy are cut to the old policy's kept tokens, all others get 1e-12,
    and both are renormalised, as in the paper. (The paper cuts the policy to kept tokens of its own.)
    """

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        if "troll_old_log_probs" not in inputs:  # idle
            return super()._compute_loss(model, inputs)

        def filled(**model_inputs):
            output = model(**model_inputs)
            output.sparse_log_probs = fill_rest(output.sparse_log_probs)
            return output

        old = fill_rest(inputs["troll_old_log_probs"])  # (B, C, K + 1)
        # Of a masked position the support is empty: the sampled token has −∞, which no ratio may see
        sampled = torch.where(old[..., 0].isfinite(), old[..., 0], inputs["old_per_token_logps"])
        return super()._compute_loss(filled, inputs | {"troll_old_log_probs": old, "old_per_token_logps": sampled})


class MeasuredClipTrainer(TrollGRPOTrainer):
    """TRL's clip, by way of TROLL with the bound open and without a regression: `troll/policy_kl_…` are its KL."""

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        args.kl_bound, args.regression_coef = 1e9, 0.0  # π = p
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high


VARIANTS: dict[str, Callable[..., TrollGRPOTrainer]] = {"fill": FillTrainer, "measured": MeasuredClipTrainer}

"""TrollRLOOTrainer: what differs from TRL's RLOOTrainer, and nothing else."""

from typing import Any

import torch
from trl import RLOOTrainer

from troll_trl.resilience.checkpoint import CheckpointMixin
from troll_trl.resilience.input_checks import InputChecksMixin
from troll_trl.resilience.nonfinite import BadNumbersMixin
from troll_trl.trainers.base import PAPER, TrollMixin
from troll_trl.trainers.config import TrollRLOOConfig


class TrollRLOOTrainer(BadNumbersMixin, CheckpointMixin, InputChecksMixin, TrollMixin, RLOOTrainer):
    """
    RLOO with TROLL (Trust Region Optimization for Large Language Models, https://huggingface.co/papers/2510.03817):
    REINFORCE with a leave-one-out baseline, whose clip is replaced by a differentiable projection of every token's
    distribution onto a KL trust region around the old policy.

    RLOO's ratio is that of a whole completion. With policy `p`, old policy `q`, projection `π` and advantage `A`, the
    loss of a completion is `−exp(Σ_t log π_t(a_t) − log q_t(a_t))·A + α·Σ_t KL(p_t ‖ stopgrad π_t)`, averaged over the
    micro-batch. The trust region is each token's: it does not bound the ratio of a completion, which is a product over
    its tokens, as RLOO's clip does. The reference KL is part of the reward in RLOO, so that it needs nothing of TROLL.
    See [`TrollMixin`] for what is overridden.

    Args:
        model, reward_funcs, *args, **kwargs:
            As [`~trl.RLOOTrainer`].
        args ([`TrollRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            Configuration. A plain `RLOOConfig` is taken with TROLL's defaults.
    """

    _tag_names = ["trl", "rloo", "troll"]
    _name = "TROLL-RLOO"
    _paper = PAPER
    _config_class = TrollRLOOConfig

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        # A ratio of completions sums over tokens. Not scaled for gradient accumulation: the Trainer scales RLOO's loss
        return (values * mask).sum(-1).mean()

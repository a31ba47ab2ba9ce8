"""TrollRLOOTrainer: what differs from TRL's RLOOTrainer, and nothing else."""

from typing import Any

import torch
from trl import RLOOTrainer

from troll_trl.resilience.resilient_trainer import ResilientTrainer
from troll_trl.trainers.config import TrollRLOOConfig
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.trl_compat import with_parameters_of
from troll_trl.trainers.troll_trainer import TrollTrainer


class TrustRegionRLOO(TrollTrainer, RLOOTrainer):
    """The method alone: RLOO with a trust region, without what [`TrollRLOOTrainer`] adds for long runs."""

    _tag_names = ["trl", "rloo", "troll"]
    _name = "TROLL-RLOO"
    _paper = TROLL
    _config_class = TrollRLOOConfig

    def _keep_engine_policy(self, recorder, _prompts, completion_ids, *_):
        recorder.keep(completion_ids, recorder.answered, None)  # TRL's RLOO asks once, and drops the numbers

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        # A ratio of completions sums over tokens. Not scaled for gradient accumulation: the Trainer scales RLOO's loss
        return (values * mask).sum(-1).mean()


class TrollRLOOTrainer(ResilientTrainer, TrustRegionRLOO):
    """
    RLOO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models):
    REINFORCE with a leave-one-out baseline. A differentiable projection of every token's distribution onto a KL trust
    region around the old policy replaces its clip.

    RLOO's ratio is the ratio of a whole completion. With policy `p`, old policy `q`, projection `π` and advantage `A`,
    the loss of a completion is `−exp(Σ_t log π_t(a_t) − log q_t(a_t))·A + α·Σ_t KL(p_t ‖ stopgrad π_t)`, averaged over
    the micro-batch. The trust region bounds each token. Unlike RLOO's clip, it does not bound the ratio of a
    completion, which is a product over its tokens. The reference KL is part of the reward in RLOO; TROLL does not
    change it. With `trust_region="penalty"`, RLOO's clip stays, and the regression is added for tokens that have left
    the trust region.

    [`~troll_trl.trainers.troll_trainer.TrollTrainer`] has the overrides, and
    [`~troll_trl.resilience.resilient_trainer.ResilientTrainer`] keeps a long run alive. The arguments are the same as
    in [`~trl.RLOOTrainer`], except for one:

    Args:
        args ([`TrollRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            Configuration. A plain `RLOOConfig` gets TROLL's defaults.
    """

    @with_parameters_of(RLOOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

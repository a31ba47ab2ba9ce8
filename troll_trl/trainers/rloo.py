"""TrollRLOOTrainer: what differs from TRL's RLOOTrainer, and nothing else."""

from typing import Any

import torch
from trl import RLOOTrainer

from troll_trl.trainers.config import TrollRLOOConfig
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.old_policy import OLD_LOG_PROBS
from troll_trl.trainers.trl_compat import with_parameters_of
from troll_trl.trainers.troll_trainer import TrollTrainer


class TrollRLOOTrainer(TrollTrainer, RLOOTrainer):
    """
    RLOO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models):
    REINFORCE with a leave-one-out baseline. A differentiable projection of every token's distribution onto a KL trust
    region around the old policy replaces its clip.

    RLOO's ratio is the ratio of a whole completion. With policy `p`, old policy `q`, projection `π` and advantage `A`,
    the loss of a completion is `−exp(Σ_t log π_t(a_t) − log q_t(a_t))·A + α·Σ_t KL(p_t ‖ stopgrad π_t)`, averaged over
    the micro-batch. The trust region bounds each token. Unlike RLOO's clip, it does not bound the ratio of a
    completion, which is a product over its tokens. The reference KL is part of the reward in RLOO; TROLL does not
    change it.

    [`~troll_trl.trainers.troll_trainer.TrollTrainer`] has the overrides. The arguments are the same as in
    [`~trl.RLOOTrainer`], except for one:

    Args:
        args ([`TrollRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            Configuration. A plain `RLOOConfig` gets TROLL's defaults.
    """

    _tag_names = ["trl", "rloo", "troll"]
    _name = "TROLL-RLOO"
    _paper = TROLL
    _config_class = TrollRLOOConfig

    @with_parameters_of(RLOOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._scores: list[torch.Tensor] = []  # of the passes over the last rollout, `(B, C)`

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        self._scores = []
        output = super()._generate_and_score_completions(*args, **kwargs)
        if not self.trust_region.needs_support and self._has_old_policy():
            # TRL keeps the sum of a completion alone. Its first pass scores with the current weights
            output.setdefault(OLD_LOG_PROBS, self._scores[0])
        self._scores = []
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._bounded_policy is None:
            self._scores.append(scored[0])
        return scored

    def _keep_engine_policy(self, recorder, _prompts, completion_ids, *_):
        recorder.keep(completion_ids, recorder.answered, None)  # TRL's RLOO asks once, and drops the numbers

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        # A ratio of completions sums over tokens. Not scaled for gradient accumulation: the Trainer scales RLOO's loss
        return (values * mask).sum(-1).mean()

"""TrollRLOOTrainer: the parts of TROLL that are specific to RLOO."""

from trl import RLOOTrainer

from troll_trl.resilience.checkpoints import CheckpointedTrainer
from troll_trl.resilience.guard import GuardedTrainer
from troll_trl.trainers.config import TrollRLOOConfig
from troll_trl.trainers.loss import Ratio
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.troll_trainer import TrollTrainer


class TrustRegionRLOO(TrollTrainer, RLOOTrainer):
    """RLOO with a trust region, but without the fault handling of [`TrollRLOOTrainer`]."""

    _tag_names = ["trl", "rloo", "troll"]
    _name = "TROLL-RLOO"
    _paper = TROLL
    _config_class = TrollRLOOConfig
    _ratio = Ratio.SUM
    _scores_old_policy = True

    def _keep_engine_policy(self, engine_policy, _prompts, completion_ids, *_):
        engine_policy.keep(completion_ids, tool_mask=None, log_probs=engine_policy.answered)  # TRL's RLOO drops these


class TrollRLOOTrainer(GuardedTrainer, CheckpointedTrainer, TrustRegionRLOO):
    """
    RLOO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models):
    REINFORCE with a leave-one-out baseline. A differentiable projection of every token's distribution onto a KL trust
    region around the old policy replaces its clip.

    RLOO's ratio is the ratio of a whole completion. With policy `p`, old policy `q`, projection `π` and advantage `A`,
    the loss of a completion is `−exp(Σ_t log π_t(a_t) − log q_t(a_t))·A + α·Σ_t KL(p_t ‖ stopgrad π_t)`, averaged over
    the micro-batch. The trust region bounds each token. Unlike RLOO's clip, it does not bound the ratio of a
    completion, which is a product over its tokens. The reference KL is part of the reward in RLOO; apart from
    rounding, TROLL does not change it. With `trust_region="penalty"`, the regression acts alone, on an unlimited ratio.

    [`~troll_trl.trainers.troll_trainer.TrollTrainer`] says what TROLL changes,
    [`~troll_trl.resilience.guard.GuardedTrainer`] skips updates with a NaN, and
    [`~troll_trl.resilience.checkpoints.CheckpointedTrainer`] resumes exactly. The arguments are the same as in
    [`~trl.RLOOTrainer`], except for one:

    Args:
        args ([`TrollRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            Configuration. A plain `RLOOConfig` gets TROLL's defaults.
    """

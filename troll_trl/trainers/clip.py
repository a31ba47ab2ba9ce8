"""TRL's own trainers, as `troll grpo --method clip` trains with them: a fair comparison samples as TROLL does."""

from trl import GRPOTrainer, RLOOTrainer

from troll_trl.trainers.rollout_sampling import SampledAsConfigured


class ClipGRPOTrainer(SampledAsConfigured, GRPOTrainer):
    """TRL's trainer; only rollouts without vLLM are sampled as TROLL's."""


class ClipRLOOTrainer(SampledAsConfigured, RLOOTrainer):
    """TRL's trainer, changed as [`ClipGRPOTrainer`] is."""

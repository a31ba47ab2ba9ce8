"""TRL's own trainers for `troll grpo --method clip`. They sample as TROLL does, for a fair comparison."""

from trl import GRPOTrainer, RLOOTrainer

from troll_trl.trainers.rollout_sampling import SampledAsConfigured


class ClipGRPOTrainer(SampledAsConfigured, GRPOTrainer):
    """TRL's trainer, except that it samples rollouts without vLLM as TROLL does, with TROLL's mends of TRL."""


class ClipRLOOTrainer(SampledAsConfigured, RLOOTrainer):
    """TRL's trainer with the same change as [`ClipGRPOTrainer`]."""

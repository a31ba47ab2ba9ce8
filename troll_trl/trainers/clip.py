"""TRL's own trainers for `troll grpo --method clip`, with what TROLL's trainers change in TRL apart from the loss."""

from trl import GRPOTrainer, RLOOTrainer

from troll_trl.trainers.mended_trl import MendedTRL
from troll_trl.trainers.rollout_sampling import SampledAsConfigured


class ClipGRPOTrainer(SampledAsConfigured, MendedTRL, GRPOTrainer):
    """TRL's trainer with the two mixins that TROLL's trainer has, too, for a fair comparison."""


class ClipRLOOTrainer(SampledAsConfigured, MendedTRL, RLOOTrainer):
    """TRL's trainer with the same changes as [`ClipGRPOTrainer`]."""

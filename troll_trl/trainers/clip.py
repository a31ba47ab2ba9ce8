"""TRL's own trainers for `troll grpo --method clip`, with what TROLL's trainers change in TRL apart from the loss."""

from trl import GRPOTrainer, RLOOTrainer

from troll_trl.trainers.mended_trl import MendedTRL


class ClipGRPOTrainer(MendedTRL, GRPOTrainer):
    """TRL's trainer with the mixin that TROLL's trainer has, too, for a fair comparison."""


class ClipRLOOTrainer(MendedTRL, RLOOTrainer):
    """TRL's trainer with the same changes as [`ClipGRPOTrainer`]."""

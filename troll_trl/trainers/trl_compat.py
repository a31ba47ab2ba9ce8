"""The versions that the package is tested with, and every private name of theirs that the trainers use."""

import warnings
from importlib import import_module

from accelerate.logging import get_logger
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

logger = get_logger(__name__)

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

# Methods that are overridden or called, by their class
_OF_BOTH = ("_get_per_token_logps_and_entropies", "_generate_and_score_completions", "_generate", "_compute_loss")
PRIVATE = {
    GRPOTrainer: (*_OF_BOTH, "get_off_policy_mask"),
    RLOOTrainer: _OF_BOTH,
    Trainer: ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "_run_epoch"),
}

# Attributes of an instance, which no class has: `_is_vlm`, `_metrics`, `_step`, `_buffered_inputs`,
# `_last_world_entropy` and `_entropy_window_stats` of TRL's trainers, `_tr_loss` and `_globalstep_last_logged` of the
# Trainer, `_is_overflow` of accelerate's optimizer.

# No user can act on it: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type) -> None:
    """Raise an `ImportError` if a private method that `trainer_class` needs is gone. Warn of untested versions."""
    versions = {name: import_module(name).__version__ for name in TESTED}
    untested = [f"{name} {versions[name]}" for name in TESTED if not versions[name].startswith(f"{TESTED[name]}.")]
    note = f"Not tested with {', '.join(untested)}, but with {', '.join(map(' '.join, TESTED.items()))}."
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in PRIVATE.items()
        for name in names
        if issubclass(trainer_class, owner) and not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(f"troll_trl needs {', '.join(missing)}, which this version lacks. {note}")
    if untested:
        logger.warning(f"{note} `troll check` compares the loss and the LM head with TRL's here.")

"""The versions that the package is tested with, and every private name of theirs that it uses."""

import warnings
from importlib import import_module

from accelerate.logging import get_logger
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

logger = get_logger(__name__)

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

# What no test of theirs protects for us. A trainer overrides these methods, or reads these attributes of its own.
_OF_BOTH = "_get_per_token_logps_and_entropies _generate_and_score_completions _generate _prepare_inputs compute_loss"
PRIVATE = {GRPOTrainer: f"{_OF_BOTH} get_off_policy_mask", RLOOTrainer: _OF_BOTH}
PRIVATE[Trainer] = "_save_checkpoint _get_output_dir _push_from_checkpoint _run_epoch create_accelerator_and_postprocess"

# No user can act on it: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type) -> None:
    """Raise an `ImportError` if a trainer of TRL lacks a name that `trainer_class` needs. Warn of a version that was
    not tested."""
    installed = {name: import_module(name).__version__ for name in TESTED}
    untested = [f"{name} {version}" for name, version in installed.items() if not version.startswith(TESTED[name] + ".")]
    tested = ", ".join(f"{name} {version}" for name, version in TESTED.items())
    for owner, names in PRIVATE.items():
        missing = [name for name in names.split() if issubclass(trainer_class, owner) and not hasattr(owner, name)]
        if missing:
            raise ImportError(
                f"troll_trl needs {owner.__name__}.{', '.join(missing)}, which {', '.join(untested)} lacks. Tested: "
                f"{tested}."
            )
    if untested:
        logger.warning(
            f"Not tested with {', '.join(untested)} (tested: {tested}). `troll check` compares the loss and the LM head "
            "with TRL's here."
        )

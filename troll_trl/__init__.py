"""TROLL (Trust Region Optimization for Large Language Models, arXiv 2510.03817) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING

from troll_trl.moved import keep_older_names

if TYPE_CHECKING:
    from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig
    from troll_trl.trainers.grpo import TrollGRPOTrainer
    from troll_trl.trainers.rloo import TrollRLOOTrainer

__version__ = "0.1.0"
__all__ = ["TrollGRPOConfig", "TrollGRPOTrainer", "TrollRLOOConfig", "TrollRLOOTrainer", "__version__"]

keep_older_names()

# Loaded on first use: neither `troll --help` nor a reward by its older name should wait for torch and TRL.
_MODULES = {
    "TrollGRPOConfig": "troll_trl.trainers.config",
    "TrollGRPOTrainer": "troll_trl.trainers.grpo",
    "TrollRLOOConfig": "troll_trl.trainers.config",
    "TrollRLOOTrainer": "troll_trl.trainers.rloo",
}


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

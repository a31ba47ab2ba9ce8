"""TROLL (Trust Region Optimization for Large Language Models, arXiv 2510.03817) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING

from troll_trl.moved import keep_older_names

if TYPE_CHECKING:
    from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig
    from troll_trl.trainers.grpo import TrollGRPOTrainer
    from troll_trl.trainers.rloo import TrollRLOOTrainer
    from troll_trl.trust_region.mask import topk_tv, with_gradient_weight
    from troll_trl.trust_region.regions import Bounded, TrustRegion

__version__ = "0.1.0"
__all__ = [
    "Bounded",
    "TrollGRPOConfig",
    "TrollGRPOTrainer",
    "TrollRLOOConfig",
    "TrollRLOOTrainer",
    "TrustRegion",
    "__version__",
    "topk_tv",
    "with_gradient_weight",
]

keep_older_names()

# Loaded on first use: neither `troll --help` nor a reward by its older name should wait for torch and TRL.
_MODULES = {
    "TrollGRPOConfig": "troll_trl.trainers.config",
    "TrollGRPOTrainer": "troll_trl.trainers.grpo",
    "TrollRLOOConfig": "troll_trl.trainers.config",
    "TrollRLOOTrainer": "troll_trl.trainers.rloo",
    "Bounded": "troll_trl.trust_region.regions",
    "TrustRegion": "troll_trl.trust_region.regions",
    "topk_tv": "troll_trl.trust_region.mask",
    "with_gradient_weight": "troll_trl.trust_region.mask",
}


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

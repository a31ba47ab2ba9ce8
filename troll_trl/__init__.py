"""TROLL (Trust Region Optimization for Large Language Models, arXiv 2510.03817) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig
    from troll_trl.trainers.grpo import TrollGRPOTrainer, TrustRegionGRPO
    from troll_trl.trainers.rloo import TrollRLOOTrainer
    from troll_trl.trust_region.projection import Projection, project
    from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput
    from troll_trl.trust_region.sparse import SparseDistribution, sparsify

__version__ = "0.1.0"
__all__ = [
    "Projection",
    "SparseDistribution",
    "TrollGRPOConfig",
    "TrollGRPOTrainer",
    "TrollRLOOConfig",
    "TrollRLOOTrainer",
    "TrustRegion",
    "TrustRegionGRPO",
    "TrustRegionOutput",
    "__version__",
    "project",
    "sparsify",
]

# Loaded on first use: `troll configs` should not wait for torch and TRL.
_MODULES = {
    "TrollGRPOConfig": "troll_trl.trainers.config",
    "TrollGRPOTrainer": "troll_trl.trainers.grpo",
    "TrollRLOOConfig": "troll_trl.trainers.config",
    "TrollRLOOTrainer": "troll_trl.trainers.rloo",
    "TrustRegionGRPO": "troll_trl.trainers.grpo",
    "TrustRegionOutput": "troll_trl.trust_region.regions",
    "TrustRegion": "troll_trl.trust_region.regions",
    "Projection": "troll_trl.trust_region.projection",
    "project": "troll_trl.trust_region.projection",
    "SparseDistribution": "troll_trl.trust_region.sparse",
    "sparsify": "troll_trl.trust_region.sparse",
}


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

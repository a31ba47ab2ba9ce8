"""The sparse distribution under its public name; it lives in `troll_trl.trust_region.sparse`."""

from troll_trl.trust_region.sparse import SparseDistribution, sparsify

__all__ = ["SparseDistribution", "sparsify"]

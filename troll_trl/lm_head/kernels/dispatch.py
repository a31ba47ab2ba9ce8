"""The choice between the twins stands in the lowest room, whose projection has a kernel as well."""

from troll_trl.trust_region.dispatch import INTERPRETED, TRITON_AVAILABLE, jit, launch, use_triton

__all__ = ["INTERPRETED", "TRITON_AVAILABLE", "jit", "launch", "use_triton"]

"""The operations on one tile of logits: each a Triton kernel beside its torch twin. Import torch and Triton alone, but
for `checks.py`, which takes the projection's kernel along."""

from troll_trl.lm_head.kernels.checks import KernelCheck, self_check

__all__ = ["KernelCheck", "self_check"]

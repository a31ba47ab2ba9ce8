"""Which twin of an operation runs: its Triton kernel or its torch version. The two have one signature.

With `TRITON_INTERPRET=1` in the environment the kernels run in Triton's interpreter, on the CPU: that is how they are
tested without a GPU.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Triton ships with PyTorch on Linux only
TRITON_AVAILABLE = importlib.util.find_spec("triton") is not None
if TRITON_AVAILABLE:
    import triton

# `triton.jit` makes its choice when a kernel is defined, so this is read once as well
INTERPRETED = TRITON_AVAILABLE and bool(triton.knobs.runtime.interpret)


def use_triton(device: torch.device) -> bool:
    """Whether tensors of this device go through the Triton kernels."""
    return TRITON_AVAILABLE and (device.type in ("cuda", "xpu") or INTERPRETED)


def jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """
    `triton.jit`; leaves the function alone where Triton is not installed, and it is never called.

    Args:
        do_not_specialize (`Sequence[str]`, *optional*):
            Integer arguments that vary from call to call, whose divisibility is not worth a compilation of its own.
    """

    def decorate(function):
        return triton.jit(function, do_not_specialize=list(do_not_specialize)) if TRITON_AVAILABLE else function

    return decorate

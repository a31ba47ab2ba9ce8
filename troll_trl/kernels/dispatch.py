"""Chooses which version of an operation runs, its Triton kernel or its PyTorch fallback, and launches kernels.

The environment variable `TROLL_KERNELS` chooses: `auto` (the default) uses the kernels on an accelerator, and `torch`
uses the fallbacks everywhere. `troll check` compares both on a new machine. With `TRITON_INTERPRET=1` the kernels run
in Triton's interpreter, on the CPU, so the tests need no GPU.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

# PyTorch installs Triton on Linux only. The kernels import Triton from this module. Without Triton, no code calls the
# kernels, and `from __future__ import annotations` leaves `tl.constexpr` unevaluated.
TRITON_AVAILABLE = find_spec("triton") is not None
if TRITON_AVAILABLE:
    import triton
    import triton.language as tl
else:
    triton = tl = None

# `triton.jit` decides this when a kernel is defined, so read it only once here, too
INTERPRETED = TRITON_AVAILABLE and bool(triton.knobs.runtime.interpret)
# Whether the compiler may fuse a product and a sum into one operation, which rounds once. Triton 3.10 changes its
# default, which would change the last bits of a run's numbers.
FP_FUSION = True


def use_triton(device: torch.device) -> bool:
    """Whether tensors on this device use the Triton kernels. Raises a `ValueError` for an unknown `TROLL_KERNELS`."""
    if not TRITON_AVAILABLE or not (device.type in ("cuda", "xpu") or INTERPRETED):
        return False
    mode = os.environ.get("TROLL_KERNELS", "auto")
    if mode not in ("auto", "torch"):
        raise ValueError(f"TROLL_KERNELS must be one of auto, torch, got {mode!r}.")
    return mode == "auto"


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_capability(device)["has_fp64"])
    return device.type != "mps"


def on_device(device: torch.device) -> AbstractContextManager:
    """Make the device of the tensors the current one, on which Triton launches kernels."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def warps_for_row(slots: int) -> int:
    """Number of warps for a program that holds a row of this many numbers in registers: one per 128 numbers."""
    return max(slots // 128, 1)


def next_power_of_2(number: int) -> int:
    """Like `triton.next_power_of_2`, for a positive number. From the host, Triton's function takes thirty times as
    long."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Launch a kernel that [`jit`] made, on the `device` of its tensors. The package launches every kernel here. An
    empty `grid`, which CUDA would refuse, launches nothing."""
    if not torch.compiler.is_compiling():  # Inductor sets this for its graphs, and accepts no such argument
        options["enable_fp_fusion"] = FP_FUSION
    if all(grid):
        with on_device(device):
            kernel[grid](*arguments, **options)


def jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """Apply `triton.jit` or, if Triton is not installed, return the function unchanged: no code then calls it.
    `do_not_specialize` names integers that vary from call to call: Triton does not recompile when their
    divisibility changes."""

    def decorate(function):
        return triton.jit(function, do_not_specialize=list(do_not_specialize)) if TRITON_AVAILABLE else function

    return decorate

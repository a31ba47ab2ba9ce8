"""Chooses which version of an operation runs, its Triton kernel or its PyTorch fallback, and launches kernels.

`TROLL_KERNELS` in the environment chooses: `auto` (the default) takes the kernels on an accelerator, `torch` takes the
fallbacks everywhere. `troll check` compares both on a new machine.
With `TRITON_INTERPRET=1` the kernels run in Triton's interpreter, on the CPU: the tests need no GPU.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

# Triton ships with PyTorch on Linux only. The kernels take it from here. Without it nobody calls them, and with
# `from __future__ import annotations` nobody evaluates a `tl.constexpr`.
TRITON_AVAILABLE = find_spec("triton") is not None
if TRITON_AVAILABLE:
    import triton
    import triton.language as tl
else:
    triton = tl = None

# `triton.jit` makes its choice when a kernel is defined, so this is read once as well
INTERPRETED = TRITON_AVAILABLE and bool(triton.knobs.runtime.interpret)
MODES = ("auto", "torch")
# Whether the compiler may fuse a product and a sum into one operation, which rounds once. Triton's default changes with
# 3.10, and would change the last bits of a run.
FP_FUSION = True


def kernels_mode() -> str:
    """Return the value of `TROLL_KERNELS`: `auto` or `torch`. Any other is a `ValueError`."""
    mode = os.environ.get("TROLL_KERNELS", "auto")
    if mode not in MODES:
        raise ValueError(f"TROLL_KERNELS must be one of {', '.join(MODES)}, got {mode!r}.")
    return mode


def use_triton(device: torch.device) -> bool:
    """Whether tensors of this device go through the Triton kernels."""
    if not TRITON_AVAILABLE or not (device.type in ("cuda", "xpu") or INTERPRETED):
        return False
    return kernels_mode() != "torch"


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_capability(device)["has_fp64"])
    return device.type != "mps"


def on_device(device: torch.device) -> AbstractContextManager:
    """Makes the device of the tensors the current one, which Triton launches on."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def warps_for_row(slots: int) -> int:
    """Warps of a program that holds a row of this many numbers in registers. Each thread has up to 4 of them."""
    return max(slots // 128, 1)


def next_power_of_2(number: int) -> int:
    """`triton.next_power_of_2` of a positive number. From the host, a call of Triton's takes thirty times as long."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Launch a kernel that [`jit`] made, on the `device` of its tensors. The package launches every kernel here. A
    `grid` without any program, which CUDA would refuse, launches nothing."""
    if not torch.compiler.is_compiling():  # Inductor chooses for its graphs, and takes no such argument
        options["enable_fp_fusion"] = FP_FUSION
    if all(grid):
        with on_device(device):
            kernel[grid](*arguments, **options)


def jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """`triton.jit`; leaves the function alone if Triton is not installed, since then nobody calls it.
    `do_not_specialize` names integers that vary from call to call, whose divisibility is not worth a compilation."""

    def decorate(function):
        return triton.jit(function, do_not_specialize=list(do_not_specialize)) if TRITON_AVAILABLE else function

    return decorate

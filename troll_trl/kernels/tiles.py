"""What both passes share: the tile of products for some positions and part of the vocabulary, the transform from
products to logits, and the accumulation of a tile's gradient.

The PyTorch fallbacks use a float32 tile. The Triton kernels use a tile in the products' own dtype, and convert in
registers.

All sums are in units of the transform's `factor`: a logit is `z = factor·y`, with `y` the product, or its tanh in a
soft-capped model. The factor multiplies only differences `y − max y` and numbers per row. So no pass multiplies logits,
and no finite product overflows, not even the lowest number of a dtype, with which some models mask unused columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from troll_trl.kernels.dispatch import jit, tl, use_triton

# Replaces −∞ in float32, both as `y` and as a logit. Its exp() is 0 relative to any logit, while 0·(−∞) would be NaN.
# It is about −1e30, and a power of two: its last bits are 0, as `unused_bits` in topk.py assumes.
FLOOR = -(2.0**100)
_STRIDE_STEP = 16  # elements: a cache line of float32, and the alignment that bf16 matrix products need
# Tokens × vocabulary columns of one tile of the training pass. Large enough for matrix products at full speed, and
# small compared with everything else: 64 MiB of float32 on a CPU, and 256 MiB of bf16 on a GPU, like TRL's tile.
TRAINING_TILE = {"cpu": (1024, 16384), "accelerator": (4096, 32768)}


class LogitTransform(NamedTuple):
    """
    What a model does to the product `x` of hidden state and head before the softmax, and the sampling temperature:
    `z = softcap·tanh(scale·x/softcap)/temperature`, or `z = scale·x/temperature` without soft-capping. All fields are
    positive.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def slope(self) -> float:
        """`∂z/∂x` at 0, where soft-capping has no effect."""
        return self.scale / self.temperature

    @property
    def factor(self) -> float:
        """`z/y`."""
        return self.slope if self.softcap is None else self.softcap / self.temperature

    def cap_(self, tile: torch.Tensor) -> torch.Tensor:
        """Turn a float32 tile of products `x` into `y`, in place."""
        return tile if self.softcap is None else tile.mul_(self.scale / self.softcap).tanh_()

    def to_logits(self, y: torch.Tensor) -> torch.Tensor:
        """Logits of a few `y`, float32. A finite `y` gives a finite logit of at least `FLOOR`."""
        return torch.where((y <= FLOOR) & (y > -math.inf), FLOOR, self.factor * y)

    @staticmethod
    def softcap_derivative(y: torch.Tensor) -> torch.Tensor:
        """`(∂z/∂x)/slope = 1 − tanh²` of a soft-capped model."""
        return 1 - y.square()

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """Arguments of the kernels: `z = factor·tanh(tanh_scale·x)`, or `z = factor·x` without soft-capping."""
        tanh_scale = 1.0 if self.softcap is None else self.scale / self.softcap
        return {"tanh_scale": tanh_scale, "factor": self.factor, "HAS_SOFTCAP": self.softcap is not None}


@jit()
def cap(y, tanh_scale, HAS_SOFTCAP: tl.constexpr):
    """`LogitTransform.cap_` for kernels, float32."""
    if HAS_SOFTCAP:
        # Before torch 2.15, torch.compile passes Python floats as float64, which would change the type of the loops'
        # variables
        y = y * tl.cast(tanh_scale, tl.float32)
        # This is tanh, which Triton's interpreter lacks. 1 − e cancels near 0; there a series is exact to float32
        e = tl.exp2(-2 * 1.4426950408889634 * tl.abs(y))  # never overflows
        series = y * (1 + y * y * (-1 / 3 + y * y * (2 / 15)))
        y = tl.where(tl.abs(y) < 0.1, series, tl.where(y < 0, e - 1, 1 - e) / (1 + e))
    return y


@jit()
def to_logits(y, factor, FLOOR: tl.constexpr):
    """`LogitTransform.to_logits` for kernels, float32."""
    return tl.where((y <= FLOOR) & (y > float("-inf")), FLOOR, y * tl.cast(factor, tl.float32))


@jit()
def in_bits(factor):
    """Convert the factor to base 2: `exp(z) = exp2(in_bits(factor)·y)`. `tl.exp` takes twice the instructions, because
    it keeps subnormal results."""
    return tl.cast(factor, tl.float32) * 1.4426950408889634  # 1/log 2


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Dtype of the matrix products: autocast's if it is on, else the dtype of the hidden states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def product_into(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Write the products of `hidden` `(n, H)` and some rows `weight` `(v, H)` of the head into `out` `(n, v)`. `hidden`
    has the dtype of the products, `out` the same or float32."""
    weight = weight.to(hidden.dtype).t()
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight, out=out)
    else:
        out.copy_(torch.mm(hidden, weight))


def accumulate_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """
    `acc += a @ b` in float32. If every tile's product were rounded to bf16 before the addition, the bias of the sum
    over many tiles would exceed the rounding of the result. In TRL, this made the entropy drift lower over a few dozen
    steps.

    `acc` is `(m, n)`, float32; `a` `(m, k)` and `b` `(k, n)` have the same dtype.
    """
    # Some ROCm builds refuse a product whose dtype differs from the factors'
    mixed = acc.device.type == "cuda" and torch.version.hip is None and a.dtype != torch.float32
    if mixed:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)  # needs torch 2.10
    else:
        acc.addmm_(a.float(), b.float())


def empty_tile(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """
    An uninitialised `(rows, columns)` buffer for products of this dtype, in the dtype that the kernel or its fallback
    works in. Its row stride is an odd number of cache lines: a matrix product that writes unaligned rows is a third
    slower, and rows a power of two apart fall into the same cache sets.
    """
    stride = (math.ceil(columns / _STRIDE_STEP) | 1) * _STRIDE_STEP
    dtype = dtype if use_triton(device) else torch.float32
    return torch.empty((rows, stride), device=device, dtype=dtype)[:, :columns]


def training_tile(device: torch.device) -> tuple[int, int]:
    """Tokens and vocabulary columns of a training tile on this device."""
    return TRAINING_TILE["cpu" if device.type == "cpu" else "accelerator"]


def slices(length: int, step: int) -> list[slice]:
    """The slices of `step` numbers that cover a length. The last one may be shorter."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def to_slots(token_ids: torch.Tensor, start: int, tile: torch.Tensor) -> torch.Tensor:
    """Column `(n, K)` of every kept token in a tile `(n, v + 1)` that begins at token `start`, or the spare column."""
    spare = tile.shape[1] - 1
    local = token_ids.long() - start
    return torch.where((local >= 0) & (local < spare), local, spare)

"""What both passes share: the tile that holds the products of some positions and some of the vocabulary, what a model
does to them, and how the gradient of a tile is accumulated.

The PyTorch fallbacks work in a float32 tile; the Triton kernels in one of the product's own dtype, as they convert in
registers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from troll_trl.kernels.dispatch import jit, tl, use_triton

# Stands for −∞ in float32: exp() of it is 0 against any logit, while 0·(−∞) would be NaN
FLOOR = -1e30
_STRIDE_STEP = 16  # elements: a cache line of float32, and the alignment that matrix products want of bf16
# Tokens × vocabulary columns of one tile of the training pass. Large enough for the matrix products to run at full
# speed, small enough to count for nothing: 64 MiB of float32 on a CPU; on a GPU 256 MiB of bf16, as TRL's tile.
TRAINING_TILE = {"cpu": (1024, 16384), "accelerator": (4096, 32768)}


class LogitTransform(NamedTuple):
    """
    What a model does to the product of hidden state and head before the softmax, and the sampling temperature:
    `z = softcap·tanh(scale·y/softcap)/temperature`, or `z = scale·y/temperature` without soft-capping.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def slope(self) -> float:
        """`∂z/∂y` where soft-capping is not felt."""
        return self.scale / self.temperature

    def apply_(self, tile: torch.Tensor) -> torch.Tensor:
        """Turn a float32 tile of products into logits, in place."""
        if self.softcap is None:
            return tile if self.slope == 1.0 else tile.mul_(self.slope)
        return tile.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def softcap_derivative(self, logits: torch.Tensor) -> torch.Tensor:
        """`(∂z/∂y)/slope = 1 − tanh²`, from the transformed logits `z`."""
        assert self.softcap is not None  # called for soft-capped models only
        return 1 - (logits * (self.temperature / self.softcap)).square()

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """Arguments of [`to_logits`]: `z = outer·tanh(inner·y)`, or `z = outer·y` without soft-capping."""
        if self.softcap is None:
            return {"inner": 1.0, "outer": self.slope, "HAS_SOFTCAP": False}
        return {"inner": self.scale / self.softcap, "outer": self.softcap / self.temperature, "HAS_SOFTCAP": True}


@jit()
def to_logits(y, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """`LogitTransform.apply_` for kernels, float32."""
    # Before torch 2.15, torch.compile passes Python's floats as float64, and with them the loops' variables would
    # change their type
    inner, outer = tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    if HAS_SOFTCAP:
        y = y * inner
        # tanh, which Triton's interpreter has not. 1 − e cancels near 0, where a series is exact to float32
        e = tl.exp(-2 * tl.abs(y))  # never overflows
        series = y * (1 + y * y * (-1 / 3 + y * y * (2 / 15)))
        y = tl.where(tl.abs(y) < 0.1, series, tl.where(y < 0, e - 1, 1 - e) / (1 + e))
    return y * outer


@jit()
def softcap_derivative(z, outer):
    """`LogitTransform.softcap_derivative` for kernels, float32."""
    t = z / tl.cast(outer, tl.float32)
    return 1 - t * t


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Dtype of the matrix products: autocast's where it is on, else that of the hidden states."""
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
    `acc += a @ b` in float32. Rounding every tile's product to bf16 before it is added would bias the sum over many
    tiles, and with it the training, by more than the rounding of the result: TRL saw the entropy drift lower over a few
    dozen steps.

    `acc` is `(m, n)`, float32; `a` `(m, k)` and `b` `(k, n)` have one dtype.
    """
    # ROCm has had builds that refuse a product in another dtype than its factors'
    mixed = acc.device.type == "cuda" and torch.version.hip is None and a.dtype != torch.float32
    if mixed:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)  # from torch 2.10
    else:
        acc.addmm_(a.float(), b.float())


def empty_tile(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """
    An uninitialised `(rows, columns)` buffer for products of this dtype, in the dtype that the kernel or its fallback
    works in. Its row stride is an odd number of cache lines: a matrix product writes unaligned rows a third slower, and
    rows a power of two apart fall into the same cache sets.
    """
    stride = (math.ceil(columns / _STRIDE_STEP) | 1) * _STRIDE_STEP
    dtype = dtype if use_triton(device) else torch.float32
    return torch.empty((rows, stride), device=device, dtype=dtype)[:, :columns]


def training_tile(device: torch.device) -> tuple[int, int]:
    """Tokens and vocabulary columns of a training tile on this device."""
    return TRAINING_TILE["cpu" if device.type == "cpu" else "accelerator"]


def slices(length: int, step: int) -> list[slice]:
    """The parts of a length, `step` long each, of which the last may be shorter."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def to_slots(token_ids: torch.Tensor, start: int, tile: torch.Tensor) -> torch.Tensor:
    """Column `(n, K)` of every kept token within a tile `(n, v + 1)` from token `start` on, or its spare column."""
    spare = tile.shape[1] - 1
    local = token_ids.long() - start
    return torch.where((local >= 0) & (local < spare), local, spare)

"""One operation of the training pass: overwriting a tile of products with the gradient of the loss, in one pass."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton
from troll_trl.kernels.fold import KEPT_BLOCK, KEPT_WARPS
from troll_trl.kernels.tiles import FLOOR, LogitTransform, cap, in_bits, to_slots

BLOCK_SIZE = 2048  # columns per program: each thread has 16 elements, as in fold.py
NUM_WARPS = 4


class Coefficients(NamedTuple):
    """What the gradient of `n` tokens needs in addition to the tile, in float32. The gradient is `kept` at the kept
    tokens, and `exp(z − R)·(constant + linear·y)` at every other token, with `y = z/factor` (see tiles.py)."""

    kept: torch.Tensor  # (n, K), 0 in unused slots
    rest_log_sum_exp: torch.Tensor  # (n, 1), R; +∞ for a rest without mass, whose gradient is then 0
    constant: torch.Tensor  # (n, 1)
    linear: torch.Tensor | None  # (n, 1), `None` without a gradient for the entropy


def gradient_tile(
    tile: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitTransform,
    token_ids: torch.Tensor,
    start: int,
    coefficients: Coefficients,
) -> torch.Tensor:
    """Overwrite the products in a tile `(n, v + 1)` with their gradient, from the `coefficients` of its tokens. Returns
    a view `(n, v)` of the tile. The other arguments are as in [`~troll_trl.kernels.fold.online_logsumexp`]."""
    overwrite = _gradient_triton if use_triton(tile.device) else _gradient_torch
    overwrite(tile, bias, transform, token_ids, start, coefficients)
    return tile[:, :-1]


def _gradient_torch(tile, bias, transform, token_ids, start, coefficients):
    body = tile[:, :-1]
    if bias is not None:
        body.add_(bias)
    transform.cap_(body)
    derivative = None if transform.softcap is None else transform.softcap_derivative(body)
    factor = coefficients.constant
    if coefficients.linear is not None:
        finite = torch.finfo(body.dtype)  # infinity times an `e_v` of 0 would be NaN
        factor = torch.addcmul(factor, coefficients.linear, body).clamp_(finite.min, finite.max)
    body.mul_(transform.factor).sub_(coefficients.rest_log_sum_exp).exp_().mul_(factor)
    if derivative is not None:
        body.mul_(derivative)
    # Kept entries are not part of the rest, and may have overflowed in the exp
    tile.scatter_(1, to_slots(token_ids, start, tile), coefficients.kept)


def _gradient_triton(tile, bias, transform, token_ids, start, coefficients):
    products = (tile, tile.stride(0))
    columns = tile.shape[1] - 1
    at_kept, *at_others = coefficients
    block = min(BLOCK_SIZE, next_power_of_2(columns))
    grid = (len(tile), math.ceil(columns / block))
    constants = {"BLOCK": block, "num_warps": NUM_WARPS, "HAS_LINEAR": coefficients.linear is not None, "FLOOR": FLOOR}
    constants |= transform.kernel_arguments
    launch(_gradient_kernel, grid, tile.device, *products, bias, *at_others, columns, **constants)
    slots = token_ids.numel()
    kept = (token_ids, at_kept, slots, token_ids.shape[1], start, columns)
    constants = {"BLOCK": KEPT_BLOCK, "num_warps": KEPT_WARPS}
    launch(_put_kept_kernel, (math.ceil(slots / KEPT_BLOCK),), tile.device, *products, *kept, **constants)


@jit()
def _gradient_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    rest_ptr,
    constant_ptr,
    linear_ptr,
    columns,
    tanh_scale,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token and block of columns. The row index has 64 bits: rows times stride may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < columns
    y = tl.load(tile_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = cap(y, tanh_scale, HAS_SOFTCAP)
    # The difference comes first: `in_bits·y` and `in_bits·R` would each be rounded
    grad = tl.exp2((y * tl.cast(factor, tl.float32) - tl.load(rest_ptr + row)) * in_bits(1.0))  # e_v
    factor = tl.load(constant_ptr + row)
    if HAS_LINEAR:
        grad *= factor + tl.load(linear_ptr + row) * tl.maximum(y, FLOOR)  # infinity times an e_v of 0 would be NaN
    else:
        grad *= factor
    if HAS_SOFTCAP:
        grad *= 1 - y * y  # `LogitTransform.softcap_derivative`
    tl.store(tile_ptr + offsets, grad.to(tile_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["slots", "kept_count", "start"])
def _put_kept_kernel(
    tile_ptr,
    tile_stride,
    ids_ptr,
    kept_ptr,
    slots,
    kept_count,
    start,
    columns,
    BLOCK: tl.constexpr,
):
    """Overwrite the kept entries, which are not part of the rest and may have overflowed in the exp. This is a separate
    launch, as in fold.py, because these entries must be written last."""
    # Indices into the slots of all tokens. They have 64 bits: rows times stride may exceed 2³¹
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + slot, mask=slot < slots, other=-1) - start
    inside = (slot < slots) & (local >= 0) & (local < columns)
    kept = tl.load(kept_ptr + slot, mask=inside, other=0.0)
    tl.store(tile_ptr + slot // kept_count * tile_stride + local, kept.to(tile_ptr.dtype.element_ty), mask=inside)

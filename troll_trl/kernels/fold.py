"""One operation of the training pass: folding a tile of logits into running statistics of its tokens, in one read.

The fold first takes the kept tokens out of the tile. The sums then cover only the rest, so the rest's log-sum-exp is
never computed as a difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton
from troll_trl.kernels.tiles import FLOOR, LogitTransform, cap, in_bits, to_slots

# A program reads this number of columns at a time. With 8 warps, each thread loads 16 elements, 32 bytes of bf16,
# before a reduction across the program
BLOCK_SIZE = 4096
NUM_WARPS = 8
KEPT_BLOCK = 1024  # kept slots per program
KEPT_WARPS = 4


class FoldState(NamedTuple):
    """Running statistics of `n` tokens, float32, updated in place. A logit is `factor·y`, see tiles.py."""

    kept: torch.Tensor  # (n, K), `y` of the kept tokens found so far
    max: torch.Tensor  # (n, 1), largest `y` of the rest so far, at least `FLOOR`
    sum_exp: torch.Tensor  # (n, 1), Σ exp(factor·u), with u = y − max
    sum_exp_u: torch.Tensor  # (n, 1), Σ u·exp(factor·u)

    @classmethod
    def empty(cls, token_ids: torch.Tensor) -> FoldState:
        """Return the state for kept tokens `(n, K)` before the first tile."""
        kept = torch.full(token_ids.shape, FLOOR, device=token_ids.device, dtype=torch.float32)
        running_max = torch.full((len(kept), 1), FLOOR, device=kept.device, dtype=torch.float32)
        return cls(kept, running_max, torch.zeros_like(running_max), torch.zeros_like(running_max))


def online_logsumexp(
    tile: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitTransform,
    token_ids: torch.Tensor,
    start: int,
    state: FoldState,
    scratch: torch.Tensor | None,
) -> None:
    """
    Fold one tile into the statistics `state` of its tokens. This overwrites the tile.

    `tile` `(n, v + 1)` holds the products of hidden states and head for the `v` tokens from `start` on, and a spare
    column: float32 for torch, any floating dtype for Triton. `bias` `(v,)` and `transform` turn products into logits.
    `token_ids` `(n, K)`, integer, are the kept tokens, distinct within a row, and −1 in an unused slot. `bias` and
    `token_ids` are contiguous. PyTorch needs a `scratch` of at least the size of the tile.
    """
    fold = _fold_triton if use_triton(tile.device) else _fold_torch
    fold(tile, bias, transform, token_ids, start, state, scratch)


def _fold_torch(tile, bias, transform, token_ids, start, state, scratch):
    if bias is not None:
        tile[:, :-1].add_(bias)
    transform.cap_(tile[:, :-1])
    tile[:, -1] = FLOOR
    slots = to_slots(token_ids, start, tile)
    torch.maximum(state.kept, tile.gather(1, slots), out=state.kept)
    tile.scatter_(1, slots, FLOOR)  # the rest stays
    new_max = torch.maximum(state.max, tile.amax(1, keepdim=True))
    shift = state.max - new_max
    rescale = (transform.factor * shift).exp()
    u = tile.sub_(new_max)
    exp_u = torch.mul(u, transform.factor, out=scratch[: u.shape[0], : u.shape[1]]).exp_()
    state.sum_exp_u.copy_(rescale * (state.sum_exp_u + shift * state.sum_exp) + u.mul_(exp_u).sum(1, keepdim=True))
    state.sum_exp.copy_(rescale * state.sum_exp + exp_u.sum(1, keepdim=True))
    state.max.copy_(new_max)


def _fold_triton(tile, bias, transform, token_ids, start, state, scratch):
    products = (tile, tile.stride(0), bias)
    columns = tile.shape[1] - 1
    shared = {**transform.kernel_arguments, "LOWEST": torch.finfo(tile.dtype).min}
    factor = shared.pop("factor")
    slots = token_ids.numel()
    kept = (token_ids, state.kept, slots, token_ids.shape[1], start, columns)
    constants = {"BLOCK": KEPT_BLOCK, "num_warps": KEPT_WARPS, **shared}
    launch(_take_kept_kernel, (math.ceil(slots / KEPT_BLOCK),), tile.device, *products, *kept, **constants)
    rest = (state.max, state.sum_exp, state.sum_exp_u, columns)
    constants = {"BLOCK": min(BLOCK_SIZE, next_power_of_2(columns)), "num_warps": NUM_WARPS, **shared}
    launch(_fold_kernel, (len(tile),), tile.device, *products, *rest, factor=factor, FLOOR=FLOOR, **constants)


# `kept_count`, the widest support of a batch, and `start`, a tile's first token, vary: Triton must not recompile for
# each value
@jit(do_not_specialize=["slots", "kept_count", "start"])
def _take_kept_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    ids_ptr,
    kept_ptr,
    slots,
    kept_count,
    start,
    columns,
    tanh_scale,
    HAS_SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store `y` of the kept tokens in this tile, and mark their columns with the lowest number of the tile's dtype. (A
    logit of this value has probability 0 in any case, unless the model is soft-capped. −∞ would hide an overflow, which
    must show in the sums.)

    This is a separate launch: within one program, other threads would see the marks only after a barrier, and
    `debug_barrier` does not order global memory on every backend."""
    # Indices into the slots of all tokens. They have 64 bits: rows times stride may exceed 2³¹
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + slot, mask=slot < slots, other=-1) - start
    inside = (slot < slots) & (local >= 0) & (local < columns)
    entry = tile_ptr + slot // kept_count * tile_stride + local
    kept = tl.load(entry, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        kept += tl.load(bias_ptr + local, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept_ptr + slot, cap(kept, tanh_scale, HAS_SOFTCAP), mask=inside)
    tl.store(entry, tl.full((BLOCK,), LOWEST, tl.float32).to(tile_ptr.dtype.element_ty), mask=inside)


@jit()
def _fold_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    max_ptr,
    sum_exp_ptr,
    sum_exp_u_ptr,
    columns,
    tanh_scale,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token. The row index has 64 bits: rows times stride may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    m = tl.load(max_ptr + row)
    s = tl.load(sum_exp_ptr + row)
    su = tl.load(sum_exp_u_ptr + row)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < columns
        y = tl.load(tile_ptr + offsets, mask=mask, other=LOWEST).to(tl.float32)
        in_rest = y != LOWEST
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = tl.where(in_rest, cap(y, tanh_scale, HAS_SOFTCAP), FLOOR)
        new_m = tl.maximum(m, tl.max(y, axis=0))
        shift = m - new_m
        u = y - new_m
        e = tl.exp2(u * in_bits(factor))
        rescale = tl.exp2(shift * in_bits(factor))
        su = rescale * (su + shift * s) + tl.sum(u * e, axis=0)
        s = rescale * s + tl.sum(e, axis=0)
        m = new_m
    tl.store(max_ptr + row, m)
    tl.store(sum_exp_ptr + row, s)
    tl.store(sum_exp_u_ptr + row, su)

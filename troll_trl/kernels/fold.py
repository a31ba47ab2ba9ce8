"""One operation of the training pass: folding a tile of logits into running statistics of its tokens, in one read.

The kept tokens leave the tile first. The sums then run over the rest alone, so its log-sum-exp never comes from a
difference.
"""

# Annotations like `tl.constexpr` are not evaluated then: `tl` exists only with Triton
from __future__ import annotations

from typing import NamedTuple

import torch

from troll_trl.kernels.dispatch import TRITON_AVAILABLE, jit, launch, use_triton
from troll_trl.kernels.tiles import FLOOR, LogitTransform, to_logits, to_slots

if TRITON_AVAILABLE:
    import triton
    import triton.language as tl

# Columns that a program reads at a time: with 8 warps 16 elements per thread, two 16-byte loads of bf16, so that the
# reductions across the program come once in 16 elements
BLOCK_SIZE = 4096
NUM_WARPS = 8
KEPT_BLOCK = 1024  # kept slots per program
KEPT_WARPS = 4


class FoldState(NamedTuple):
    """
    Running statistics of `n` tokens, updated in place.

    Attributes:
        kept (`torch.Tensor` of shape `(n, K)`, float32):
            Logits of the kept tokens met so far.
        max, sum_exp, sum_exp_u (`torch.Tensor` of shape `(n, 1)`, float32):
            Over the rest met so far: largest logit `m`, `Σ exp(u)` and `Σ u·exp(u)` with `u = z − m`.
    """

    kept: torch.Tensor
    max: torch.Tensor
    sum_exp: torch.Tensor
    sum_exp_u: torch.Tensor

    @classmethod
    def of(cls, token_ids: torch.Tensor) -> FoldState:
        """The state of tokens `(n, K)` before the first tile."""
        kept = torch.full(token_ids.shape, FLOOR, device=token_ids.device, dtype=torch.float32)
        running_max = torch.full((len(kept), 1), FLOOR, device=kept.device, dtype=torch.float32)
        return cls(kept, running_max, torch.zeros_like(running_max), torch.zeros_like(running_max))


def fold_tile(
    tile: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitTransform,
    token_ids: torch.Tensor,
    start: int,
    state: FoldState,
    scratch: torch.Tensor | None,
) -> None:
    """
    Fold one tile into the statistics of its tokens. The tile is destroyed.

    Args:
        tile (`torch.Tensor` of shape `(n, v + 1)`):
            Products of hidden states and head for the tokens `start…start + v`; the last column is spare. float32 for
            torch, any floating dtype for Triton.
        bias (`torch.Tensor` of shape `(v,)`, *optional*):
            Added to every row.
        transform ([`LogitTransform`]):
            Turns products into logits.
        token_ids (`torch.Tensor` of shape `(n, K)`, integer, contiguous):
            Kept tokens, none twice in a row; −1 in an unused slot.
        start (`int`):
            First token of the tile.
        state ([`FoldState`]):
            Updated.
        scratch (`torch.Tensor`, *optional*):
            At least of the size of the tile, for torch.
    """
    if use_triton(tile.device):
        _fold_triton(tile, bias, transform, token_ids, start, state, scratch)
    else:
        _fold_torch(tile, bias, transform, token_ids, start, state, scratch)


def _fold_torch(tile, bias, transform, token_ids, start, state, scratch):
    if bias is not None:
        tile[:, :-1].add_(bias)
    transform.apply_(tile[:, :-1])
    tile[:, -1] = FLOOR
    slots = to_slots(token_ids, start, tile)
    torch.maximum(state.kept, tile.gather(1, slots), out=state.kept)
    tile.scatter_(1, slots, FLOOR)  # what is left is the rest
    new_max = torch.maximum(state.max, tile.amax(1, keepdim=True))
    shift = state.max - new_max
    rescale = shift.exp()
    u = tile.sub_(new_max)
    exp_u = torch.exp(u, out=scratch[: u.shape[0], : u.shape[1]])
    state.sum_exp_u.copy_(rescale * (state.sum_exp_u + shift * state.sum_exp) + u.mul_(exp_u).sum(1, keepdim=True))
    state.sum_exp.copy_(rescale * state.sum_exp + exp_u.sum(1, keepdim=True))
    state.max.copy_(new_max)


def _fold_triton(tile, bias, transform, token_ids, start, state, scratch):
    columns, kept_count = tile.shape[1] - 1, token_ids.shape[1]
    shared = {**transform.kernel_arguments, "HAS_BIAS": bias is not None, "LOWEST": torch.finfo(tile.dtype).min}
    launch(
        _take_kept_kernel,
        (triton.cdiv(token_ids.numel(), KEPT_BLOCK),),
        tile.device,
        tile,
        tile.stride(0),
        bias,
        token_ids,
        state.kept,
        token_ids.numel(),
        kept_count,
        start,
        columns,
        **shared,
        BLOCK=KEPT_BLOCK,
        num_warps=KEPT_WARPS,
    )
    launch(
        _fold_kernel,
        (len(tile),),
        tile.device,
        tile,
        tile.stride(0),
        bias,
        state.max,
        state.sum_exp,
        state.sum_exp_u,
        columns,
        **shared,
        FLOOR=FLOOR,
        BLOCK=min(BLOCK_SIZE, triton.next_power_of_2(columns)),
        num_warps=NUM_WARPS,
    )


# `kept_count` is the widest support of a batch and `start` that of a tile: no reason to compile again
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
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kept tokens of this tile: note the logit, and mark the column with the lowest number of the tile's dtype. (A
    logit that low has no probability next to any other; −∞ would hide an overflow, which must show in the sums.)

    A launch of its own: within one program only a barrier would let other threads see the marks, and `debug_barrier` is
    none for global memory on every backend."""
    # Slots of all tokens in a row, in 64 bits: rows times stride may pass 2³¹
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + slot, mask=slot < slots, other=-1) - start
    inside = (slot < slots) & (local >= 0) & (local < columns)
    entry = tile_ptr + slot // kept_count * tile_stride + local
    kept = tl.load(entry, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        kept += tl.load(bias_ptr + local, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept_ptr + slot, to_logits(kept, inner, outer, HAS_SOFTCAP), mask=inside)
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
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOWEST: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token. In 64 bits: rows times stride may pass 2³¹
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
        if HAS_BIAS:
            y += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(in_rest, to_logits(y, inner, outer, HAS_SOFTCAP), FLOOR)
        new_m = tl.maximum(m, tl.max(z, axis=0))
        shift = m - new_m
        u = z - new_m
        e = tl.exp(u)
        su = tl.exp(shift) * (su + shift * s) + tl.sum(u * e, axis=0)
        s = tl.exp(shift) * s + tl.sum(e, axis=0)
        m = new_m
    tl.store(max_ptr + row, m)
    tl.store(sum_exp_ptr + row, s)
    tl.store(sum_exp_u_ptr + row, su)

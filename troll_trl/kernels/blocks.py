"""One operation of the scoring pass: the logits of some tokens reduced to a maximum and two sums per block of 64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from troll_trl.kernels.dispatch import jit, launch, tl, use_triton
from troll_trl.kernels.tiles import FLOOR, LogitTransform, cap, in_bits, to_logits

BLOCK = 64  # logits per block
COLUMNS_STEP = 16 * BLOCK  # the kernels pad a vocabulary to a multiple of this, to read 16 bytes at a time
BLOCKS_PER_PROGRAM = 64  # 4096 logits, as in fold.py
NUM_WARPS = 4


class BestBlocks(NamedTuple):
    """For `n` tokens, the `k` blocks with the largest maxima among the blocks reduced so far."""

    max: torch.Tensor  # (n, k) float32
    which: torch.Tensor  # (n, k) int64
    y: torch.Tensor  # (n, k, 64) float32


class Blocks(NamedTuple):
    """
    The `y` of `n` tokens (a logit is `factor·y`, see tiles.py) over a padded vocabulary of `P` columns, and the
    statistics of their blocks of 64 without the sampled token, which is always kept. [`blocks_of`] makes an instance.

    A Triton block has 64 neighbouring columns, which a program reads at once and later finds in two cache lines. In the
    fallback, the members of a block are equally spaced in a chunk: a reduction over a block then runs over the rows of
    a matrix, and vectorises.
    """

    # (n, P): Triton's products, or torch's `y` with `FLOOR` at the sampled token and in the padding
    tile: torch.Tensor
    max: torch.Tensor  # (n, P / 64) float32: largest `y` of every block, at least `FLOOR`
    sum_exp: torch.Tensor  # (n, P / 64) float32: Σ exp(factor·u), with u = y − largest y
    sum_exp_u: torch.Tensor  # (n, P / 64) float32: Σ u·exp(factor·u)
    sampled: torch.Tensor  # (n, 1) float32: logit of the sampled token
    sampled_ids: torch.Tensor  # (n, 1) int64
    vocabulary: int  # columns that are tokens, V
    chunk: int  # columns that are reduced at a time, a multiple of 64
    stride: int  # distance between the members of a block
    best: BestBlocks | None  # of earlier chunks; if set, the tile, (n, chunk), holds one chunk at a time

    def chunk_at(self, first: int) -> torch.Tensor:
        """The part of the tile for the chunk that begins at column `first` of the vocabulary."""
        return self.tile if self.best is not None else self.tile[:, first : first + self.chunk]


def blocks_of(
    tile: torch.Tensor,
    sampled_ids: torch.Tensor,
    sampled: torch.Tensor,
    vocabulary: int,
    chunk: int,
    keep: int | None = None,
) -> Blocks:
    """Make the blocks of an empty tile `(n, P)` and of sampled tokens `(n,)`. The logits of these tokens, `sampled`
    `(n, 1)`, start at `FLOOR`, and `reduce_chunk` fills them in. With `keep`, for torch, a tile `(n, chunk)` holds one
    chunk at a time, and the `keep` best blocks are stored with their logits."""
    shape = (len(tile), math.ceil(vocabulary / chunk) * chunk // BLOCK)
    block_max, sum_exp, sum_exp_u = (tile.new_empty(shape, dtype=torch.float32) for _ in range(3))
    stride = 1 if use_triton(tile.device) else chunk // BLOCK
    ids = sampled_ids.contiguous().unsqueeze(1)  # the kernels assume consecutive addresses
    best = None
    if keep is not None:
        kept = (len(tile), min(keep, shape[1]))
        which = torch.zeros(kept, dtype=torch.int64, device=tile.device)
        best = BestBlocks(tile.new_full(kept, -math.inf), which, tile.new_full((*kept, BLOCK), FLOOR))
    return Blocks(tile, block_max, sum_exp, sum_exp_u, sampled, ids, vocabulary, chunk, stride, best)


def reduce_chunk(
    blocks: Blocks, bias: torch.Tensor | None, transform: LogitTransform, first: int, columns: int
) -> None:
    """Reduce the products of one chunk in the tile to the statistics of its blocks. `bias` `(columns,)`, contiguous,
    and `transform` turn products into logits. The chunk begins at column `first`, and its first `columns` columns are
    in the vocabulary."""
    reduce = _reduce_triton if use_triton(blocks.tile.device) else _reduce_torch
    reduce(blocks, bias, transform, first, columns)


def _reduce_torch(blocks, bias, transform, first, columns):
    chunk = blocks.chunk_at(first)
    y = chunk[:, :columns]
    if bias is not None:
        y.add_(bias)
    transform.cap_(y)
    chunk[:, columns:] = FLOOR  # padding of the last chunk
    local = blocks.sampled_ids - first
    inside = (local >= 0) & (local < columns)
    local = local.clamp(0, columns - 1)
    at_sampled = chunk.gather(1, local)
    blocks.sampled.copy_(torch.where(inside, transform.to_logits(at_sampled), blocks.sampled))
    chunk.scatter_(1, local, torch.where(inside, FLOOR, at_sampled))

    which = slice(first // BLOCK, (first + blocks.chunk) // BLOCK)
    u = chunk.view(len(chunk), BLOCK, blocks.stride)
    block_max = u.amax(1)
    if blocks.best is None:
        u = u - block_max.unsqueeze(1)
    else:
        _keep_best(blocks.best, block_max, u, first // BLOCK)
        u.sub_(block_max.unsqueeze(1))
    exp_u = (transform.factor * u).exp_()
    blocks.max[:, which] = block_max.clamp(min=FLOOR)
    blocks.sum_exp[:, which] = exp_u.sum(1)
    blocks.sum_exp_u[:, which] = u.mul_(exp_u).sum(1)


def _keep_best(best: BestBlocks, block_max: torch.Tensor, y: torch.Tensor, first: int) -> None:
    """Keep the best among `best` and the blocks of a chunk, with maxima `(n, m)` and members `y` `(n, 64, m)`."""
    k = best.max.shape[1]
    every = torch.cat([best.max, block_max], 1)
    chosen = torch.zeros_like(every, dtype=torch.bool).scatter_(1, every.topk(k, 1, sorted=False).indices, True)
    # Copy only the new blocks, which become fewer with each chunk. Both lists are in row order, and each row loses as
    # many blocks as it gains
    rows, slots = (~chosen[:, :k]).nonzero(as_tuple=True)
    _, new = chosen[:, k:].nonzero(as_tuple=True)
    best.max[rows, slots] = block_max[rows, new]
    best.which[rows, slots] = first + new
    best.y[rows, slots] = y[rows, :, new]


def _reduce_triton(blocks, bias, transform, first, columns):
    count = blocks.chunk // BLOCK
    grid = (len(blocks.tile), math.ceil(count / BLOCKS_PER_PROGRAM))
    inputs = (blocks.tile, blocks.tile.stride(0), bias, blocks.sampled_ids)
    outputs = (blocks.max, blocks.sum_exp, blocks.sum_exp_u, blocks.sampled)
    constants = {"FLOOR": FLOOR, "BLOCK": BLOCK, "BLOCKS": BLOCKS_PER_PROGRAM, "num_warps": NUM_WARPS}
    constants |= transform.kernel_arguments
    sizes = (blocks.max.shape[1], first, columns, count)
    launch(_reduce_kernel, grid, blocks.tile.device, *inputs, *outputs, *sizes, **constants)


# Triton specializes on `first`, a multiple of 64: otherwise the kernel would read two bytes at a time
@jit()
def _reduce_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    sampled_ids_ptr,
    max_ptr,
    sum_exp_ptr,
    sum_exp_u_ptr,
    sampled_ptr,
    blocks_per_row,
    first,
    columns,
    count,
    tanh_scale,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # One program per token and 64 blocks of a chunk. The row index has 64 bits: rows times stride may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride + first
    first_block = tl.program_id(1) * BLOCKS
    block = first_block + tl.arange(0, BLOCKS)
    local = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (BLOCKS, BLOCK) columns of the chunk
    # Read whole blocks, 16 bytes at a time, including the padding after the vocabulary
    y = tl.load(tile_ptr + local, mask=block[:, None] < count, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + local, mask=local < columns, other=0.0).to(tl.float32)
    y = cap(y, tanh_scale, HAS_SOFTCAP)
    sampled = tl.load(sampled_ids_ptr + row) - first
    end = (first_block + BLOCKS) * BLOCK
    here = (sampled >= first_block * BLOCK) & (sampled < end) & (sampled < columns)
    if here | (end > columns):  # at most two programs of a row; the others need no comparison
        # `FLOOR`, not −∞: an infinite logit must show as NaN in the sums
        y = tl.where((local < columns) & (local != sampled), y, FLOOR)
    block_max = tl.max(y, axis=1)
    u = y - block_max[:, None]
    e = tl.exp2(u * in_bits(factor))
    out = row * blocks_per_row + first // BLOCK + block
    tl.store(max_ptr + out, tl.where(block_max < FLOOR, FLOOR, block_max), mask=block < count)  # NaN stays NaN
    tl.store(sum_exp_ptr + out, tl.sum(e, axis=1), mask=block < count)
    tl.store(sum_exp_u_ptr + out, tl.sum(u * e, axis=1), mask=block < count)

    # The program that has the sampled token reads it again: a masked store from the tile takes a register for each
    # address
    y_sampled = tl.load(tile_ptr + sampled, mask=here, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y_sampled += tl.load(bias_ptr + sampled, mask=here, other=0.0).to(tl.float32)
    tl.store(sampled_ptr + row, to_logits(cap(y_sampled, tanh_scale, HAS_SOFTCAP), factor, FLOOR), mask=here)

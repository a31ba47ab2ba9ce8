"""One operation of the scoring pass: the most likely tokens of every position, from the maxima of its blocks.

The k largest logits lie inside the k blocks with the largest maxima: each other block has k elements above its own, or
equal to it. So the k best blocks give k·64 candidates, and these the k best tokens, exactly up to ties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from troll_trl.kernels.blocks import BLOCK, Blocks
from troll_trl.kernels.dispatch import jit, launch, tl, triton, use_triton
from troll_trl.kernels.tiles import FLOOR, LogitTransform, to_logits

# A program holds the k·64 candidates of a token in registers, and at k = 256 they would spill (by ahead-of-time
# compilation for sm_90). Above this k torch chooses, from the same blocks.
MOST_IN_REGISTERS = 128


class Candidates(NamedTuple):
    """The `k` most likely tokens of `n` positions apart from the sampled one, and what is left."""

    logits: torch.Tensor  # (n, k) float32, in any order; at most `FLOOR / 2` if the vocabulary has no more tokens
    token_ids: torch.Tensor  # (n, k) int32
    left_log_sum_exp: torch.Tensor  # (n, 1) float32, of all other tokens; at most `FLOOR / 2` if there are none
    entropy: torch.Tensor  # (n,) float32, of the full distribution


def empty_candidates(n: int, k: int, device: torch.device) -> Candidates:
    """Where `choose_candidates` writes, for all positions at once: each tile fills its rows."""
    logits = torch.full((n, k), FLOOR, device=device)
    token_ids = torch.full((n, k), -1, device=device, dtype=torch.int32)
    return Candidates(logits, token_ids, logits.new_empty((n, 1)), logits.new_empty(n))


def choose_candidates(
    blocks: Blocks, bias: torch.Tensor | None, transform: LogitTransform, candidates: Candidates
) -> None:
    """
    Write the `k` ≤ V − 1 most likely tokens apart from the sampled one, of `blocks` whose chunks are all reduced, into
    `candidates`, rows of [`empty_candidates`]. `bias` `(V,)` and `transform` turn products into logits.
    """
    in_registers = candidates.logits.shape[1] <= MOST_IN_REGISTERS
    choose = _choose_triton if use_triton(blocks.tile.device) and in_registers else _choose_torch
    choose(blocks, bias, transform, candidates)


def _choose_torch(blocks, bias, transform, candidates):
    k = candidates.logits.shape[1]
    log_sum_exp = blocks.max + blocks.sum_exp.log()  # of every block, (n, blocks)
    if blocks.best is not None:
        best_blocks, logits = blocks.best.which, blocks.best.logits.flatten(1)  # (n, candidates)
    else:
        best_blocks = blocks.max.topk(min(k, blocks.max.shape[1]), 1).indices
        members = torch.arange(BLOCK, device=best_blocks.device)
        columns = _columns_of(best_blocks.unsqueeze(2), members, blocks).flatten(1)
        logits = blocks.tile.gather(1, columns)
    if use_triton(blocks.tile.device):  # these are products still
        vocabulary = blocks.vocabulary
        logits = logits.float()
        if bias is not None:
            logits += bias[columns.clamp(max=vocabulary - 1)]
        dead = (columns >= vocabulary) | (columns == blocks.sampled_ids)
        logits = transform.apply_(logits).masked_fill(dead, FLOOR)
    best = logits.topk(k, 1)
    candidates.left_log_sum_exp[:] = torch.logaddexp(
        log_sum_exp.scatter(1, best_blocks, FLOOR).logsumexp(1, keepdim=True),
        logits.scatter(1, best.indices, FLOOR).logsumexp(1, keepdim=True),
    )
    # H = Σ_v p_v (log Z − z_v), a block at a time
    log_z = torch.cat([log_sum_exp, blocks.sampled], 1).logsumexp(1, keepdim=True)
    block_prob = (log_sum_exp - log_z).exp()
    entropy = (block_prob * (log_z - blocks.max - blocks.sum_exp_u / blocks.sum_exp)).sum(1, keepdim=True)
    entropy += (blocks.sampled - log_z).exp() * (log_z - blocks.sampled)
    candidates.entropy[:] = entropy.squeeze(1)
    candidates.logits[:] = best.values
    columns = _columns_of(best_blocks.gather(1, best.indices // BLOCK), best.indices % BLOCK, blocks)
    candidates.token_ids[:] = columns


def _columns_of(which: torch.Tensor, member: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Columns of members 0…63 of some blocks."""
    first = which // blocks.stride * (BLOCK * blocks.stride) + which % blocks.stride
    return first + member * blocks.stride


def _choose_triton(blocks, bias, transform, candidates):
    logits, token_ids, left, entropy = candidates
    rows, device, k = len(logits), logits.device, logits.shape[1]
    count = triton.cdiv(blocks.vocabulary, BLOCK)  # those after it are padding
    k_blocks = min(k, count)
    best_blocks = torch.empty((rows, k), device=device, dtype=torch.int32)
    statistics = (blocks.max, blocks.sum_exp, blocks.sum_exp_u, blocks.sampled)
    sizes = (blocks.max.shape[1], count, k, k_blocks)
    padded = triton.next_power_of_2(blocks.max.shape[1])
    constants = {"FLOOR": FLOOR, "BLOCKS": padded, "num_warps": warps_for(padded)}
    launch(_best_blocks_kernel, (rows,), device, *statistics, best_blocks, left, entropy, *sizes, **constants)
    tensors = (blocks.tile, blocks.tile.stride(0), bias, blocks.sampled_ids, best_blocks, logits, token_ids, left)
    slots = triton.next_power_of_2(max(k, 1))
    constants = {"FLOOR": FLOOR, "BLOCK": BLOCK, "SLOTS": slots, "num_warps": warps_for(slots * BLOCK)}
    constants |= transform.kernel_arguments
    launch(_best_tokens_kernel, (rows,), device, *tensors, blocks.vocabulary, k, k_blocks, **constants)


def warps_for(elements: int) -> int:
    """Warps of a program that holds this many elements: 32 per thread, and at most 16 warps, whose threads still have
    128 registers. A program mostly waits for its own sums: for 4,096 tokens, V = 151,936 and K = 64, both kernels
    together took 0.52 ms on an H100 with 4 warps, 0.64 with 8, 0.84 with 16."""
    return min(max(elements // 1024, 1), 16)


@jit()
def _rank_key(z):
    """Integers in the order of the float32 numbers `z`: a negative float's bits count down."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _number_of(key):
    """Inverse of [`_rank_key`]: a program that keeps the keys alone needs fewer registers."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _choose_largest(key, low, k):
    """The k largest of up to 2¹⁴ integers, as a mask, and the number of each among them, 0…k − 1. At least k of them
    must be `low` or larger."""
    # By trisection for a number with k of them at or above it, whose cost does not depend on k. If ties leave no such
    # number, it ends at the k-th largest, and takes the first of those equal to it.
    high = tl.max(key, axis=0)
    while low < high:
        distance = high.to(tl.int64) - low  # of 32 bits
        third = (low + (distance + 2) // 3).to(tl.int32)
        two_thirds = (low + (2 * distance + 2) // 3).to(tl.int32)
        # Two counts in one sum: of those from `third` on in the lower 16 bits, from `two_thirds` on in the upper
        counts = tl.sum(tl.where(key >= two_thirds, 0x10001, tl.where(key >= third, 1, 0)), axis=0)
        from_third, from_two_thirds = counts & 0xFFFF, counts >> 16
        top = tl.where(from_two_thirds == k, two_thirds, high)
        middle = tl.where(from_third == k, third, two_thirds - 1)
        high = tl.where(from_two_thirds >= k, top, tl.where(from_third >= k, middle, third - 1))
        low = tl.where(from_two_thirds >= k, two_thirds, tl.where(from_third >= k, third, low))
    above, equal = key > low, key == low
    above_count = tl.sum(above.to(tl.int32), axis=0)
    # Two running numbers in one scan: of those above in the lower 16 bits, of the equal ones in the upper
    numbers = tl.cumsum(tl.where(above, 1, tl.where(equal, 1 << 16, 0)), axis=0)
    number = tl.where(above, numbers & 0xFFFF, above_count + (numbers >> 16)) - 1
    return above | (equal & (number < k)), number


@jit(do_not_specialize=["count", "k", "k_blocks"])
def _best_blocks_kernel(
    max_ptr,
    sum_exp_ptr,
    sum_exp_u_ptr,
    sampled_ptr,
    best_blocks_ptr,
    left_ptr,
    entropy_ptr,
    blocks_per_row,
    count,
    k,
    k_blocks,
    FLOOR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # One program per token. In 64 bits: rows times columns may pass 2³¹
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = row * blocks_per_row + block
    # The padding is read too: an accelerator's rows are a multiple of 16 long, and are read 16 bytes at a time
    in_row = block < blocks_per_row
    in_vocabulary = block < count
    key = _rank_key(tl.load(max_ptr + at, mask=in_row, other=FLOOR))
    key = tl.where(in_vocabulary, key, -(2**31))
    low = tl.min(tl.where(in_vocabulary, key, 2**31 - 1), axis=0)
    chosen, number = _choose_largest(key, low, k_blocks)
    tl.store(best_blocks_ptr + row * k + number, block, mask=chosen)

    # Entropy: with m the largest of all logits, Z = Σ exp(z − m) and T = Σ (z − m)·exp(z − m), H = log Z − T/Z
    block_max = tl.where(in_vocabulary, _number_of(key), FLOOR)
    s = tl.load(sum_exp_ptr + at, mask=in_row, other=0.0)
    su = tl.load(sum_exp_u_ptr + at, mask=in_row, other=0.0)
    sampled = tl.load(sampled_ptr + row)
    m = tl.maximum(tl.max(block_max, axis=0), sampled)
    shift = block_max - m
    weight = tl.exp(shift)
    z_sum = tl.sum(weight * s, axis=0) + tl.exp(sampled - m)
    t_sum = tl.sum(weight * su + weight * shift * s, axis=0) + (sampled - m) * tl.exp(sampled - m)
    tl.store(entropy_ptr + row, tl.log(z_sum) - t_sum / z_sum)

    # The others, against their own maximum: they may be tiny next to the chosen
    block_max = tl.where(chosen, FLOOR, block_max)
    m = tl.max(block_max, axis=0)
    left = tl.sum(tl.where(block_max == FLOOR, 0.0, s * tl.exp(block_max - m)), axis=0)
    tl.store(left_ptr + row, tl.where(left == 0, FLOOR, m + tl.log(left)))  # a NaN stays one


@jit(do_not_specialize=["k", "k_blocks"])
def _best_tokens_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    sampled_ids_ptr,
    best_blocks_ptr,
    logits_ptr,
    token_ids_ptr,
    left_ptr,
    vocabulary,
    k,
    k_blocks,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per token. In 64 bits: rows times stride may pass 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)[:, None]
    in_slot = slot < k_blocks
    # (SLOTS, BLOCK), with whole blocks read, the padding after the vocabulary too: 16 bytes at a time
    column = tl.load(best_blocks_ptr + row * k + slot, mask=in_slot, other=0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    used = in_slot & (column < vocabulary) & (column != tl.load(sampled_ids_ptr + row))
    y = tl.load(tile_ptr + row * tile_stride + column, mask=in_slot, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=used, other=0.0).to(tl.float32)
    key = _rank_key(tl.where(used, to_logits(y, inner, outer, HAS_SOFTCAP), FLOOR))
    # k blocks have k maxima: the smallest is a first bound. Fewer than k are all blocks, and the bound is their least
    block_max = tl.where(tl.arange(0, SLOTS) < k_blocks, tl.max(key, axis=1), 2**31 - 1)
    key = tl.ravel(key)
    low = tl.where(k_blocks == k, tl.min(block_max, axis=0), tl.min(key, axis=0))

    chosen, number = _choose_largest(key, low, k)
    z = _number_of(key)
    tl.store(logits_ptr + row * k + number, z, mask=chosen)
    entry = tl.arange(0, SLOTS * BLOCK)
    best_block = tl.load(best_blocks_ptr + row * k + entry // BLOCK, mask=chosen & (entry // BLOCK < k_blocks), other=0)
    # A slot for which the vocabulary has no token keeps the id −1
    tl.store(token_ids_ptr + row * k + number, best_block * BLOCK + entry % BLOCK, mask=chosen & (z > FLOOR))

    left_blocks = tl.load(left_ptr + row)
    z = tl.where(chosen, FLOOR, z)
    m = tl.maximum(tl.max(z, axis=0), left_blocks)
    left = tl.sum(tl.where(z <= FLOOR, 0.0, tl.exp(z - m)), axis=0) + tl.exp(left_blocks - m)
    tl.store(left_ptr + row, m + tl.log(left))

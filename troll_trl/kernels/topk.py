"""One operation of the scoring pass: the most likely tokens of every position, from the maxima of its blocks.

The k largest logits lie inside the k blocks with the largest maxima: no element of another block exceeds any of these
maxima. So the k best blocks give k·64 candidates, and the candidates give the k best tokens, exactly up to ties.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from troll_trl.kernels.blocks import BLOCK, Blocks
from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton
from troll_trl.kernels.tiles import FLOOR, LogitTransform, cap, in_bits, to_logits

# A program holds the k·64 candidates of a token in registers, and at k = 256 they would spill (measured by
# ahead-of-time compilation for sm_90). Above this k, PyTorch chooses from the same blocks.
MOST_IN_REGISTERS = 128
# After a program has found the bound of the k largest, it reads its numbers again, this many per warp at a time: 8 per
# thread
PART = 256


class TopTokens(NamedTuple):
    """The `k` most likely tokens of `n` positions, without the sampled one, and all other tokens together."""

    logits: torch.Tensor  # (n, k) float32, in any order; at most `FLOOR / 2` if the vocabulary has no more tokens
    token_ids: torch.Tensor  # (n, k) int32
    rest: torch.Tensor  # (n, 1) float32, log-sum-exp of all other tokens; at most `FLOOR / 2` if there are none
    entropy: torch.Tensor  # (n,) float32, of the full distribution


def empty_top_tokens(n: int, k: int, device: torch.device) -> TopTokens:
    """Allocate the tensors that `choose_top_tokens` fills, for all positions. Each tile fills its own rows."""
    logits = torch.full((n, k), FLOOR, device=device)
    token_ids = torch.full((n, k), -1, device=device, dtype=torch.int32)
    return TopTokens(logits, token_ids, logits.new_empty((n, 1)), logits.new_empty(n))


def choose_top_tokens(blocks: Blocks, bias: torch.Tensor | None, transform: LogitTransform, top: TopTokens) -> None:
    """
    Write the `k` ≤ V − 1 most likely tokens, without the sampled one, into `top`, rows of [`empty_top_tokens`]. All
    chunks of `blocks` must be reduced. `bias` `(V,)` and `transform` turn products into logits.
    """
    in_registers = top.logits.shape[1] <= MOST_IN_REGISTERS
    choose = _choose_triton if use_triton(blocks.tile.device) and in_registers else _choose_torch
    choose(blocks, bias, transform, top)


def _choose_torch(blocks, bias, transform, top):
    k = top.logits.shape[1]
    block_max = transform.to_logits(blocks.max)
    log_sum_exp = block_max + blocks.sum_exp.log()  # (n, blocks)
    if blocks.best is not None:
        best_blocks = blocks.best.which
        y = blocks.best.y.flatten(1)  # (n, candidates)
    else:
        best_blocks = blocks.max.topk(min(k, blocks.max.shape[1]), 1).indices
        members = torch.arange(BLOCK, device=best_blocks.device)
        columns = _columns_of(best_blocks.unsqueeze(2), members, blocks).flatten(1)
        y = blocks.tile.gather(1, columns)
    if use_triton(blocks.tile.device):  # the tile still holds products
        vocabulary = blocks.vocabulary
        y = y.float()
        if bias is not None:
            y += bias[columns.clamp(max=vocabulary - 1)]
        unused = (columns >= vocabulary) | (columns == blocks.sampled_ids)
        y = transform.cap_(y).masked_fill_(unused, FLOOR)
    logits = transform.to_logits(y)
    best = logits.topk(k, 1)
    top.rest[:] = torch.logaddexp(
        log_sum_exp.scatter(1, best_blocks, FLOOR).logsumexp(1, keepdim=True),
        logits.scatter(1, best.indices, FLOOR).logsumexp(1, keepdim=True),
    )
    # H = Σ_v p_v (log Z − z_v), a block at a time
    log_z = torch.cat([log_sum_exp, blocks.sampled], 1).logsumexp(1, keepdim=True)
    block_prob = (log_sum_exp - log_z).exp()
    mean_u = transform.factor * blocks.sum_exp_u / blocks.sum_exp
    entropy = (block_prob * (log_z - block_max - mean_u)).sum(1, keepdim=True)
    entropy += (blocks.sampled - log_z).exp() * (log_z - blocks.sampled)
    top.entropy[:] = entropy.squeeze(1)
    top.logits[:] = best.values
    columns = _columns_of(best_blocks.gather(1, best.indices // BLOCK), best.indices % BLOCK, blocks)
    top.token_ids[:] = columns


def _columns_of(which: torch.Tensor, member: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the columns of members 0…63 of the blocks `which`."""
    first = which // blocks.stride * (BLOCK * blocks.stride) + which % blocks.stride
    return first + member * blocks.stride


def _choose_triton(blocks, bias, transform, top):
    logits, token_ids, rest, entropy = top
    rows = len(logits)
    device = logits.device
    k = logits.shape[1]
    count = math.ceil(blocks.vocabulary / BLOCK)  # later blocks are padding
    k_blocks = min(k, count)
    best_blocks = torch.empty((rows, k), device=device, dtype=torch.int32)
    statistics = (blocks.max, blocks.sum_exp, blocks.sum_exp_u, blocks.sampled)
    sizes = (blocks.max.shape[1], count, k, k_blocks)
    arguments = transform.kernel_arguments
    shared: dict[str, Any] = {"FLOOR": FLOOR, "UNUSED_BITS": unused_bits(blocks.tile.dtype, bias, transform)}
    padded, slots = next_power_of_2(blocks.max.shape[1]), next_power_of_2(max(k, 1))
    warps = warps_for(padded)
    constants = {"BLOCKS": padded, "GROUPS": min(slots, padded), "PART": min(PART * warps, padded)}
    constants |= {"factor": arguments["factor"], "num_warps": warps, **shared}
    launch(_best_blocks_kernel, (rows,), device, *statistics, best_blocks, rest, entropy, *sizes, **constants)
    tensors = (blocks.tile, blocks.tile.stride(0), bias, blocks.sampled_ids, best_blocks, logits, token_ids, rest)
    warps = warps_for(slots * BLOCK)
    constants = {"BLOCK": BLOCK, "SLOTS": slots, "PART": min(PART * warps // BLOCK, slots)}
    constants |= {"num_warps": warps, **shared, **arguments}
    launch(_best_tokens_kernel, (rows,), device, *tensors, blocks.vocabulary, k, k_blocks, **constants)


def warps_for(elements: int) -> int:
    """Number of warps for a program that holds this many elements: 32 elements per thread, and at most 16 warps, which
    leave each thread 128 registers. More warps are slower, because a program mostly waits for its own sums: for 4,096
    tokens, V = 151,936 and K = 64, both kernels together took 0.52 ms on an H100 with 4 warps, 0.64 ms with 8 and 0.84
    ms with 16."""
    return min(max(elements // 1024, 1), 16)


def unused_bits(dtype: torch.dtype, bias: torch.Tensor | None, transform: LogitTransform) -> int:
    """Number of last bits that are 0 in every float32 `y`. 16-bit products have such bits, unless a bias is added or
    tanh is applied. Without these bits, fewer keys lie between two `y`, and the search ends earlier."""
    if bias is not None or transform.softcap is not None:
        return 0
    return round(math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps))


@jit()
def rank_key(y, UNUSED_BITS: tl.constexpr):
    """Map float32 numbers `y`, whose last bits are unused, to integers in the same order."""
    bits = y.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -(2**31))  # a negative float's bits count down
    return key.to(tl.uint32, bitcast=True) >> UNUSED_BITS


@jit()
def number_of(key, UNUSED_BITS: tl.constexpr):
    """Inverse of [`rank_key`]. A program that keeps only the keys needs fewer registers."""
    bits = (key << UNUSED_BITS).to(tl.int32, bitcast=True)
    # After the shift, the last bits of a negative float's key are 0 instead of 1
    negative = (bits ^ -1) & (-1 << UNUSED_BITS)
    return tl.where(bits < 0, bits ^ -(2**31), negative).to(tl.float32, bitcast=True)


@jit()
def _bound_of_largest(key, low, k):
    """Find the bound of the k largest among up to 2¹⁴ unsigned 32-bit integers. The k largest are all integers above
    the bound, and the first of the integers equal to it. At least k integers must be `low` or larger. Returns the
    bound, the number of integers above it, and the largest integer that is not chosen."""
    # Trisection, whose cost does not depend on k, ends at a number that exactly k keys reach. If ties leave no such
    # number, it ends at the k-th largest key.
    high = tl.max(key, axis=0)
    while low < high:
        distance = high - low
        third = low + ((distance - 1) // 3 + 1)
        two_thirds = high - distance // 3  # both are above `low`
        # One sum counts the keys of at least `third` in its lower 16 bits, and the keys of at least `two_thirds` in its
        # upper 16
        counts = tl.sum(tl.where(key >= two_thirds, 0x10001, tl.where(key >= third, 1, 0)), axis=0)
        from_third, from_two_thirds = counts & 0xFFFF, counts >> 16
        top = tl.where(from_two_thirds == k, two_thirds, high)
        middle = tl.where(from_third == k, third, two_thirds - 1)
        high = tl.where(from_two_thirds >= k, top, tl.where(from_third >= k, middle, third - 1))
        low = tl.where(from_two_thirds >= k, two_thirds, tl.where(from_third >= k, third, low))
    counts = tl.sum(tl.where(key > low, 0x10001, tl.where(key == low, 1, 0)), axis=0)
    below = tl.max(tl.where(key < low, key, 0), axis=0)
    return low, counts >> 16, tl.where((counts & 0xFFFF) > k, low, below)


@jit()
def _numbers_of_chosen(key, bound, above_count, seen, k):
    """Return which integers of a part are among the k largest of all parts, the number 0…k − 1 of each of these, and
    the updated `seen`. `seen` counts the integers of earlier parts: in its lower 16 bits the integers above the bound,
    in its upper 16 bits the integers equal to the bound."""
    above, equal = key > bound, key == bound
    numbers = seen + tl.cumsum(tl.where(above, 1, tl.where(equal, 1 << 16, 0)), axis=0)
    number = tl.where(above, numbers & 0xFFFF, above_count + (numbers >> 16)) - 1
    return above | (equal & (number < k)), number, tl.max(numbers, axis=0)


@jit(do_not_specialize=["count", "k", "k_blocks"])
def _best_blocks_kernel(
    max_ptr,
    sum_exp_ptr,
    sum_exp_u_ptr,
    sampled_ptr,
    best_blocks_ptr,
    rest_ptr,
    entropy_ptr,
    blocks_per_row,
    count,
    k,
    k_blocks,
    factor,
    FLOOR: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
):
    # One program per token. The row index has 64 bits: rows times columns may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    max_ptr += row * blocks_per_row
    sum_exp_ptr += row * blocks_per_row
    sum_exp_u_ptr += row * blocks_per_row
    factor = tl.cast(factor, tl.float32)
    every = tl.arange(0, BLOCKS)
    # Read the padding as well: on an accelerator, the length of a row is a multiple of 16, so loads take 16 bytes at a
    # time
    keys = rank_key(tl.load(max_ptr + every, mask=every < blocks_per_row, other=FLOOR), UNUSED_BITS)
    keys = tl.where(every < count, keys, 0)

    # The smallest of the groups' largest keys is a first bound, because there are at least k groups
    low = tl.min(tl.max(tl.reshape(keys, (BLOCKS // GROUPS, GROUPS)), axis=0), axis=0)
    bound, above_count, rest_key = _bound_of_largest(keys, low, k_blocks)

    # Entropy: with m the largest of all logits, Z = Σ exp(z − m) and T = Σ (z − m)·exp(z − m), H = log Z − T/Z. The
    # rest is summed relative to its own maximum, because it may be tiny compared with the chosen blocks. The loop takes
    # the blocks in parts: all at once would take more registers, so fewer programs would fit
    sampled = tl.load(sampled_ptr + row)
    m = tl.maximum(number_of(tl.max(keys, axis=0), UNUSED_BITS) * factor, sampled)
    m_rest = number_of(rest_key, UNUSED_BITS)
    seen = 0
    z_sum, t_sum = tl.zeros((PART,), tl.float32), tl.zeros((PART,), tl.float32)
    rest = tl.zeros((PART,), tl.float32)
    for first in range(0, count, PART):
        block = first + tl.arange(0, PART)
        y = tl.load(max_ptr + block, mask=block < blocks_per_row, other=FLOOR)
        s = tl.load(sum_exp_ptr + block, mask=block < blocks_per_row, other=0.0)
        su = tl.load(sum_exp_u_ptr + block, mask=block < blocks_per_row, other=0.0)
        key = tl.where(block < count, rank_key(y, UNUSED_BITS), 0)
        chosen, number, seen = _numbers_of_chosen(key, bound, above_count, seen, k_blocks)
        tl.store(best_blocks_ptr + row * k + number, block, mask=chosen)
        in_rest = (block < count) & (y != FLOOR) & (chosen == 0)
        rest += tl.where(in_rest, s * tl.exp2((y - m_rest) * in_bits(factor)), 0.0)
        shift = y * factor - m
        weight = tl.where(block < count, tl.exp2(shift * in_bits(1.0)), 0.0)
        z_sum += weight * s
        t_sum += weight * su * factor + weight * shift * s
    z_sum = tl.sum(z_sum, axis=0) + tl.exp(sampled - m)
    t_sum = tl.sum(t_sum, axis=0) + (sampled - m) * tl.exp(sampled - m)
    tl.store(entropy_ptr + row, tl.log(z_sum) - t_sum / z_sum)
    rest = tl.sum(rest, axis=0)
    tl.store(rest_ptr + row, tl.where(rest == 0, FLOOR, m_rest * factor + tl.log(rest)))  # NaN stays NaN


@jit(do_not_specialize=["k", "k_blocks"])
def _best_tokens_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    sampled_ids_ptr,
    best_blocks_ptr,
    logits_ptr,
    token_ids_ptr,
    rest_ptr,
    vocabulary,
    k,
    k_blocks,
    tanh_scale,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    FLOOR: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
):
    # One program per token. The row index has 64 bits: rows times stride may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    best_blocks_ptr += row * k
    sampled = tl.load(sampled_ids_ptr + row)
    every = tl.arange(0, SLOTS)
    _, keys = _keys_of_blocks(
        tile_ptr,
        bias_ptr,
        best_blocks_ptr,
        every,
        vocabulary,
        sampled,
        k_blocks,
        tanh_scale,
        HAS_SOFTCAP,
        FLOOR,
        UNUSED_BITS,
        BLOCK,
    )
    # k blocks have k maxima, and the smallest is a first bound. With fewer than k blocks, the first bound is the
    # smallest key
    block_max = tl.where(every < k_blocks, tl.max(keys, axis=1), 0xFFFFFFFF >> UNUSED_BITS)
    keys = tl.ravel(keys)
    low = tl.where(k_blocks == k, tl.min(block_max, axis=0), tl.min(keys, axis=0))
    bound, above_count, rest_key = _bound_of_largest(keys, low, k)

    rest_of_blocks = tl.load(rest_ptr + row)
    m = tl.maximum(to_logits(number_of(rest_key, UNUSED_BITS), factor, FLOOR), rest_of_blocks)
    seen = 0
    rest = tl.zeros((PART * BLOCK,), tl.float32)
    for first in range(0, SLOTS, PART):
        part = first + tl.arange(0, PART)
        column, key = _keys_of_blocks(
            tile_ptr,
            bias_ptr,
            best_blocks_ptr,
            part,
            vocabulary,
            sampled,
            k_blocks,
            tanh_scale,
            HAS_SOFTCAP,
            FLOOR,
            UNUSED_BITS,
            BLOCK,
        )
        column, key = tl.ravel(column), tl.ravel(key)
        chosen, number, seen = _numbers_of_chosen(key, bound, above_count, seen, k)
        y = number_of(key, UNUSED_BITS)
        z = to_logits(y, factor, FLOOR)
        tl.store(logits_ptr + row * k + number, z, mask=chosen)
        # A slot for which the vocabulary has no token keeps the id −1
        tl.store(token_ids_ptr + row * k + number, column, mask=chosen & (y > FLOOR))
        rest += tl.where(chosen | (y <= FLOOR), 0.0, tl.exp2((z - m) * in_bits(1.0)))
    rest = tl.sum(rest, axis=0) + tl.exp(rest_of_blocks - m)
    tl.store(rest_ptr + row, m + tl.log(rest))


@jit()
def _keys_of_blocks(
    tile_ptr,
    bias_ptr,
    best_blocks_ptr,
    slot,
    vocabulary,
    sampled,
    k_blocks,
    tanh_scale,
    HAS_SOFTCAP: tl.constexpr,
    FLOOR: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return columns and keys `(slots, 64)` of the members of the best blocks in `slot`. A place without a token has
    the key of `FLOOR`."""
    in_slot = (slot < k_blocks)[:, None]
    # Read whole blocks, 16 bytes at a time, including the padding after the vocabulary
    first = tl.load(best_blocks_ptr + slot, mask=slot < k_blocks, other=0) * BLOCK
    column = first[:, None] + tl.arange(0, BLOCK)[None, :]
    used = in_slot & (column < vocabulary) & (column != sampled)
    y = tl.load(tile_ptr + column, mask=in_slot, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=used, other=0.0).to(tl.float32)
    return column, rank_key(tl.where(used, cap(y, tanh_scale, HAS_SOFTCAP), FLOOR), UNUSED_BITS)

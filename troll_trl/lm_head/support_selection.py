"""The scoring pass: the support of every token's distribution, chosen without sorting the vocabulary.

One pass over the products reduces every block of 64 logits to its maximum and two sums, for log-sum-exp and entropy
(`blocks.py`); then the best blocks give the best tokens (`topk.py`). The log-sum-exp of the rest is summed from
the blocks and candidates that were not kept, so it is never computed as a difference.
"""

import math

import torch

from troll_trl.kernels.blocks import BLOCK, COLUMNS_STEP, blocks_of, reduce_chunk
from troll_trl.kernels.dispatch import use_triton
from troll_trl.kernels.support import settle_support
from troll_trl.kernels.tiles import FLOOR, LogitTransform, compute_dtype, empty_tile, product_into, slices
from troll_trl.kernels.topk import MOST_IN_REGISTERS, TopTokens, choose_top_tokens, empty_top_tokens

# The PyTorch fallback reduces this number of vocabulary columns at a time: on a CPU they are then still in the cache,
# and on a GPU the fallback copies them. The kernels take all columns at once. On an H100, chunks of 16,384, which fit
# into its cache, gained nothing on the device, and launching ten times as many kernels took twice the time.
_COLUMNS = {"cpu": 8192, "accelerator": 32768}
# The number of tokens in a tile is a multiple of this. On a GPU, a matrix product takes this number of rows at a time.
# Any multiple of 4 is enough for Triton, which would recompile the kernels for rows that are not aligned.
_ROWS_STEP = {"cpu": 4, "accelerator": 128}
_COPIES = 12  # copies of the best blocks that torch's choice makes, in elements of bf16
# This is the number of elements in memory at a time. On a GPU they are the logits of a tile, which has the whole
# vocabulary of a few tokens: 224 MiB in bf16, or 768 tokens for V = 151,936. With the blocks this is less than TRL's
# tile of 256 MiB. On a CPU, products of few tokens are slow. So the tile there has one chunk, in addition to blocks and
# candidates: 24 MiB in float32, or about 320 tokens.
_TILE_ELEMENTS = {"cpu": 6 * 2**20, "accelerator": 7 * 2**24}


def select_support(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sampled_ids: torch.Tensor,
    support_size: int,
    tail_mass: float,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return the sparse distribution of every position, as `sparsify(logits, sampled_ids, support_size, tail_mass)` does,
    and the entropy of the full distribution. Neither has a gradient.

    `hidden` is `(N, H)`, the head's `weight` `(V, H)` and `bias` `(V,)`, `sampled_ids` `(N,)` int64. Returns, with K =
    `support_size`, `token_ids` `(N, K)` int32, and `sparse_log_probs` `(N, K + 1)` and `entropy` `(N,)` float32.
    """
    vocabulary = len(weight)
    device = hidden.device
    sampled_ids = sampled_ids.contiguous()
    kind = "cpu" if device.type == "cpu" else "accelerator"
    dtype = compute_dtype(hidden)
    if use_triton(device):
        chunk = math.ceil(vocabulary / COLUMNS_STEP) * COLUMNS_STEP
    else:
        chunk = min(_COLUMNS[kind], math.ceil(vocabulary / BLOCK) * BLOCK)
    padded = math.ceil(vocabulary / chunk) * chunk
    keep = None
    width = padded
    held = padded
    if _one_chunk_at_a_time(device):
        keep = support_size - 1
        width = chunk
        held = width + 3 * padded // BLOCK + keep * BLOCK
    if use_triton(device) and support_size - 1 > MOST_IN_REGISTERS:  # torch chooses, from copies of the best blocks
        held += _COPIES * (support_size - 1) * BLOCK
    tokens = _tokens_per_tile(len(hidden), max(1, _TILE_ELEMENTS[kind] // held), _ROWS_STEP[kind])
    tile = empty_tile(min(tokens, len(hidden)), width, dtype, device)
    bias = None if bias is None else bias.to(dtype).contiguous()
    columns = slices(vocabulary, chunk)
    # Cast a head in another dtype once, chunk by chunk, and not again for each tile of tokens. During the call
    # the cast takes V·H numbers of bf16, half the memory of the head's float32 gradient in the training pass.
    weights = [weight[cols] for cols in columns]
    if weight.dtype != dtype and tokens < len(hidden):
        weights = [part.to(dtype) for part in weights]
    # These tensors have all positions, so `settle_support` runs once, and not for each tile
    sampled = torch.full((len(hidden), 1), FLOOR, device=device)
    top = empty_top_tokens(len(hidden), support_size - 1, device)
    # One `split` serves all tiles. This loop takes half of the host's time for 4,096 tokens
    tiles = [x.split(tokens) for x in (hidden, sampled_ids, sampled, *top)]
    for hidden_rows, ids, logits, *top_rows in zip(*tiles, strict=True):
        hidden_rows = hidden_rows.to(dtype)
        blocks = blocks_of(tile[: len(hidden_rows)], ids, logits, vocabulary, chunk, keep)
        for cols, weight_cols in zip(columns, weights, strict=True):
            product_into(blocks.chunk_at(cols.start)[:, : len(weight_cols)], hidden_rows, weight_cols)
            reduce_chunk(blocks, None if bias is None else bias[cols], transform, cols.start, cols.stop - cols.start)
        choose_top_tokens(blocks, bias, transform, TopTokens(*top_rows))
        del blocks
    del tile
    ids, log_probs = settle_support(sampled_ids, sampled, top, tail_mass)
    return ids, log_probs, top.entropy


def _tokens_per_tile(tokens: int, most: int, step: int) -> int:
    """Number of tokens per tile: about the same in all tiles, at most `most`, and a multiple of `step` (of 4, if only 4
    fits)."""
    step = next((size for size in (step, 4) if size <= most), 1)
    tiles = max(1, math.ceil(tokens / (most // step * step)))
    return max(1, math.ceil(tokens / tiles / step)) * step


def _one_chunk_at_a_time(device: torch.device) -> bool:
    """Whether the tile holds one chunk, and the best blocks are kept separately. On a GPU, choosing a chunk's best
    blocks would wait for the device."""
    return device.type == "cpu" and not use_triton(device)

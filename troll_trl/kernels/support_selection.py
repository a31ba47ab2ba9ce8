"""The scoring pass: the support of every token's distribution, chosen without sorting the vocabulary.

The K largest of V logits lie inside the K blocks with the largest block maxima. So one pass over the tiles reduces
every block of 64 logits to its maximum, its sum of exponentials and its mean logit; then the K best blocks give K·64
candidates (a few percent of the vocabulary), whose top K is the top K of all, exactly up to ties. The log-sum-exp of
the rest is summed from the blocks and candidates that were not kept, so it never comes from a difference.
"""

import math

import torch

from troll_trl.kernels.tiles import FLOOR, LogitTransform, compute_dtype, empty_tile, logits_into

UNUSED = -1  # token id of an unused slot

_BLOCK = 64  # logits per block
# Vocabulary columns that are reduced while they are still in the cache
_COLUMNS = {"cpu": 8192, "accelerator": 32768}
# Logits in one tile, all of the vocabulary for a few tokens: 256 MiB in float32, some 400 tokens for V = 151,936
_TILE_ELEMENTS = 2**26


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
    Sparse distribution of every position, as `sparsify(logits, sampled_ids, support_size, tail_mass)` has it, and the
    entropy of the full one. Without gradient.

    Args:
        hidden (`torch.Tensor` of shape `(N, H)`):
            Hidden states of the positions to score.
        weight (`torch.Tensor` of shape `(V, H)`), bias (`torch.Tensor` of shape `(V,)`, *optional*):
            The LM head.
        sampled_ids (`torch.Tensor` of shape `(N,)`, int64):
            The sampled token of every position.
        support_size (`int`), tail_mass (`float`):
            Largest number K of kept tokens, and mass δ that may be left to the rest.
        transform ([`LogitTransform`]):
            Scale, soft-capping and temperature of the logits.

    Returns:
        `token_ids` `(N, K)` int32, `sparse_log_probs` `(N, K + 1)` float32, `entropy` `(N,)` float32.
    """
    vocabulary, device = len(weight), hidden.device
    columns = _COLUMNS["cpu" if device.type == "cpu" else "accelerator"]
    columns = min(columns, math.ceil(vocabulary / _BLOCK) * _BLOCK)
    padded = math.ceil(vocabulary / columns) * columns
    tokens = max(1, _TILE_ELEMENTS // padded)
    tile = empty_tile(min(tokens, len(hidden)), padded, device)
    token_ids = torch.empty((len(hidden), support_size), device=device, dtype=torch.int32)
    log_probs = torch.empty((len(hidden), support_size + 1), device=device, dtype=torch.float32)
    entropy = torch.empty(len(hidden), device=device, dtype=torch.float32)
    for start in range(0, len(hidden), tokens):
        rows = slice(start, min(start + tokens, len(hidden)))
        hidden_rows = hidden[rows].to(compute_dtype(hidden))
        blocks = _Blocks(tile[: len(hidden_rows)], columns, sampled_ids[rows].unsqueeze(1))
        for first in range(0, vocabulary, columns):
            cols = slice(first, min(first + columns, vocabulary))
            logits_into(
                blocks.tile[:, cols], hidden_rows, weight[cols], None if bias is None else bias[cols], transform
            )
            blocks.reduce(first, cols.stop)
        token_ids[rows], log_probs[rows], entropy[rows] = blocks.select(support_size, tail_mass)
    return token_ids, log_probs, entropy


def mass_rule(sampled_log_prob: torch.Tensor, other_log_probs: torch.Tensor, tail_mass: float) -> torch.Tensor:
    """
    Which of the other tokens to keep: each one before which the kept mass is still below `1 − tail_mass`.

    Args:
        sampled_log_prob (`torch.Tensor` of shape `(..., 1)`):
            Log-probability of the sampled token.
        other_log_probs (`torch.Tensor` of shape `(..., K − 1)`):
            Log-probabilities of the candidates, descending; `-inf` for none.
        tail_mass (`float`):
            Mass δ in [0, 1) that may be left to the rest.

    Returns:
        `torch.Tensor` of shape `(..., K − 1)`, bool.
    """
    # In float64: the sum is compared with 1 − δ, and δ = 1e-5 is only 168 float32 steps away from 1
    mass = other_log_probs.double().exp()
    mass_before = sampled_log_prob.double().exp() + mass.cumsum(-1) - mass
    return (mass_before < 1 - tail_mass) & (other_log_probs > -math.inf)


class _Blocks:
    """The logits of `n` tokens without the sampled one, and the statistics of their blocks of 64.

    Within a chunk of columns, block `b` holds the columns `b, b + B, b + 2B, …` (`B` blocks a chunk), so that a
    reduction over a block runs over rows of a matrix and vectorises.
    """

    def __init__(self, tile: torch.Tensor, columns: int, sampled_ids: torch.Tensor):
        self.tile, self.columns, self.sampled_ids = tile, columns, sampled_ids  # (n, padded V), –, (n, 1)
        self.per_chunk = columns // _BLOCK
        shape = (len(tile), tile.shape[1] // _BLOCK)
        self.max, self.sum_exp, self.sum_exp_u = (tile.new_empty(shape) for _ in range(3))  # u = z − block maximum
        self.sampled = tile.new_full((len(tile), 1), FLOOR)  # logit of the sampled token

    def reduce(self, first: int, stop: int) -> None:
        """Fold the logits of the columns `first…stop` into the statistics of their blocks."""
        chunk = self.tile[:, first : first + self.columns]  # (n, columns)
        chunk[:, stop - first :] = FLOOR  # padding of the last chunk
        # The sampled token is kept in any case: it takes no part in the selection, nor in the rest
        local = self.sampled_ids - first
        inside = (local >= 0) & (local < stop - first)
        local = local.clamp(0, stop - first - 1)
        logit = chunk.gather(1, local)
        self.sampled = torch.where(inside, logit, self.sampled)
        chunk.scatter_(1, local, torch.where(inside, FLOOR, logit))

        blocks = slice(first // _BLOCK, first // _BLOCK + self.per_chunk)
        u = chunk.view(len(chunk), _BLOCK, self.per_chunk)
        block_max = u.amax(1)
        u = u - block_max.unsqueeze(1)
        exp_u = u.exp()
        self.max[:, blocks], self.sum_exp[:, blocks] = block_max, exp_u.sum(1)
        self.sum_exp_u[:, blocks] = u.mul_(exp_u).sum(1)

    def select(self, support_size: int, tail_mass: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids `(n, K)`, sparse log-probabilities `(n, K + 1)` and entropy `(n,)`."""
        log_sum_exp = self.max + self.sum_exp.log()  # of every block, (n, blocks)
        log_z = torch.cat([log_sum_exp, self.sampled], 1).logsumexp(1, keepdim=True)

        best_blocks = self.max.topk(min(support_size, self.max.shape[1]), 1).indices
        columns = self._columns_of(best_blocks)  # (n, candidates)
        candidates = self.tile.gather(1, columns)
        best = candidates.topk(min(support_size - 1, candidates.shape[1]), 1)
        others = best.values.masked_fill(best.values < FLOOR / 2, -math.inf)  # padding, or the sampled token
        keep = mass_rule(self.sampled - log_z, others - log_z, tail_mass)  # (n, up to K − 1)

        token_ids = torch.cat([self.sampled_ids, columns.gather(1, best.indices).masked_fill(~keep, UNUSED)], 1)
        not_kept = candidates.scatter(1, best.indices, torch.where(keep, FLOOR, best.values))
        rest = torch.logaddexp(
            log_sum_exp.scatter(1, best_blocks, FLOOR).logsumexp(1, keepdim=True), not_kept.logsumexp(1, keepdim=True)
        )
        rest = rest.masked_fill(rest < FLOOR / 2, -math.inf)
        kept = torch.cat([self.sampled, others.masked_fill(~keep, -math.inf)], 1)
        log_probs = torch.log_softmax(torch.cat([kept, rest], 1), 1)

        # H = Σ_v p_v (log Z − z_v), a block at a time
        block_prob = (log_sum_exp - log_z).exp()
        entropy = (block_prob * (log_z - self.max - self.sum_exp_u / self.sum_exp)).sum(1, keepdim=True)
        entropy += (self.sampled - log_z).exp() * (log_z - self.sampled)
        return token_ids.int(), log_probs, entropy.squeeze(1)

    def _columns_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Columns of the members of some blocks; `(n, k)` to `(n, k·64)`."""
        first = blocks // self.per_chunk * self.columns + blocks % self.per_chunk
        members = torch.arange(_BLOCK, device=blocks.device) * self.per_chunk
        return (first.unsqueeze(2) + members).flatten(1)

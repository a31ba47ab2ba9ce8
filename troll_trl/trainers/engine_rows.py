"""
Rows of numbers: what the engine answers for every sampled token, and how it becomes an old policy.

A token with a support of K tokens is a row of `2K` float32, here and in the samples of `experimental/async_grpo`:

    log q(a) of the sampled token,  K − 1 of the most likely others,  log of the rest,  K − 1 ids of the others

The sampled token comes first, whatever its rank; the others by descending probability. An unused slot has
log-probability −∞ and id −1. All remaining tokens share the rest, whose mass is `1 − Σ` of the listed tokens. This is
good to about 1e-7, and no less than `REST_FLOOR`. A float32 holds ids below 2²⁴ exactly. If an answer for a token is
incomplete, its row is NaN. Tokens of probability 0 take no slot, if the listed tokens have all the mass.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

# Smallest mass of the rest. Rounding of the engine's float32 makes `1 − Σ` of a peaked distribution anything from −1e-7
# to 1e-7. At 0 the projection would forbid the rest; a floor costs a policy inside the bound at most 1e-6 nats. If the
# policy has less there, `cap_rest_mass` lowers the floor to the policy's mass: otherwise KL(q‖p) of the masks would
# count up to all of `−log p`.
REST_FLOOR = 1e-6
# If the listed tokens lack no more mass than this, all others have probability 0: the logits of padding are −∞
_ALL_LISTED = 1e-5
# What vLLM writes in place of −∞
NO_LOG_PROB = -9999.0


class SampledLogProb(float):
    """
    Log-probability of a sampled token, NaN if the engine's answer is incomplete. It carries the token's whole `row`
    `(2K,)` and its id, `token`. TRL slices and concatenates lists of such numbers, turn by turn, and looks at the
    numbers alone. A rollout function may put them in the wrong place, which only the id shows.
    """

    __slots__ = ("row", "token")
    row: Sequence[float]
    token: int | None

    # pickle needs the defaults to make one
    def __new__(cls, value: float, row: Sequence[float] = (), token: int | None = None):
        self = super().__new__(cls, value)
        self.row, self.token = row, token
        return self


def make_rows(log_probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows `(T, 2K)` from log-probabilities `(T, K)`, the sampled token's first, and ids `(T, K − 1)` of the others."""
    used = np.pad(ids != UNUSED, ((0, 0), (1, 0)), constant_values=True)
    log_probs = np.where(used, log_probs, -np.inf)
    rest_mass = 1 - np.exp(log_probs).sum(1)  # NaN if one is NaN
    impossible = used & (log_probs <= NO_LOG_PROB) & (rest_mass <= _ALL_LISTED)[:, None]
    impossible[:, 0] = False  # the sampled token had a probability
    used, log_probs = used & ~impossible, np.where(impossible, -np.inf, log_probs)
    ids = np.where(used[:, 1:], ids, UNUSED)
    rows = np.column_stack([log_probs, np.log(np.maximum(rest_mass, REST_FLOOR)), ids]).astype(np.float32)
    rows[(used & ~(log_probs > NO_LOG_PROB)).any(1)] = np.nan  # a NaN is not above either
    return rows


def read_answer(
    sampled: Sequence[int],
    counts: Sequence[int],
    ids: Sequence[int],
    log_probs: Sequence[float | None],
    others: int,
) -> list[SampledLogProb]:
    """
    What the engine said of each token of a completion.

    Args:
        sampled (`Sequence[int]` of length `T`):
            The completion.
        counts (`Sequence[int]` of length `T`):
            How many tokens the engine listed at each position.
        ids, log_probs (`Sequence` of length `Σ counts`):
            These tokens, in any order at their position, and their log-probabilities. The sampled token must be among
            them, at least once.
        others (`int`):
            The number of most likely tokens that the engine was asked for. An answer is incomplete if it has a NaN or
            nothing for a token. If it lists fewer tokens, or has −∞ for one, it is complete only if the listed tokens
            have all the mass.

    Raises:
        ValueError: the lengths contradict each other.
    """
    if len(counts) != len(sampled) or not sum(counts) == len(ids) == len(log_probs):
        raise ValueError(
            f"The engine sampled {len(sampled)} tokens of a completion, and answered for {len(counts)} positions with "
            f"{sum(counts)} tokens in all: it gave {len(ids)} ids and {len(log_probs)} log-probabilities. Each token "
            "needs one position, and each id one log-probability. This engine's version was not tested: see "
            "docs/vllm.md."
        )
    used = np.arange(max([others + 1, *counts])) < np.asarray(counts)[:, None]  # (T, W)
    token_ids, values = np.full(used.shape, UNUSED), np.full(used.shape, -np.inf)
    token_ids[used] = ids
    given = np.array(log_probs, float)  # NaN for None
    values[used] = np.where(given < np.inf, given, np.nan)
    is_sampled = token_ids == np.asarray(sampled)[:, None]
    own = np.fmax.reduce(np.where(is_sampled, values, -np.inf), 1)  # a token that is listed twice may have one number
    token_ids[is_sampled] = UNUSED
    # NaN comes first, since it must not be cut off, and unused slots come last, after −∞
    order = np.where(np.isnan(values), np.inf, np.maximum(values, NO_LOG_PROB))
    order = np.argsort(np.where(token_ids == UNUSED, np.inf, -order), 1, kind="stable")[:, :others]
    values, token_ids = (np.take_along_axis(x, order, 1) for x in (values, token_ids))
    rows = make_rows(np.column_stack([own, values]), token_ids)
    short = (token_ids == UNUSED).sum(1) > 1  # one slot is the sampled token's, if that was listed as likely
    rows[short & (rows[:, others + 1] > math.log(_ALL_LISTED))] = np.nan
    return [*map(SampledLogProb, rows[:, 0].tolist(), rows, map(int, sampled))]


def check_tokens(log_probs: Sequence[float | None], trained: Sequence[int], sampled: Sequence[int], name: str) -> None:
    """Raise a `ValueError` if a [`SampledLogProb`] among `log_probs` `(T,)` belongs to another token than the
    completion `sampled` `(T,)` has at its place. Only places that are 1 in `trained` `(T,)` are read. `name` is the
    completion's in the message."""
    places = np.flatnonzero(trained).tolist()
    pairs = [(place, getattr(log_probs[place], "token", None), int(sampled[place])) for place in places]
    wrong = [(place, own, token) for place, own, token in pairs if own is not None and own != token]
    if wrong:
        place, own, token = wrong[0]
        raise ValueError(
            f"The `logprobs` of {name} are misaligned: {len(wrong)} of {len(places)} numbers belong to other tokens. "
            f"At position {place} the completion has token {token}, and its number is the engine's for token {own}. "
            "Give every token the number that the engine gave for it, in the order of the completion."
        )


def rows_of(log_probs: Sequence[float | None], trained: Sequence[int], support_size: int) -> np.ndarray:
    """
    The old policy of a completion: rows `(T, 2K)` float32 for the `support_size` K, 0 for tokens that are not trained
    on.

    `log_probs` `(T,)` has a [`SampledLogProb`] for every token that is 1 in `trained` `(T,)`; with K = 1 plain numbers
    serve, too. The numbers of all other tokens are not read. A `ValueError` says that a row has not `2K` numbers.
    """
    places = np.flatnonzero(trained).tolist()
    given = [log_probs[place] for place in places]
    rows = np.zeros((len(log_probs), 2 * support_size), dtype=np.float32)
    if support_size == 1:
        rows[places] = make_rows(np.array(given, float)[:, None], np.empty((len(given), 0)))
        return rows
    unknown = np.full(2 * support_size, np.nan)
    carried = [unknown if x is None or math.isnan(x) else getattr(x, "row", ()) for x in given]
    if wrong := {len(row) // 2 for row in carried} - {support_size}:
        raise ValueError(
            f"A sampled token comes with the log-probabilities of {max(*wrong, 1) - 1} other tokens, expected "
            f"{support_size - 1}. Give a `SampledLogProb` for every trained token, as "
            "`trainer.vllm_generation.generate` does; or choose a mask or a penalty with a binary "
            "`divergence_type`, which reads the sampled token alone."
        )
    rows[places] = np.reshape(carried, (-1, 2 * support_size))
    return rows


def sparse_of(rows: torch.Tensor, sampled: torch.Tensor) -> SparseDistribution:
    """The distributions of rows `(..., 2K)`, whose sampled tokens are `sampled` `(...)`."""
    size = rows.shape[-1] // 2
    token_ids = torch.cat([sampled.unsqueeze(-1).int(), rows[..., size + 1 :].int()], -1)
    return SparseDistribution(token_ids, rows[..., : size + 1])


def cap_rest_mass(old: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(..., K + 1)` of the engine. If the rest mass is at its floor and the policy has less there,
    it is lowered to the policy's."""
    rest = old[..., -1:]
    lowered = torch.minimum(rest, policy[..., -1:].detach())
    return torch.cat([old[..., :-1], torch.where(rest > math.log(REST_FLOOR), rest, lowered)], -1)

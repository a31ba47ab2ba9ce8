"""
EnginePolicy: the engine's distribution as the old policy, from vLLM's answers to the columns of the rollout batch.

A token with a support of K tokens is a row of `2K` float32:

    log q(a) of the sampled token,  K − 1 of the most likely others,  log of the rest,  K − 1 ids of the others

The sampled token comes first, whatever its rank; the others follow by descending probability. An unused slot has
log-probability −∞ and id −1. All remaining tokens share the rest, whose mass is `1 − Σ` of the listed tokens. This mass
is accurate to about 1e-7, and at least `REST_FLOOR`. A float32 holds ids below 2²⁴ exactly. If an answer for a token is
incomplete, its row is NaN. Tokens of probability 0 take no slot, if the listed tokens have all the mass.
"""

import math
import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.compat import refuse_missing
from troll_trl.kernels.support import mass_rule
from troll_trl.trainers.columns import OLD_LOG_PROBS, SPARSE_LOG_PROBS, TOKEN_IDS
from troll_trl.trainers.vllm import check_server, server_url
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution, Support, move_to_rest, trimmed

logger = get_logger(__name__)

# Smallest mass of the rest. Float32 rounding in the engine leaves `1 − Σ` of a peaked distribution anywhere between
# −1e-7 and 1e-7. At 0, the projection would forbid the rest; the floor costs a policy inside the bound at most 1e-6
# nats. `lower_floor` lowers it to the policy's mass if that is less: otherwise a penalty with ε = 0 would act, and a
# user's KL(q‖p) would count the difference.
REST_FLOOR = 1e-6
# If the listed tokens lack at most this mass, all others have probability 0, such as padding with logits of −∞
_ALL_LISTED = 1e-5
# What vLLM writes in place of −∞
NO_LOG_PROB = -9999.0


class EnginePolicy:
    """
    Keeps the engine's distribution of a rollout as its old policy: no pass of the model scores the rollout. TRL's
    `generation`, a `VLLMGeneration`, then also asks vLLM for the most likely tokens.

    Without a `support`, the trust region reads only the sampled token, so a row has `K = 1`. `args` is the trainer's
    config.
    """

    def __init__(self, accelerator: Accelerator, generation: Any, support: Support | None, args: Any):
        refuse_missing(["EnginePolicy"])
        self.size = 1 if support is None else support.size  # K
        if args.vllm_mode == "server" and accelerator.is_main_process:
            check_server(generation.vllm_client.get_server_info(), server_url(args), self.size)
        self.accelerator = accelerator
        self.support = support
        self.answered: list[list[SampledLogProb]] = []  # the answers for the completions that the engine sampled last
        self._rows: list[np.ndarray] = []  # `(T, 2K)` of each completion of the rollout batch
        ask_for_likely_tokens(generation, self)

    def keep(
        self,
        completion_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float | None]],
        tool_mask: Sequence[Sequence[int]] | None,
    ) -> None:
        """Keep the rollout as TRL generated it: completions, the engine's numbers for their tokens, and a `tool_mask`
        that is 0 for tool tokens."""
        masks = [[1] * len(ids) for ids in completion_ids] if tool_mask is None else tool_mask
        self._rows = []
        for number, (ids, values, mask) in enumerate(zip(completion_ids, log_probs, masks, strict=True)):
            if not len(ids) == len(values) == len(mask):
                raise ValueError(
                    f"Completion {number} has {len(ids)} tokens, but {len(values)} log-probabilities and a mask of "
                    f"{len(mask)} numbers. Give one of each for every token."
                )
            check_tokens(values, mask, ids, f"completion {number}")
            self._rows.append(rows_of(values, mask, self.size))

    def log_probs(self, length: int) -> torch.Tensor:
        """Return the engine's log-probabilities of the completions, padded to `(B, length)` float32; NaN if unknown."""
        padded = np.zeros((len(self._rows), length), dtype=np.float32)
        for values, rows in zip(padded, self._rows, strict=True):
            values[: len(rows)] = rows[:, 0]
        return torch.from_numpy(padded).to(self.accelerator.device)

    def add_to(self, batch: dict[str, Any]) -> int:
        """Add the old policy to a rollout batch. Exclude tokens whose old policy is unknown from the loss and from the
        counts of the batch. Return the number of these tokens over all ranks. Every rank must call this."""
        log_probs = self.log_probs(batch["completion_ids"].shape[1])  # (B, C)
        trained = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        known = ~log_probs.isnan()  # (B, C)
        unknown = self.accelerator.reduce(torch.stack([(trained * ~known).sum(), trained.sum()]), reduction="sum")
        count, tokens = unknown.tolist()
        if count:
            logger.warning(
                f"For {count} of {tokens} tokens of a rollout batch, the engine gave no log-probability, NaN, "
                f"{NO_LOG_PROB:g}, or too few of the most likely tokens. The loss leaves these tokens out; "
                "`troll/unscored_tokens` counts them."
            )
            batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * known
            if "num_items_in_batch" in batch:
                batch["num_items_in_batch"] = batch["num_items_in_batch"] - count
        batch[OLD_LOG_PROBS] = log_probs.nan_to_num(0.0)
        if self.support is not None:
            kept, scored = (trained * known).bool(), batch["completion_mask"].bool()
            old = self._old_policy(batch["completion_ids"], kept, scored, self.support.tail_mass)
            batch[TOKEN_IDS], batch[SPARSE_LOG_PROBS] = old.token_ids, old.log_probs
        return count

    def _old_policy(
        self, sampled: torch.Tensor, kept: torch.Tensor, scored: torch.Tensor, tail_mass: float
    ) -> SparseDistribution:
        """Make the old policy of completions `(B, C)` at the `kept` positions, with as few tokens as the trainer's
        support. Other positions keep no token, except for the sampled token at `scored` positions, which the head
        needs."""
        rows = np.zeros((*sampled.shape, 2 * self.size), dtype=np.float32)
        for values, row in zip(rows, self._rows, strict=True):
            values[: len(row)] = row
        old = sparse_of(torch.from_numpy(rows).to(sampled.device), sampled)
        own, others, rest = old.log_probs.split([1, self.size - 1, 1], -1)
        dropped = ~mass_rule(own, others, tail_mass)  # they join the rest
        rest = torch.cat([rest, others.masked_fill(~dropped, -torch.inf)], -1).logsumexp(-1, keepdim=True)
        log_probs = torch.cat([own, others.masked_fill(dropped, -torch.inf), rest], -1)
        unused = torch.cat([~scored.unsqueeze(-1), dropped | ~kept.unsqueeze(-1)], -1)
        token_ids = old.token_ids.masked_fill(unused, UNUSED)
        return trimmed(SparseDistribution(token_ids, move_to_rest(log_probs, ~kept).float()))


def ask_for_likely_tokens(generation: Any, policy: "EnginePolicy") -> None:
    """
    Make TRL's `VLLMGeneration` request the most likely tokens, and return [`SampledLogProb`]s in place of numbers.

    In colocate mode, vLLM's flat lists are read directly, because TRL sorts an object for every listed token. Without
    `detokenize`, vLLM does not decode the listed tokens to text.
    """
    generation.logprobs = others = policy.size - 1  # vLLM lists this many tokens, and the sampled token
    answer = generation.generate
    # While TRL generates: the completions that vLLM has sampled, each with its flat list
    captured: list[tuple[Sequence[int], Any]] | None = None
    if generation.mode == "colocate":
        llm = generation.llm
        config = llm.llm_engine.model_config
        if 0 <= config.max_logprobs < others:
            config.max_logprobs = others
        sample = llm.generate
        text = {"detokenize": False} if not generation.generation_kwargs.get("stop") else {}
        generation.generation_kwargs = {"flat_logprobs": True, **text, **generation.generation_kwargs}

        def sample_and_capture(*args, **kwargs):
            outputs = sample(*args, **kwargs)
            for completion in chain.from_iterable(output.outputs for output in outputs):
                # A rollout function that calls vLLM itself gets vLLM's own answer
                if captured is not None and hasattr(completion.logprobs, "start_indices"):
                    captured.append((completion.token_ids, completion.logprobs))
                    completion.logprobs = None  # TRL reads none
            return outputs

        llm.generate = sample_and_capture

    def generate(*args, **kwargs):
        nonlocal captured
        flat: list[tuple[Sequence[int], Any]] = []
        captured = flat
        try:
            prompt_ids, completion_ids, log_probs, ids, *rest = answer(*args, **kwargs)
        finally:
            captured = None
        listed = _flat_lists(completion_ids, flat) if flat else _nested_lists(ids, log_probs)
        policy.answered = [
            read_answer(sampled, *lists, others) for sampled, lists in zip(completion_ids, listed, strict=True)
        ]
        return prompt_ids, completion_ids, [[[value] for value in row] for row in policy.answered], None, *rest

    generation.generate = generate


_Lists = tuple[Sequence[int], Sequence[int], Sequence[float | None]]  # a completion's counts, ids, log-probabilities


def _flat_lists(completion_ids: Sequence[Sequence[int]], flat: Sequence[tuple[Sequence[int], Any]]) -> list[_Lists]:
    """Return vLLM's `flat` lists of this rank's completions. Ranks that share an engine sample together, and the
    completions of each rank are consecutive. TRL returns the token lists that vLLM made, or copies of them."""
    size = len(completion_ids)
    if size == 0:
        return []
    parts = [flat[start : start + size] for start in range(0, len(flat) - size + 1, size)]
    found: list[Sequence[tuple[Sequence[int], Any]]] = []
    for equal in (operator.is_, lambda mine, given: [*mine] == [*given]):
        if len(found) != 1:
            found = [part for part in parts if all(map(equal, completion_ids, [tokens for tokens, _ in part]))]
    if len(found) != 1:
        raise RuntimeError(
            f"TRL returned {size} completions, and their tokens are in {len(found)} places among the {len(flat)} "
            "completions that vLLM sampled. Nothing else connects them to vLLM's log-probabilities. This "
            "version of TRL was not tested: set `flat_logprobs` to False in `generation_kwargs`, or use "
            "`old_policy='trainer'`."
        )
    return [([*map(operator.sub, x.end_indices, x.start_indices)], x.token_ids, x.logprobs) for _, x in found[0]]


def _nested_lists(ids: Any, log_probs: Any) -> list[_Lists]:
    """Make the same lists from TRL's ids and log-probabilities, which it nests by completion and position."""
    if ids is None or log_probs is None:
        raise ValueError("vLLM answered without the ids or log-probabilities of likely tokens. See docs/vllm.md.")
    for number, (rows, values) in enumerate(zip(ids, log_probs, strict=True)):
        if (counts := [*map(len, rows)]) != (given := [*map(len, values)]):
            raise ValueError(
                f"In completion {number}, vLLM gave {sum(counts)} ids at {len(counts)} positions and {sum(given)} "
                f"log-probabilities at {len(given)}. Each id needs a log-probability at its position."
            )
    return [([*map(len, row)], [*chain(*row)], [*chain(*x)]) for row, x in zip(ids, log_probs, strict=True)]


class SampledLogProb(float):
    """
    Log-probability of a sampled token, NaN if the engine's answer is incomplete. It carries the token's whole `row`
    `(2K,)` and its id, `token`. TRL slices and concatenates lists of such numbers, turn by turn, and reads only the
    numbers. If a rollout function puts a number in the wrong place, only the id shows this.
    """

    __slots__ = ("row", "token")
    row: Sequence[float]
    token: int | None

    # pickle needs the defaults to make an instance
    def __new__(cls, value: float, row: Sequence[float] = (), token: int | None = None):
        self = super().__new__(cls, value)
        self.row = row
        self.token = token
        return self


def make_rows(log_probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows `(T, 2K)` from log-probabilities `(T, K)`, the sampled token's first, and ids `(T, K − 1)` of the others."""
    used = np.pad(ids != UNUSED, ((0, 0), (1, 0)), constant_values=True)
    log_probs = np.where(used, log_probs, -np.inf)
    rest_mass = 1 - np.exp(log_probs).sum(1)  # NaN if one is NaN
    impossible = used & (log_probs <= NO_LOG_PROB) & (rest_mass <= _ALL_LISTED)[:, None]
    impossible[:, 0] = False  # the sampled token had a probability
    used = used & ~impossible
    log_probs = np.where(impossible, -np.inf, log_probs)
    ids = np.where(used[:, 1:], ids, UNUSED)
    rows = np.column_stack([log_probs, np.log(np.maximum(rest_mass, REST_FLOOR)), ids]).astype(np.float32)
    rows[(used & ~(log_probs > NO_LOG_PROB)).any(1)] = np.nan  # NaN fails the comparison, too
    return rows


def read_answer(
    sampled: Sequence[int],
    counts: Sequence[int],
    ids: Sequence[int],
    log_probs: Sequence[float | None],
    others: int,
) -> list[SampledLogProb]:
    """
    Read the engine's answer for each token of a completion.

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
    """Raise a `ValueError` if a [`SampledLogProb`] in `log_probs` `(T,)` belongs to a token other than the one that the
    completion `sampled` `(T,)` has at this position. Only positions that are 1 in `trained` `(T,)` are read. `name`
    identifies the completion in the message."""
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

    `log_probs` `(T,)` has a [`SampledLogProb`] for every token that is 1 in `trained` `(T,)`; with K = 1, plain numbers
    work, too. The numbers of all other tokens are not read. Raises a `ValueError` if a row does not have `2K` numbers.
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
            "`trainer.vllm_generation.generate` does; or choose a mask, or a penalty with "
            "`divergence_type='binary_kl'`, which read only the sampled token."
        )
    rows[places] = np.reshape(carried, (-1, 2 * support_size))
    return rows


def sparse_of(rows: torch.Tensor, sampled: torch.Tensor) -> SparseDistribution:
    """The distributions of rows `(..., 2K)`, whose sampled tokens are `sampled` `(...)`."""
    size = rows.shape[-1] // 2
    token_ids = torch.cat([sampled.unsqueeze(-1).int(), rows[..., size + 1 :].int()], -1)
    return SparseDistribution(token_ids, rows[..., : size + 1])


def lower_floor(old: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """Return the engine's log-probabilities `(..., K + 1)`. If their rest mass is at its floor and the policy's rest
    mass is smaller, lower theirs to the policy's."""
    rest = old[..., -1:]
    lowered = torch.minimum(rest, policy[..., -1:].detach())
    return torch.cat([old[..., :-1], torch.where(rest > math.log(REST_FLOOR), rest, lowered)], -1)

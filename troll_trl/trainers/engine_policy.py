"""
The engine's distribution as the old policy: what vLLM answers for every sampled token, and how it is read.

The sampled token comes first, whatever its rank, then the most likely others by descending probability. All remaining
tokens share the rest, whose mass is `1 − Σ` of the listed tokens. This is good to about 1e-7, and no less than
`REST_FLOOR`. If an answer for a token is incomplete, its row is NaN. `experimental/async_grpo` follows the same rules.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.trainers.old_policy import COLUMN, OLD_LOG_PROBS
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution, mass_rule

logger = get_logger(__name__)

# Smallest mass of the rest. Rounding of the engine's float32 makes `1 − Σ` of a peaked distribution anything from −1e-7
# to 1e-7. At 0 the projection would forbid the rest; a floor costs a policy inside the bound at most 1e-6 nats. If the
# policy has less there, the floor is lowered to it: KL(q‖p) of the masks would count up to all of `−log p`.
REST_FLOOR = 1e-6
# What vLLM writes in place of −∞
NO_LOG_PROB = -9999.0


class SampledLogProb(float):
    """
    Log-probability of a sampled token, which carries what the engine said of other tokens at its position.

    TRL slices and concatenates lists of such numbers, turn by turn, and looks at the numbers alone.

    Args:
        value (`float`):
            Log-probability of the sampled token; NaN if the engine's answer is incomplete.
        ids (`Sequence[int]`):
            The most likely other tokens, the sampled one not among them, by descending probability; −1 for none.
        log_probs (`Sequence[float]`):
            Their log-probabilities; −∞ for none.
    """

    __slots__ = ("ids", "log_probs")
    ids: Sequence[int]
    log_probs: Sequence[float]

    def __new__(cls, value: float, ids: Sequence[int] = (), log_probs: Sequence[float] = ()):
        self = super().__new__(cls, value)
        self.ids, self.log_probs = ids, log_probs
        return self


def read_answer(
    sampled: Sequence[int], ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float | None]], others: int
) -> list[SampledLogProb]:
    """
    What the engine said of each token of a completion.

    Args:
        sampled (`Sequence[int]` of length `T`):
            The completion.
        ids, log_probs (`Sequence` of `T` sequences):
            The tokens that the engine listed at each position, in any order, and their log-probabilities. The sampled
            token must be among them, at least once.
        others (`int`):
            How many of the most likely tokens the engine was asked for. If it listed fewer, or gave a NaN or nothing,
            the answer is incomplete.
    """
    if not len(sampled):
        return []
    width = max(others + 1, *map(len, ids))
    token_ids = _padded(ids, width, UNUSED).astype(np.int64)  # (T, W)
    values = _padded(log_probs, width, -np.inf).astype(np.float64)  # (T, W); NaN for None
    is_sampled = token_ids == np.asarray(sampled)[:, None]
    distinct = (token_ids != UNUSED).sum(1) - np.maximum(is_sampled.sum(1) - 1, 0)
    complete = is_sampled.any(1) & (distinct >= others) & ~np.isnan(values).any(1)
    own = np.where(complete, np.where(is_sampled, values, -np.inf).max(1), np.nan)
    values[is_sampled], token_ids[is_sampled] = -np.inf, UNUSED
    order = np.argsort(-values, 1, kind="stable")[:, :others]
    likely = np.take_along_axis(token_ids, order, 1).astype(np.int32)  # (T, N)
    values = np.take_along_axis(values, order, 1).astype(np.float32)
    return list(map(SampledLogProb, own.tolist(), likely, values))


def _padded(rows: Sequence[Sequence[float | None]], width: int, padding: float) -> np.ndarray:
    if isinstance(rows, np.ndarray) and rows.shape[1] == width:
        return rows
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows])


def old_policy_rows(
    log_probs: Sequence[float | None], trained: Sequence[int], others: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    The old policy of a completion, with the rest.

    Args:
        log_probs (`Sequence[float]` of length `T`):
            A [`SampledLogProb`] for every token that is trained on.
        trained (`Sequence[int]` of length `T`):
            1 for those; nothing is read of the others.
        others (`int`):
            Slots N for other tokens. A [`SampledLogProb`] may carry fewer.

    Returns:
        Token ids `(T, N)` int32 of the other tokens, −1 in unused slots; log-probabilities `(T, N + 1)` float64, the
        sampled token first; and the log-mass of the rest `(T,)` float64. A token that is not trained on has NaN, and so
        has one whose answer is incomplete.

    Raises:
        ValueError: a token that is trained on carries more than N others, or none although N > 0.
    """
    ids = np.full((len(log_probs), others), UNUSED, dtype=np.int32)
    numbers = np.full((len(log_probs), others + 1), -np.inf)
    numbers[:, 0] = np.nan
    whole: dict[int, Any] = {}  # that carry N others, by place
    for place, (value, is_trained) in enumerate(zip(log_probs, trained, strict=True)):
        if is_trained and value is not None:
            listed = getattr(value, "ids", ())
            if len(listed) > others or (others and not isinstance(value, SampledLogProb) and not math.isnan(value)):
                raise ValueError(
                    f"A sampled token comes with the log-probabilities of {len(listed)} other tokens, expected "
                    f"{others}. Give a `SampledLogProb` with the {others} most likely other tokens for every trained "
                    "token, as `trainer.vllm_generation.generate` does; or choose the mask 'binary_tv' or 'binary_kl', "
                    "which reads the sampled token alone."
                )
            numbers[place, 0] = value
            if others and len(listed) == others:
                whole[place] = value
            elif len(listed):  # of a `SampledLogProb`
                ids[place, : len(listed)] = listed
                numbers[place, 1 : 1 + len(listed)] = value.log_probs  # type: ignore[attr-defined]
    if whole:  # at once: a completion has thousands of tokens
        ids[[*whole]] = [value.ids for value in whole.values()]
        numbers[[*whole], 1:] = [value.log_probs for value in whole.values()]
    used = np.concatenate([np.ones((len(ids), 1), dtype=bool), ids != UNUSED], 1)
    numbers[(~(numbers > NO_LOG_PROB) & used).any(1)] = np.nan  # also catches NaN
    rest = np.log(np.maximum(1 - np.exp(numbers).sum(1), REST_FLOOR))
    return ids, numbers, rest


class EngineRecorder:
    """
    Takes the place of [`~troll_trl.trainers.old_policy.Recorder`] if the old policy is the engine's. No pass scores the
    rollout: TRL's question for one is answered with the engine's numbers.

    Args:
        accelerator (`Accelerator`):
            Of the run.
        generation (`VLLMGeneration`):
            TRL's, which is made to ask for the most likely tokens, too.
        support_size (`int`):
            Tokens K per position; 0 if the trust region reads the sampled token alone.
        tail_mass (`float`):
            As in [`~troll_trl.trust_region.sparse.sparsify`].
        vocabulary (`int`):
            A support as large as this leaves no rest.
        asked (`bool`):
            Whether TRL asks for the rollout's scores, before any other pass.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        generation: Any,
        support_size: int,
        tail_mass: float,
        vocabulary: int,
        asked: bool,
    ):
        self.accelerator, self.support_size, self.tail_mass = accelerator, support_size, tail_mass
        self.has_rest, self._asked = support_size < vocabulary, asked
        self.others = max(support_size - 1, 0)
        self.waits = False  # for TRL's question
        self.recorded = None  # the rows join the rollout batch in `add_to`
        self.answered: list[list[SampledLogProb]] = []  # of the completions that the engine sampled last
        self._old: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of each completion, by `old_policy_rows`
        ask_for_likely_tokens(generation, self)

    @contextmanager
    def recording(self, _wanted: bool) -> Iterator[None]:
        """Around TRL's generation and scoring."""
        self.waits = self._asked
        try:
            yield
        finally:
            self.waits = False

    def keep(
        self,
        completion_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float | None]],
        tool_mask: Sequence[Sequence[int]] | None,
    ) -> None:
        """The rollout as TRL generated it: completions, the engine's numbers for their tokens, and 0 in `tool_mask` for
        tokens of tools."""
        masks = [[1] * len(ids) for ids in completion_ids] if tool_mask is None else tool_mask
        self._old = []
        for ids, values, mask in zip(completion_ids, log_probs, masks, strict=True):
            if len(values) != len(ids):
                raise ValueError(f"A completion of {len(ids)} tokens comes with {len(values)} log-probabilities.")
            self._old.append(old_policy_rows(values, mask, self.others))

    def log_probs(self, length: int) -> torch.Tensor:
        """The engine's log-probabilities of the completions, padded to `(B, length)` float32; NaN if unknown."""
        rows = np.full((len(self._old), length), np.nan, dtype=np.float32)
        for row, (_, numbers, _) in zip(rows, self._old, strict=True):
            row[: len(numbers)] = numbers[:, 0]
        return torch.from_numpy(rows).to(self.accelerator.device)

    def answer(self, length: int) -> torch.Tensor:
        """In place of the pass that scores the rollout: `(B, length)`."""
        self.waits = False
        return self.log_probs(length).nan_to_num(0.0)

    def equal_where_rounded(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The reference's log-probabilities `(B, C)`; 0 where the engine's are unknown, as in [`answer`]."""
        return log_probs.masked_fill(self.log_probs(log_probs.shape[1]).isnan(), 0.0)

    def add_to(self, batch: dict[str, Any]) -> int:
        """
        Add the old policy to a rollout batch. A token whose old policy is unknown leaves its loss and its counts.
        Every rank must call this.

        Returns:
            The number of these tokens, over all ranks.

        Raises:
            RuntimeError: on all ranks, if the engine scored no token of the rollout batch.
        """
        log_probs = self.log_probs(batch["completion_ids"].shape[1])  # (B, C)
        known = ~log_probs.isnan()
        trained = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        unknown = self.accelerator.reduce(torch.stack([(trained * ~known).sum(), trained.sum()]), reduction="sum")
        count, tokens = unknown.tolist()
        if count:
            if count == tokens:
                raise RuntimeError(f"The engine gave no log-probability for any of {count} tokens of a rollout batch.")
            logger.warning(
                f"For {count} of {tokens} tokens of a rollout batch, the engine gave no log-probability, NaN, "
                f"{NO_LOG_PROB:g}, or too few of the most likely tokens. The loss leaves these tokens out; "
                "`troll/unscored_tokens` counts them."
            )
            batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * known
            if "num_items_in_batch" in batch:
                batch["num_items_in_batch"] = batch["num_items_in_batch"] - count
        batch[OLD_LOG_PROBS] = log_probs.nan_to_num(0.0)
        if self.support_size:
            live = (trained * known).bool().cpu()
            batch[COLUMN] = [
                self._row(ids.cpu(), row, old)
                for ids, row, old in zip(batch["completion_ids"], live, self._old, strict=True)
            ]
        return count

    def _row(self, sampled: torch.Tensor, live: torch.Tensor, old: tuple[np.ndarray, ...]) -> RaggedDistribution:
        """The old policy of a completion `(C,)` at its `live` `(C,)` positions."""
        ids, log_probs, rest = map(torch.from_numpy, old)  # (T, K − 1), (T, K), (T,)
        live = live[: len(ids)].unsqueeze(1)
        others = log_probs[:, 1:]
        kept = mass_rule(log_probs[:, :1], others, self.tail_mass)
        if not self.has_rest:  # every token is listed
            rest = torch.full_like(rest, -torch.inf)
        if self.others:
            rest = torch.logaddexp(rest, others.masked_fill(kept, -torch.inf).logsumexp(1))
        token_ids = torch.cat([sampled[: len(ids), None].int(), ids.masked_fill(~kept, UNUSED)], 1)
        log_probs = torch.cat([log_probs[:, :1], others.masked_fill(~kept, -torch.inf), rest.unsqueeze(1)], 1)
        row = SparseDistribution(token_ids.masked_fill(~live, UNUSED)[None], log_probs.float()[None])
        return RaggedDistribution.pack(row)


def ask_for_likely_tokens(generation: Any, recorder: EngineRecorder) -> None:
    """
    Have TRL's `VLLMGeneration` ask for the most likely tokens, and answer with [`SampledLogProb`]s in place of numbers.

    In colocate mode vLLM's flat lists are read directly, because TRL sorts an object for every listed token. Without
    `detokenize` vLLM decodes none of them to text.
    """
    # vLLM lists this number of tokens, and the sampled one. Without a rest the list must have every token.
    generation.logprobs = asked = recorder.others if recorder.has_rest else recorder.support_size
    answer = generation.generate
    flat: list[Any] = []  # of the completions that vLLM has just sampled
    if generation.mode == "colocate":
        llm = generation.llm
        config = llm.llm_engine.model_config
        if 0 <= config.max_logprobs < asked:
            config.max_logprobs = asked
        sample = llm.generate
        text = {"detokenize": False} if not generation.generation_kwargs.get("stop") else {}
        generation.generation_kwargs = {"flat_logprobs": True, **text, **generation.generation_kwargs}

        def sample_and_take(*args, **kwargs):
            outputs = sample(*args, **kwargs)
            completions = [completion for output in outputs for completion in output.outputs]
            flat[:] = [completion.logprobs for completion in completions]
            for completion in completions:
                completion.logprobs = None  # TRL then reads none
            return outputs

        llm.generate = sample_and_take

    def generate(prompts, *args, **kwargs):
        prompt_ids, completion_ids, log_probs, ids = answer(prompts, *args, **kwargs)
        if flat:
            parallel = generation.tensor_parallel_size > 1  # then this rank's completions are a part of its group's
            first = torch.distributed.get_rank(group=generation.tp_group) * len(prompts) if parallel else 0
            mine = flat[first : first + len(completion_ids)]
            ids, log_probs = ([_by_position(row, name) for row in mine] for name in ("token_ids", "logprobs"))
            flat.clear()
        recorder.answered = [
            read_answer(*row, recorder.others) for row in zip(completion_ids, ids, log_probs, strict=True)
        ]
        return prompt_ids, completion_ids, [[[value] for value in row] for row in recorder.answered], None

    generation.generate = generate


def _by_position(flat: Any, name: str) -> Any:
    """A list of vLLM's `FlatLogprobs`, cut into its positions: an array if all are of one length."""
    values, starts = getattr(flat, name), np.asarray(flat.start_indices)
    lengths = np.asarray(flat.end_indices) - starts
    if len(lengths) and (lengths == lengths[0]).all():
        return np.asarray(values, dtype=np.float64).reshape(len(lengths), lengths[0])
    return [values[start:end] for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]

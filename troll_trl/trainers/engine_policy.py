"""The engine's distribution as the old policy: vLLM lists likely tokens, and the rollout batch gets its answers."""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from troll_trl.kernels.support import mass_rule
from troll_trl.trainers.engine_rows import NO_LOG_PROB, SampledLogProb, check_tokens, read_answer, rows_of, sparse_of
from troll_trl.trainers.old_policy import OLD_POLICY_KEY, TRL_OLD_LOG_PROBS, OldPolicyCache, Pass
from troll_trl.trainers.trust_region_model import snap_to_reference
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.sparse import UNUSED, SparseDistribution

logger = get_logger(__name__)


class EngineOldPolicyCache(OldPolicyCache):
    """
    A [`~troll_trl.trainers.old_policy.OldPolicyCache`] of the engine's distribution, with the same `selection`. No pass
    scores the rollout: if TRL asks for one, the cache answers with the engine's numbers. TRL's `generation`, a
    `VLLMGeneration`, asks vLLM for the most likely tokens, too.
    """

    own_pass = Pass.ENGINE

    def __init__(self, accelerator: Accelerator, generation: Any, *selection: Any):
        super().__init__(*selection)
        self.accelerator = accelerator
        self.answered: list[list[SampledLogProb]] = []  # the answers for the completions that the engine sampled last
        self._rows: list[np.ndarray] = []  # `(T, 2K)` of each completion of the rollout batch
        ask_for_likely_tokens(generation, self)

    def keep(
        self,
        completion_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float | None]],
        tool_mask: Sequence[Sequence[int]] | None,
    ) -> None:
        """The rollout as TRL generated it: completions, the engine's numbers for their tokens, and 0 in `tool_mask` for
        tokens of tools."""
        masks = [[1] * len(ids) for ids in completion_ids] if tool_mask is None else tool_mask
        self._rows = []
        for number, (ids, values, mask) in enumerate(zip(completion_ids, log_probs, masks, strict=True)):
            if not len(ids) == len(values) == len(mask):
                raise ValueError(
                    f"Completion {number} of {len(ids)} tokens comes with {len(values)} log-probabilities and a mask "
                    f"of {len(mask)} numbers. Give one of each for every token."
                )
            check_tokens(values, mask, ids, f"completion {number}")
            self._rows.append(rows_of(values, mask, max(self.support_size, 1)))

    def log_probs(self, length: int) -> torch.Tensor:
        """The engine's log-probabilities of the completions, padded to `(B, length)` float32; NaN if unknown."""
        padded = np.zeros((len(self._rows), length), dtype=np.float32)
        for values, rows in zip(padded, self._rows, strict=True):
            values[: len(rows)] = rows[:, 0]
        return torch.from_numpy(padded).to(self.accelerator.device)

    def answer(self, completion_length: int) -> torch.Tensor:
        self._log_probs = answer = self.log_probs(completion_length).nan_to_num(0.0)
        return answer

    def snap_to_old_policy(self, log_probs: torch.Tensor) -> torch.Tensor:
        own = self.log_probs(log_probs.shape[1])
        return snap_to_reference(log_probs, own).masked_fill(own.isnan(), 0.0)  # as in `answer`

    def add_to(self, batch: dict[str, Any]) -> int:
        """Add the old policy to a rollout batch. A token whose old policy is unknown leaves the loss and the counts of
        the batch. Returns the number of these tokens, over all ranks; `nothing_scored` says whether there are no
        others. Every rank must call this."""
        self._log_probs = None
        log_probs = self.log_probs(batch["completion_ids"].shape[1])  # (B, C)
        trained, known = batch["completion_mask"] * batch.get("tool_mask", 1), ~log_probs.isnan()  # (B, C)
        unknown = self.accelerator.reduce(torch.stack([(trained * ~known).sum(), trained.sum()]), reduction="sum")
        count, tokens = unknown.tolist()
        self.nothing_scored = 0 < count == tokens
        if count:
            logger.warning(
                f"For {count} of {tokens} tokens of a rollout batch, the engine gave no log-probability, NaN, "
                f"{NO_LOG_PROB:g}, or too few of the most likely tokens. The loss leaves these tokens out; "
                "`troll/unscored_tokens` counts them."
            )
            batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * known
            if "num_items_in_batch" in batch:
                batch["num_items_in_batch"] = batch["num_items_in_batch"] - count
        batch[TRL_OLD_LOG_PROBS] = log_probs.nan_to_num(0.0)
        if self.support_size:
            loss_mask = (trained * known).bool().cpu()
            batch[OLD_POLICY_KEY] = [*map(self._pack, self._rows, batch["completion_ids"].cpu(), loss_mask)]
        return count

    def _pack(self, rows: np.ndarray, sampled: torch.Tensor, loss_mask: torch.Tensor) -> RaggedDistribution:
        """The old policy of a completion `(C,)` at the positions of `loss_mask` `(C,)`, with as few tokens as the
        trainer's."""
        old, masked = sparse_of(torch.from_numpy(rows), sampled[: len(rows)]), ~loss_mask[: len(rows), None]
        own, others, rest = old.log_probs.split([1, self.support_size - 1, 1], 1)
        dropped = ~mass_rule(own, others, self.tail_mass)  # they join the rest
        rest = torch.cat([rest, others.masked_fill(~dropped, -torch.inf)], 1).logsumexp(1, keepdim=True)
        log_probs = torch.cat([own, others.masked_fill(dropped, -torch.inf), rest], 1)
        token_ids = old.token_ids.masked_fill(torch.cat([masked, dropped | masked], 1), UNUSED)
        return RaggedDistribution.pack(SparseDistribution(token_ids[None], log_probs[None]))


def ask_for_likely_tokens(generation: Any, recorder: EngineOldPolicyCache) -> None:
    """
    Have TRL's `VLLMGeneration` ask for the most likely tokens, and answer with [`SampledLogProb`]s in place of numbers.

    In colocate mode vLLM's flat lists are read directly, because TRL sorts an object for every listed token. Without
    `detokenize` vLLM decodes none of them to text.
    """
    generation.logprobs = others = max(recorder.support_size - 1, 0)  # vLLM lists this number, and the sampled token
    answer = generation.generate
    # The completions that vLLM has sampled, while TRL generates, each with its flat list
    taken: list[tuple[Sequence[int], Any]] | None = None
    if generation.mode == "colocate":
        llm = generation.llm
        config = llm.llm_engine.model_config
        if 0 <= config.max_logprobs < others:
            config.max_logprobs = others
        sample = llm.generate
        text = {"detokenize": False} if not generation.generation_kwargs.get("stop") else {}
        generation.generation_kwargs = {"flat_logprobs": True, **text, **generation.generation_kwargs}

        def sample_and_take(*args, **kwargs):
            outputs = sample(*args, **kwargs)
            for completion in chain.from_iterable(output.outputs for output in outputs):
                # A rollout function that asks vLLM itself gets what vLLM says
                if taken is not None and hasattr(completion.logprobs, "start_indices"):
                    taken.append((completion.token_ids, completion.logprobs))
                    completion.logprobs = None  # TRL reads none
            return outputs

        llm.generate = sample_and_take

    def generate(*args, **kwargs):
        nonlocal taken
        flat: list[tuple[Sequence[int], Any]] = []
        taken = flat
        try:
            prompt_ids, completion_ids, log_probs, ids = answer(*args, **kwargs)
        finally:
            taken = None
        listed = _flat_lists(completion_ids, flat) if flat else _nested_lists(len(completion_ids), ids, log_probs)
        recorder.answered = [
            read_answer(sampled, *lists, others) for sampled, lists in zip(completion_ids, listed, strict=True)
        ]
        return prompt_ids, completion_ids, [[[value] for value in row] for row in recorder.answered], None

    generation.generate = generate


_Lists = tuple[Sequence[int], Sequence[int], Sequence[float | None]]  # a completion's counts, ids, log-probabilities


def _flat_lists(completion_ids: Sequence[Sequence[int]], flat: Sequence[tuple[Sequence[int], Any]]) -> list[_Lists]:
    """vLLM's `flat` lists of this rank's completions. Ranks that share an engine sample together, and the completions
    of each rank are neighbours. Their tokens are in the lists that vLLM made, or in copies."""
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
            "completions that vLLM sampled. Nothing else connects them to vLLM's log-probabilities. This TRL was not "
            "tested: set `flat_logprobs` to False in `generation_kwargs`, or use `old_policy='trainer'`."
        )
    return [([*map(operator.sub, x.end_indices, x.start_indices)], x.token_ids, x.logprobs) for _, x in found[0]]


def _nested_lists(completions: int, ids: Any, log_probs: Any) -> list[_Lists]:
    """The same from TRL's lists of ids and of log-probabilities, which have a list for each position of each
    completion."""
    if ids is None or log_probs is None:
        raise ValueError("vLLM answered without the ids or log-probabilities of likely tokens. See docs/vllm.md.")
    if not completions == len(ids) == len(log_probs):
        raise ValueError(
            f"vLLM sampled {completions} completions, and gave the ids of likely tokens for {len(ids)} and "
            f"log-probabilities for {len(log_probs)} of them."
        )
    for number, (rows, values) in enumerate(zip(ids, log_probs, strict=True)):
        if (counts := [*map(len, rows)]) != (given := [*map(len, values)]):
            raise ValueError(
                f"In completion {number}, vLLM gave {sum(counts)} ids at {len(counts)} positions and {sum(given)} "
                f"log-probabilities at {len(given)}. Each id needs a log-probability at its position."
            )
    return [([*map(len, row)], [*chain(*row)], [*chain(*x)]) for row, x in zip(ids, log_probs, strict=True)]

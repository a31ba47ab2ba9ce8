"""
The engine's distribution is the old policy: vLLM's answer for every token, and its way to the loss.

A sample's `old_log_probs` has a row of numbers for each token instead of one number; see
[`~troll_trl.trainers.engine_rows`]. TRL's own collator then packs the rows in the order of the loss, and scatters
them over the ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample

from troll_trl.experimental.async_grpo.worker import WatchedRolloutLoop
from troll_trl.trainers.engine_rows import SampledLogProb, check_tokens, make_rows, read_answer, rows_of
from troll_trl.trust_region.sparse import UNUSED

Likely = Mapping[int, float]  # log-probability of tokens by id


def sample_log_probs(
    completion_mask: Sequence[int], log_probs: Sequence[float], others: Sequence[Likely], support_size: int
) -> np.ndarray:
    """
    The `old_log_probs` of a sample with supports. A rollout worker of your own calls it for every sample.

    Args:
        completion_mask (`Sequence[int]` of length `T`):
            1 for the tokens that are trained on. The numbers of all other tokens are not read.
        log_probs (`Sequence[float]` of length `T`):
            The engine's log-probability of every sampled token.
        others (`Sequence[Mapping[int, float]]` of length `T`):
            The engine's log-probabilities of the K − 1 most likely other tokens, by id.
        support_size (`int`):
            K, as in the config. Fewer than K − 1 others leave slots unused.

    Returns:
        `np.ndarray` of shape `(T, 2K)`, float32.

    Raises:
        ValueError: the lengths differ, or a token that is trained on has more than K − 1 others.
    """
    if not len(completion_mask) == len(log_probs) == len(others):
        raise ValueError(
            f"`completion_mask` has {len(completion_mask)} tokens, `log_probs` {len(log_probs)} and `others` "
            f"{len(others)}. Give each of them one entry for every token of the sample."
        )
    ids = np.full((len(log_probs), support_size - 1), UNUSED)
    values = np.full((len(log_probs), support_size), -np.inf)
    for place, (is_trained, value, likely) in enumerate(zip(completion_mask, log_probs, others, strict=True)):
        if not is_trained:
            continue
        if len(likely) >= support_size:
            raise ValueError(
                f"`others` has {len(likely)} tokens at position {place}, expected at most {support_size - 1}."
            )
        ids[place, : len(likely)] = [*likely]
        values[place, : len(likely) + 1] = [value, *likely.values()]
    rows = make_rows(values, ids)
    rows[np.asarray(completion_mask) == 0] = 0.0
    return rows


class EngineRolloutLoop(WatchedRolloutLoop):
    """TRL's rollout loop, which also asks vLLM for the most likely tokens (`_post`) and keeps them in the samples
    (`_score_group`)."""

    def __init__(self, *, support_size: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.support_size = support_size

    async def _post(self, path: str, payload: dict, timeout: float, *args: Any, **kwargs: Any) -> dict:
        if not path.endswith("/completions"):
            return await super()._post(path, payload, timeout, *args, **kwargs)
        others = self.support_size - 1
        payload = {**payload, "logprobs": others, "return_tokens_as_token_ids": True}
        answer = await super()._post(path, payload, timeout, *args, **kwargs)
        for choice in answer["choices"]:
            choice["logprobs"] = {"token_logprobs": log_probs_of_answer(choice, others)}
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        sequences = chain.from_iterable(group.completions_sequences)  # in TRL's order of the samples
        for sample, sequence in zip(samples, sequences, strict=True):
            tokens = sample.input_ids.tolist()
            check_tokens(
                sequence.old_log_probs, sequence.completion_mask, tokens, f"a sample of group {sample.group_id}"
            )
            sample.old_log_probs = rows_of(sequence.old_log_probs, sequence.completion_mask, self.support_size)
        return samples


def log_probs_of_answer(choice: dict[str, Any], others: int) -> list[SampledLogProb]:
    """The log-probability of every token of an answer, and of the `others` most likely tokens there; NaN if the answer
    lacks one."""
    said = choice.get("logprobs") or {}
    # Either may be shorter than the answer
    values, top = (chain(said.get(name) or [], repeat(None)) for name in ("token_logprobs", "top_logprobs"))
    tokens, listed = choice["token_ids"], []
    for token, value, likely in zip(tokens, values, top, strict=False):
        by_id = {int(name.removeprefix("token_id:")): number for name, number in (likely or {}).items()}
        listed.append(by_id | {token: value})
    values = chain.from_iterable(row.values() for row in listed)
    return read_answer(tokens, [*map(len, listed)], [*chain(*listed)], [*values], others)

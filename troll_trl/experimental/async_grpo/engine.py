"""
The engine's distribution is the old policy: vLLM's answer for every token, and its way to the loss.

A sample's `old_log_probs` has a row of numbers for each token instead of one number. TRL's own collator then packs the
rows in the order of the loss, and scatters them over the ranks. With a support of K tokens a row has `2K` float32:

    log q(a) of the sampled token,  K − 1 of the others,  log of the rest,  K − 1 ids of the others

A float32 holds ids below 2²⁴ exactly. An unused slot has log-probability −∞ and id −1. The mass of the rest is `1 − Σ`
of the kept tokens, good to about 1e-7, and no less than `REST_FLOOR`. If the engine's answer for a token is incomplete,
its row is NaN.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample

from troll_trl.experimental.async_grpo.worker import WatchedRolloutLoop
from troll_trl.trainers.engine_policy import SampledLogProb, old_policy_rows, read_answer

Likely = Mapping[int, float]  # log-probability of tokens by id


def sample_log_probs(
    completion_mask: Sequence[int], log_probs: Sequence[float], others: Sequence[Likely], support_size: int
) -> np.ndarray:
    """
    The `old_log_probs` of a sample with supports. A rollout worker of your own calls it for every sample.

    Args:
        completion_mask (`Sequence[int]` of length `T`):
            1 for the tokens that are trained on. What the others have is not read.
        log_probs (`Sequence[float]` of length `T`):
            The engine's log-probability of every sampled token.
        others (`Sequence[Mapping[int, float]]` of length `T`):
            The engine's log-probabilities of the K − 1 most likely other tokens, by id.
        support_size (`int`):
            K, as in the config. Fewer than K − 1 others leave slots unused.

    Returns:
        `np.ndarray` of shape `(T, 2K)`, float32.
    """
    carrying = [
        SampledLogProb(log_prob, [*likely], [*likely.values()])
        for log_prob, likely in zip(log_probs, others, strict=True)
    ]
    return _rows(completion_mask, carrying, support_size)


def _rows(completion_mask: Sequence[int], log_probs: Sequence[float], support_size: int) -> np.ndarray:
    """As [`sample_log_probs`], of numbers that carry the most likely other tokens."""
    ids, numbers, rest = old_policy_rows(log_probs, completion_mask, support_size - 1)
    rows = np.concatenate([numbers, rest[:, None], ids], 1).astype(np.float32)
    rows[np.isnan(numbers[:, 0])] = np.nan
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
            sample.old_log_probs = _rows(sequence.completion_mask, sequence.old_log_probs, self.support_size)
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
        # vLLM lists the sampled token too, and one token more if that is not among the most likely
        listed.append({token: value if len(by_id) >= others else None} | by_id | {token: value})
    return read_answer(tokens, [[*row] for row in listed], [[*row.values()] for row in listed], others)

"""
The engine's distribution is the old policy: vLLM's answer for every token, and its way to the loss.

A sample's `old_log_probs` has a row of numbers for each token instead of one number. TRL's own collator then packs the
rows in the order of the loss, and scatters them over the ranks. With a support of K tokens a row has `2K` float32:

    log q(a) of the sampled token,  K − 1 of the others,  log of the rest,  K − 1 ids of the others

A float32 holds ids below 2²⁴ exactly. An unused slot has log-probability −∞ and id −1. The mass of the rest is `1 − Σ`
of the kept tokens, good to about 1e-7, and no less than `REST_FLOOR`. If the engine's answer for a token is incomplete,
its row is NaN.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample

from troll_trl.experimental.async_grpo.worker import WatchedRolloutLoop

# Smallest mass of the rest. Rounding of the engine's float32 makes `1 − Σ` of a peaked distribution anything from −1e-7
# to 1e-7. At 0 the projection would forbid the rest; a floor costs a policy inside the bound at most 1e-6 nats. If the
# policy has less there, the trainer lowers the floor to it: KL(q‖p) of the masks would count up to all of `−log p`.
REST_FLOOR = 1e-6
# What vLLM writes in place of −∞
NO_LOG_PROB = -9999.0

Likely = Mapping[int, float]  # log-probability of tokens by id


class SampledLogProb(float):
    """Log-probability of a sampled token, which carries those of the most likely `others` through TRL's turns."""

    others: Likely

    def __new__(cls, value: float, others: Likely):
        self = super().__new__(cls, value)
        self.others = others
        return self


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
    rows = np.zeros((len(log_probs), 2 * support_size), dtype=np.float32)
    for row, trained, log_prob, likely in zip(rows, completion_mask, log_probs, others, strict=True):
        if trained:
            row[:] = _row(log_prob, likely, support_size)
    return rows


def _row(log_prob: float, others: Likely, support_size: int) -> list[float]:
    numbers = [log_prob, *others.values()]
    if any(math.isnan(number) or number <= NO_LOG_PROB for number in numbers):
        return [math.nan] * (2 * support_size)
    unused = support_size - 1 - len(others)
    rest = max(1.0 - math.fsum(map(math.exp, numbers)), REST_FLOOR)
    return [*numbers, *[-math.inf] * unused, math.log(rest), *others, *[-1.0] * unused]


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
            others = [getattr(log_prob, "others", {}) for log_prob in sequence.old_log_probs]
            sample.old_log_probs = sample_log_probs(
                sequence.completion_mask, sequence.old_log_probs, others, self.support_size
            )
        return samples


def check_server(client: Any, support_size: int | None) -> None:
    """Wait for the server of TRL's `client`. A `ValueError` says that its answers will have log-probabilities before
    the temperature, or too few for a support of `support_size` tokens."""
    client.wait_for_server_ready()
    model = client.get_server_info()["model_config"]
    mode, most, needed = model["logprobs_mode"], model["max_logprobs"], (support_size or 1) - 1
    if mode != "processed_logprobs" or 0 <= most < needed:  # -1: as many as asked for
        raise ValueError(
            f"The vLLM server at {client.server_url} runs with `--logprobs-mode {mode}` and `--max-logprobs {most}`: "
            "its log-probabilities are from before the temperature, or too few for `support_size`. Start it with "
            f"`--logprobs-mode processed_logprobs --max-logprobs {max(needed, 20)}`."
        )


def log_probs_of_answer(choice: dict[str, Any], others: int) -> list[SampledLogProb]:
    """The log-probability of every token of an answer, and of the `others` most likely tokens there; NaN if the answer
    lacks one."""
    said = choice.get("logprobs") or {}
    # Either may be shorter than the answer
    values, top = (chain(said.get(name) or [], repeat(None)) for name in ("token_logprobs", "top_logprobs"))
    result = []
    for token, value, listed in zip(choice["token_ids"], values, top, strict=False):
        likely = {int(name.removeprefix("token_id:")): number for name, number in (listed or {}).items()}
        complete = value is not None and None not in likely.values() and len(likely) >= others
        likely.pop(token, None)
        # vLLM lists the sampled token too, and one token more where that is not among the most likely
        kept = sorted(likely.items(), key=lambda item: item[1], reverse=True)[:others] if complete else []
        result.append(SampledLogProb(value if complete else math.nan, dict(kept)))
    return result

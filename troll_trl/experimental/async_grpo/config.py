"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from math_answers.settings import setting
from troll_trl.fields import document
from troll_trl.trainers.config import MaskOptions
from troll_trl.trainers.vllm import check_sampling


@document
@dataclass
class AsyncTrollGRPOConfig(MaskOptions, AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`, and the following. The old
    policy is the engine's distribution.

    `epsilon` and `epsilon_high` have an effect only if `trust_region` is 'penalty': another trust region replaces the
    clip.

    Raises:
        ValueError: an option is outside of its range, or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an
            effect. The message has the value and the reason.
    """

    support_size: int | None = setting(
        20,
        "Keep at most this number K ≥ 1 of tokens per position, including the sampled one. The trainer asks the engine "
        "for the K − 1 most likely tokens. All remaining tokens share one rest bucket. vLLM returns up to 20 unless "
        "the server was started with `--max-logprobs`.",
    )

    def _check(self) -> list[str]:
        messages = super()._check()
        check_sampling(vars(self), engine_is_old_policy=True)
        return messages

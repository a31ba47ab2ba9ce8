"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from math_answers.settings import setting
from troll_trl.fields import document
from troll_trl.trainers.config import TrustRegionOptions
from troll_trl.trainers.vllm import check_sampling


@document
@dataclass
class AsyncTrollGRPOConfig(TrustRegionOptions, AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`, and the following. The old
    policy is the engine's distribution. TRL's rollout worker carries the sampled token's log-probability of it and
    nothing else, so no trust region can keep a support here.

    `epsilon` and `epsilon_high`, the clip range of an existing recipe, have no effect: the trust region replaces the
    clip.

    Raises:
        ValueError: an option is outside of its range; the trust region needs a support, as 'projection' and
            `divergence_type` 'topk_kl' do; or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an effect. The
            message has the value and the reason.
    """

    trust_region: str = setting(
        "mask",
        "'mask' for DPPO: it drops the gradient of a token that has moved with its advantage farther than "
        "`divergence_bound`. 'penalty' for TROLL's pull alone: the ratio has no limit, and `regression_coef` times "
        "TROLL's regression on two outcomes acts on tokens outside of `kl_bound`. Or the import path of your own whose "
        "`needs_support` is False, such as my_lib.MyRegion.",
    )

    def _prepare(self) -> None:
        # TRL leaves `None` out of its requests, and vLLM takes the model's generation_config.json's
        self.min_p: float | None = self.min_p or 0.0
        super()._prepare()

    def _check(self) -> list[str]:
        check_sampling(vars(self))
        messages = super()._check()
        if self.make_trust_region().needs_support:
            name = "divergence_type" if self.penalizes else "trust_region"
            raise ValueError(
                f"`{name}={getattr(self, name)}` is not supported in asynchronous training: it compares several tokens "
                "of each distribution, and TRL's rollout worker carries the log-probability of the sampled token "
                "alone. Use `trust_region='mask'`, or 'penalty' with `divergence_type='binary_kl'`."
            )
        return messages

"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from troll_trl.fields import setting
from troll_trl.trainers.config import TrustRegionOptions
from troll_trl.trainers.vllm import check_sampling


@dataclass
class AsyncTrollGRPOConfig(TrustRegionOptions, AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`; `trust_region`, by default
    'mask'; and `divergence_type`, `divergence_bound`, `ratio_cap`, `kl_bound` and `regression_coef` of
    [`~troll_trl.TrollGRPOConfig`]. The old policy is the engine's distribution. TRL's rollout worker returns only the
    log-probability of the sampled token, so no trust region can keep a support here: not the projection, and not
    `divergence_type` 'topk_kl'. `epsilon` and `epsilon_high` have no effect: the trust region replaces the clip.

    Raises:
        ValueError: an option is outside of its range; the trust region needs a support, as 'projection' and
            `divergence_type` 'topk_kl' do; or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an effect. The
            message states the value and the reason.
    """

    trust_region: str = setting(
        "mask",
        "'mask': DPPO, which gives no gradient to a token that has moved farther than `divergence_bound` in its "
        "advantage's direction. 'penalty': only TROLL's regression, over two outcomes, on tokens beyond `kl_bound`; "
        "nothing limits the probability ratio. For your own trust region, whose `needs_support` must be False, give "
        "its import path, such as my_lib.MyRegion.",
    )

    def _prepare(self) -> None:
        # TRL omits `None` from its requests, and vLLM then takes the value of the model's generation_config.json
        self.min_p: float | None = self.min_p or 0.0
        super()._prepare()

    def _check(self) -> list[str]:
        check_sampling(vars(self))
        messages = super()._check()
        if self.region.needs_support:
            name = "divergence_type" if self.trust_region == "penalty" else "trust_region"
            raise ValueError(
                f"`{name}={getattr(self, name)}` is not supported in asynchronous training: it compares several tokens "
                "of each distribution, but TRL's rollout worker returns only the log-probability of the sampled token. "
                "Use `trust_region='mask'`, or 'penalty' with `divergence_type='binary_kl'`."
            )
        return messages

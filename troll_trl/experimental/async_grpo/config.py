"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from troll_trl.fields import setting
from troll_trl.trainers.config import TrustRegionOptions
from troll_trl.trainers.vllm import check_sampling


@dataclass
class AsyncTrollGRPOConfig(TrustRegionOptions, AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`, and the following. The old
    policy is the engine's distribution. TRL's rollout worker returns only the log-probability of the sampled token, so
    no trust region can keep a support here: `support_size`, 'topk_kl' and what the entries below say about the
    projection do not apply.

    `epsilon` and `epsilon_high`, the clip range of an existing recipe, have no effect: the trust region replaces the
    clip.

    Args:
        trust_region (`str`, *optional*, defaults to `'mask'`):
            'mask' for DPPO: a token that has moved farther than `divergence_bound` in the direction of its advantage
            has no gradient. 'penalty' for TROLL's regression alone, on two outcomes and on tokens outside of
            `kl_bound`: nothing limits the ratio. Or the import path of your own whose `needs_support` is False, such as
            my_lib.MyRegion.
        divergence_type (`str | None`, *optional*):
            For the mask: 'binary_tv', |p(a) − q(a)| (default), or 'binary_kl', KL(q‖p). For the penalty: 'binary_kl',
            KL(p‖q) (default), or 'topk_kl', KL(p‖q) over the kept tokens and the rest. p is the policy, q the old
            policy. The binary ones compare two outcomes, the sampled token a and all others.
        divergence_bound (`float | None`, *optional*):
            Largest divergence at which the mask keeps a token's gradient. For a total variation: in (0, 1), by default
            0.15. For a KL: positive, in nats, by default 0.05.
        ratio_cap (`float | None`, *optional*):
            Cap C ≥ 1 on the ratio by which the mask scales a gradient: min(p(a)/q(a), C). By default, none.
        kl_bound (`float | str | None`, *optional*, defaults to `'auto'`):
            Bound ε > 0, in nats. The projection keeps KL(π‖q) ≤ ε for every token's projected policy π and old policy
            q. The penalty acts on tokens with KL(p‖q) > ε; with 0, on every token that has moved. inf means no bound.
            'auto' is the paper's 0.05. For GRPO's projection with n > 8 optimizer updates per rollout batch (all
            completions of one generation), it is 0.05·(n/8)², at most 0.8.
        regression_coef (`float`, *optional*, defaults to `1.0`):
            Weight α ≥ 0 of the regression KL(p ‖ stopgrad π), which moves the policy p towards its projection π.
        support_size (`int | None`, *optional*):
            Keep at most K ≥ 1 tokens per position, the sampled one included. All others share one rest bucket with
            their exact mass. By default 64, or 20 with `old_policy` 'engine'.

    Raises:
        ValueError: an option is outside of its range; the trust region needs a support, as 'projection' and
            `divergence_type` 'topk_kl' do; or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an effect. The
            message states the value and the reason.
    """

    trust_region: str = setting(
        "mask",
        "'mask' for DPPO: a token that has moved farther than `divergence_bound` in the direction of its "
        "advantage has no gradient. 'penalty' for TROLL's regression alone, on two outcomes and on tokens "
        "outside of `kl_bound`: nothing limits the ratio. Or the import path of your own whose `needs_support` "
        "is False, such as my_lib.MyRegion.",
    )

    def _prepare(self) -> None:
        # TRL omits `None` from its requests, and vLLM then takes the value of the model's generation_config.json
        self.min_p: float | None = self.min_p or 0.0
        super()._prepare()

    def _check(self) -> list[str]:
        check_sampling(vars(self))
        messages = super()._check()
        if self.region.needs_support:
            name = "divergence_type" if self.uses_penalty else "trust_region"
            raise ValueError(
                f"`{name}={getattr(self, name)}` is not supported in asynchronous training: it compares several tokens "
                "of each distribution, but TRL's rollout worker returns only the log-probability of the sampled token. "
                "Use `trust_region='mask'`, or 'penalty' with `divergence_type='binary_kl'`."
            )
        return messages

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
            'mask' for DPPO: it drops the gradient of a token that has moved farther than `divergence_bound` in the
            direction of its advantage. 'penalty' for TROLL's regression alone, on two outcomes: it acts on tokens
            outside of `kl_bound`, weighted by `regression_coef`, and nothing limits the ratio. Or the import path of
            your own trust region whose `needs_support` is False, such as my_lib.MyRegion.
        divergence_type (`str | None`, *optional*):
            'binary_kl' is KL(q‖p) in the mask and KL(p‖q) in the penalty, with the policy p and the old policy q. The
            mask's default is 'binary_tv', which is |p(a) − q(a)|. Both compare two outcomes, the sampled token a and
            all others, and cost as little as a clip. The penalty's default is 'binary_kl'; the penalty also takes
            'topk_kl', which is KL(p‖q) over the kept tokens and the rest.
        divergence_bound (`float | None`, *optional*):
            Largest divergence at which the mask keeps a token's gradient. For a total variation: in (0, 1), by default
            0.15. For a KL: positive, in nats, by default 0.05.
        ratio_cap (`float | None`, *optional*):
            Cap C ≥ 1 on the ratio by which the mask scales a gradient: min(p(a)/q(a), C). By default there is none.
        kl_bound (`float | str | None`, *optional*, defaults to `'auto'`):
            Bound ε, in nats: the projection keeps KL(π‖q) ≤ ε for every token's projected policy π and old policy q,
            and the penalty acts on tokens with KL(p‖q) > ε. It must be positive. The penalty also takes 0, and then
            acts on every token that has moved; inf switches the bound off. 'auto' becomes the paper's 0.05, except for
            GRPO's projection with n > 8 optimizer updates per rollout batch, for which it becomes 0.05·(n/8)², at most
            0.8. A rollout batch is TRL's generation batch: all completions of one generation.
        regression_coef (`float`, *optional*, defaults to `1.0`):
            Weight α ≥ 0 of the regression KL(p ‖ stopgrad π), which moves the policy p towards its projection π.
        support_size (`int | None`, *optional*):
            Keep at most K ≥ 1 tokens per position, including the sampled one. All other tokens share one
            rest bucket with their exact mass. By default 64; 20 if the old policy is the engine's.

    Raises:
        ValueError: an option is outside of its range; the trust region needs a support, as 'projection' and
            `divergence_type` 'topk_kl' do; or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an effect. The
            message states the value and the reason.
    """

    trust_region: str = setting(
        "mask",
        "'mask' for DPPO: it drops the gradient of a token that has moved farther than `divergence_bound` in the "
        "direction of its advantage. 'penalty' for TROLL's regression alone, on two outcomes: it acts on tokens "
        "outside of `kl_bound`, weighted by `regression_coef`, and nothing limits the ratio. Or the import path of "
        "your own trust region whose `needs_support` is False, such as my_lib.MyRegion.",
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

"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

import warnings
from dataclasses import dataclass, field, fields

from trl.experimental.async_grpo import AsyncGRPOConfig

from troll_trl.trainers.config import TrollGRPOConfig, check_mask, check_projection
from troll_trl.trust_region.mask import needs_support
from troll_trl.trust_region.sparse import check_support_options

# Options with which the engine samples from another distribution than the policy's, and the values that have no effect
_CHANGES_THE_DISTRIBUTION = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
_HELP = {option.name: dict(option.metadata) for option in fields(TrollGRPOConfig)}


@dataclass
class AsyncTrollGRPOConfig(AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`, and those below.

    `epsilon` and `epsilon_high` are accepted and unused: the trust region replaces the clip.

    Parameters:
        trust_region (`str`, *optional*, defaults to `"projection"`):
            `"projection"` for TROLL's, `"mask"` for DPPO's.
        kl_bound (`float`, *optional*, defaults to `0.05`):
            KL bound ε of every token's trust region around the engine's distribution, in nats.
        regression_coef (`float`, *optional*, defaults to `1.0`):
            Weight α ≥ 0 of the regression term `KL(p ‖ stopgrad π)`.
        support_size (`int`, *optional*, defaults to `20`):
            Number K of tokens that are kept per position, the sampled token included: the engine is asked for the
            K − 1 most likely ones. All others share one rest bucket. vLLM answers with up to 20 unless the server is
            started with `--max-logprobs`.
        divergence_type (`str`, *optional*, defaults to `"binary_tv"`):
            Divergence of the mask: `"binary_tv"` or `"binary_kl"`, which need no support, `"topk_tv"` or `"topk_kl"`.
        divergence_bound (`float`, *optional*, defaults to `0.15` for a total variation, `0.05` for a KL):
            Largest divergence of a token that keeps its gradient.
        ratio_cap (`float`, *optional*):
            Largest ratio C ≥ 1 by which the mask scales a gradient. No limit by default.

    Raises:
        ValueError: an option outside of its range, or `top_p`, `top_k`, `min_p` or `repetition_penalty` with a value
            that has an effect, with the value and the reason.
    """

    trust_region: str = field(default="projection", metadata=_HELP["trust_region"])
    kl_bound: float = field(default=0.05, metadata=_HELP["kl_bound"])
    regression_coef: float = field(default=1.0, metadata=_HELP["regression_coef"])
    support_size: int = field(
        default=20,
        metadata={
            "help": "Number of tokens kept per position, the sampled token included; the engine is asked for the "
            "others, and what they leave is one rest bucket."
        },
    )
    divergence_type: str = field(default="binary_tv", metadata=_HELP["divergence_type"])
    divergence_bound: float | None = field(default=None, metadata=_HELP["divergence_bound"])
    ratio_cap: float | None = field(default=None, metadata=_HELP["ratio_cap"])

    def __post_init__(self):
        super().__post_init__()
        check_projection(self)
        check_mask(self)
        check_support_options(self.support_size, tail_mass=0.0)
        for name, without_effect in _CHANGES_THE_DISTRIBUTION.items():
            if getattr(self, name) not in without_effect:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` is not supported: the engine then samples from another "
                    "distribution than the policy's, and a trust region around it would bound the policy by tokens "
                    f"that it may not lose. Set `{name}` to {without_effect[0]}."
                )
        defaults = {option.name: option.default for option in fields(AsyncGRPOConfig)}
        epsilons = {name: getattr(self, name) for name in ("epsilon", "epsilon_high")}
        unused = [f"{name}={value}" for name, value in epsilons.items() if value != defaults[name]]
        if unused and self.process_index == 0:
            warnings.warn(f"{', '.join(unused)} unused: the trust region takes the place of the clip.", stacklevel=3)

    @property
    def masks(self) -> bool:
        """Whether the trust region is a mask, and not the projection."""
        return self.trust_region == "mask"

    @property
    def needs_support(self) -> bool:
        """Whether the trust region reads more of the engine's distribution than the sampled token."""
        return not self.masks or needs_support(self.divergence_type)

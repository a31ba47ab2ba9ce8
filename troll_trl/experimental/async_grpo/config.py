"""AsyncTrollGRPOConfig: TRL's asynchronous config with the options of a trust region."""

import warnings
from dataclasses import dataclass, fields

from trl.experimental.async_grpo import AsyncGRPOConfig

from troll_trl.fields import document, setting
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import TrollGRPOConfig, check_mask
from troll_trl.trainers.trl_compat import silence_known_warnings
from troll_trl.trust_region.mask import needs_support
from troll_trl.trust_region.sparse import check_support_options

# Options with which the engine samples from another distribution than the policy's, and the values that have no effect
_CHANGES_THE_DISTRIBUTION = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
_HELP = {option.name: option.metadata.get("help", "") for option in fields(TrollGRPOConfig)}


@document
@dataclass
class AsyncTrollGRPOConfig(AsyncGRPOConfig):
    """
    Configuration of [`AsyncTrollGRPOTrainer`]: every parameter of TRL's `AsyncGRPOConfig`, and the following. The old
    policy is the engine's distribution.

    `epsilon` and `epsilon_high` have no effect: the trust region replaces the clip.

    Raises:
        ValueError: an option is outside of its range, or `top_p`, `top_k`, `min_p` or `repetition_penalty` has an
            effect. The message has the value and the reason.
    """

    trust_region: str = setting("projection", _HELP["trust_region"])
    kl_bound: float = setting(0.05, _HELP["kl_bound"])
    regression_coef: float = setting(1.0, _HELP["regression_coef"])
    support_size: int = setting(
        20,
        "Number K ≥ 1 of tokens kept per position, including the sampled one. The trainer asks the engine for the "
        "K − 1 most likely others. All remaining tokens share one rest bucket. vLLM returns up to 20 unless the server "
        "was started with `--max-logprobs`.",
    )
    divergence_type: str = setting("binary_tv", _HELP["divergence_type"])
    divergence_bound: float | None = setting(None, _HELP["divergence_bound"])
    ratio_cap: float | None = setting(None, _HELP["ratio_cap"])

    def __post_init__(self):
        silence_known_warnings()
        super().__post_init__()
        check_ranges(self)
        check_mask(self)
        check_support_options(self.support_size, tail_mass=0.0)
        for name, without_effect in _CHANGES_THE_DISTRIBUTION.items():
            if getattr(self, name) not in without_effect:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` is not supported: the engine then samples from another "
                    "distribution than the policy's, and the trust region would be around that one. "
                    f"Set `{name}` to {without_effect[0]}."
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

"""TrollGRPOConfig: TRL's GRPOConfig with the four options of TROLL, and what TROLL cannot honour refused by name."""

import copy
import math
import warnings
from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from troll_trl.sparse import check_support_options

SUPPORTED_LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")


@dataclass
class TrollGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`TrollGRPOTrainer`]: every parameter of [`~trl.GRPOConfig`], and four of TROLL's own.

    The defaults are the paper's (TROLL, arXiv 2510.03817). `epsilon` and `epsilon_high`, the clip range of an
    existing recipe, are accepted and unused: the projection replaces the clip.

    Parameters:
        kl_bound (`float`, *optional*, defaults to `0.05`):
            KL bound ε of every token's trust region, in nats: `KL(π‖q) ≤ ε` for the projected policy `π` and the old
            policy `q`. Positive; `inf` switches the projection off.
        regression_coef (`float`, *optional*, defaults to `1.0`):
            Weight α ≥ 0 of the regression term `KL(p ‖ stopgrad π)` that pulls the policy `p` to its projection.
        support_size (`int`, *optional*, defaults to `64`):
            Largest number K ≥ 1 of tokens kept per position, the sampled token included. All other tokens share one
            rest bucket with their exact mass.
        tail_mass (`float`, *optional*, defaults to `1e-5`):
            Tokens are kept by descending old probability until at most this mass δ in `[0, 1)` is left to the rest.

    Raises:
        ValueError: an option outside its range, or an inherited option that TROLL cannot honour (`loss_type` cispo,
            sapo or vespo; `delta`), with the value and the reason.
    """

    kl_bound: float = field(
        default=0.05,
        metadata={"help": "KL bound of every token's trust region around the old policy, in nats. Positive."},
    )
    regression_coef: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the regression term KL(p || stopgrad pi) that pulls the policy to its projection."
        },
    )
    support_size: int = field(
        default=64,
        metadata={
            "help": "Largest number of tokens kept per position, the sampled token included; the others share "
            "one rest bucket with their exact mass."
        },
    )
    tail_mass: float = field(
        default=1e-5,
        metadata={"help": "Tokens are kept by descending old probability until at most this mass is left to the rest."},
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_troll_options()
        self._refuse_options_of_other_surrogates()
        self._warn_of_unused_clip_range()

    @classmethod
    def from_grpo(cls, args: GRPOConfig) -> "TrollGRPOConfig":
        """
        A copy of a plain `GRPOConfig` with TROLL's defaults added, for scripts that swap only the trainer class.

        The instance is copied, not rebuilt: `GRPOConfig.__post_init__` has already run and would refuse the
        `steps_per_generation` that it derived itself.

        Raises:
            TypeError: a subclass of `GRPOConfig`, which may mean more than its fields.
        """
        if type(args) is not GRPOConfig:
            raise TypeError(f"`args` must be a TrollGRPOConfig or a plain GRPOConfig, got {type(args).__name__}.")
        config = copy.copy(args)
        config.__class__ = cls
        for option in troll_fields():
            setattr(config, option.name, option.default)
        config._refuse_options_of_other_surrogates()
        config._warn_of_unused_clip_range()
        return config

    @property
    def updates_per_rollout_batch(self) -> float:
        """Optimizer updates taken on one rollout batch (every completion counted `num_iterations` times)."""
        return self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps

    @property
    def trust_region_idle(self) -> bool:
        """
        Whether every update uses completions of the current weights, so that policy and old policy are equal and
        neither a clip nor a projection ever acts. It is TRL's own test for whether an old policy must be scored.
        """
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    def _check_troll_options(self):
        if not self.kl_bound > 0:  # also catches NaN
            raise ValueError(f"`kl_bound` must be positive, got {self.kl_bound}. The paper uses 0.05.")
        if not (self.regression_coef >= 0 and math.isfinite(self.regression_coef)):
            raise ValueError(f"`regression_coef` must be finite and at least 0, got {self.regression_coef}.")
        check_support_options(self.support_size, self.tail_mass)
        if not self.temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {self.temperature}: the logits are divided by it.")

    def _refuse_options_of_other_surrogates(self):
        if self.loss_type not in SUPPORTED_LOSS_TYPES:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` is not supported by TROLL, which replaces the clipped ratio by a "
                "projection: cispo, sapo and vespo are replacements of that ratio themselves. Choose one of "
                f"{', '.join(SUPPORTED_LOSS_TYPES)}, which differ in how tokens are averaged."
            )
        if self.delta is not None:
            raise ValueError(
                f"`delta={self.delta}` is not supported by TROLL: it is the upper limit of two-sided clipping, and "
                "TROLL does not clip. Remove it."
            )

    def _warn_of_unused_clip_range(self):
        defaults = {option.name: option.default for option in fields(GRPOConfig)}
        unused = [name for name in ("epsilon", "epsilon_high") if getattr(self, name) != defaults[name]]
        if unused and self.process_index == 0:
            values = ", ".join(f"{name}={getattr(self, name)}" for name in unused)
            warnings.warn(
                f"{values} unused: TROLL does not clip the ratio; its trust region is `kl_bound={self.kl_bound}`.",
                stacklevel=3,
            )


def troll_fields():
    """The dataclass fields that `TrollGRPOConfig` adds to `GRPOConfig`."""
    inherited = {option.name for option in fields(GRPOConfig)}
    return [option for option in fields(TrollGRPOConfig) if option.name not in inherited]

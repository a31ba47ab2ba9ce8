"""TRL's configs with TROLL's options added, and what TROLL cannot honour refused by name."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from troll_trl.resilience.input_checks import check_ranges, is_number
from troll_trl.trainers.trl_compat import silence_known_warnings
from troll_trl.trust_region.sparse import check_support_options

if TYPE_CHECKING:  # what stands behind the options
    from trl import GRPOConfig as _TrlConfig
else:
    _TrlConfig = object

SUPPORTED_LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")

# Options of TRL whose silent acceptance would lose a run, since another objective is trained than was asked for:
# prefixes of their names, whether they have an effect, and why not. What else a config may set to no effect is TRL's
# business.
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("epsilon",), lambda _: False, "TROLL does not clip the ratio; its trust region is `kl_bound`"),
    (("sapo_", "vespo_"), lambda _: False, "they belong to loss types that TROLL does not support"),
    (
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip", "vllm_importance_sampling_cap"),
        lambda args: not args.use_vllm or args.vllm_importance_sampling_correction,
        "`vllm_importance_sampling_correction` is off",
    ),
    (("ref_model_",), lambda args: args.sync_ref_model, "`sync_ref_model` is off"),
    (("use_bias_correction_kl",), lambda args: args.beta != 0.0, "`beta` is 0"),
    (("entropy_coef_", "entropy_target"), lambda args: args.use_adaptive_entropy, "`use_adaptive_entropy` is off"),
)


@dataclass
class TrollOptions(_TrlConfig):
    """
    The options of TROLL, which [`TrollGRPOConfig`] and [`TrollRLOOConfig`] add to TRL's and document.

    Raises:
        ValueError: an option outside its range, TRL's own included, with the value.
    """

    _trl_config: ClassVar[type]  # the config of TRL's that is extended

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
    pessimistic: bool = field(
        default=False,
        metadata={
            "help": "Take the smaller of the projection's and the policy's surrogate, as PPO takes the smaller of the "
            "clipped and the free: a token that has moved against its advantage keeps its gradient. Not in the paper."
        },
    )
    max_skipped_updates: int = field(
        default=20,
        metadata={"help": "Stop after this many updates in a row were skipped for a NaN or an infinity."},
    )
    save_rollouts: bool = field(
        default=True,
        metadata={"help": "Save an unfinished rollout batch with the checkpoint, to resume exactly where it was."},
    )

    def __post_init__(self):
        silence_known_warnings()
        check_ranges(self)  # before TRL, which divides by some of them
        super().__post_init__()
        self._check()

    @classmethod
    def from_trl(cls, args: Any) -> "TrollOptions":
        """
        A copy of TRL's plain config with TROLL's defaults added, for scripts that swap only the trainer class.

        The instance is copied, not rebuilt: TRL's `__post_init__` has already run and would refuse the
        `steps_per_generation` that it derived itself.

        Args:
            args ([`~trl.GRPOConfig`] for [`TrollGRPOConfig`], [`~trl.RLOOConfig`] for [`TrollRLOOConfig`]):
                TRL's configuration.

        Raises:
            TypeError: any other class, subclasses included, which may mean more than their fields.
            ValueError: as for the constructor.
        """
        if type(args) is not cls._trl_config:
            given, plain = type(args), cls._trl_config
            derived = f", a subclass of {plain.__name__}" if issubclass(given, plain) else ""
            raise TypeError(
                f"`args` must be a {cls.__name__} or a plain {plain.__name__}, got "
                f"{given.__module__}.{given.__qualname__}{derived}. "
                + (
                    f"Let that class derive from troll_trl.{cls.__name__}."
                    if derived
                    else f"Give this trainer a troll_trl.{cls.__name__}."
                )
            )
        config: Any = copy.copy(args)
        config.__class__ = cls
        for option in fields(TrollOptions):
            setattr(config, option.name, option.default)
        config._check()
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

    def _check(self):
        check_ranges(self)
        self._check_troll_options()
        self._warn_of_unused_options()

    def _check_troll_options(self):
        if not (is_number(self.kl_bound) and self.kl_bound > 0):
            raise ValueError(f"`kl_bound` must be positive, got {self.kl_bound!r}. The paper uses 0.05.")
        if not (is_number(self.regression_coef) and 0 <= self.regression_coef < math.inf):
            raise ValueError(f"`regression_coef` must be finite and at least 0, got {self.regression_coef!r}.")
        if not is_number(self.tail_mass):
            raise ValueError(f"`tail_mass` must be a number in [0, 1), got {self.tail_mass!r}.")
        check_support_options(self.support_size, self.tail_mass)

    def _warn_of_unused_options(self):
        changed = {
            option.name: getattr(self, option.name)
            for option in fields(self._trl_config)
            if option.default is not MISSING and getattr(self, option.name) != option.default
        }
        for prefixes, is_used, reason in _UNUSED:
            unused = [f"{name}={value}" for name, value in changed.items() if name.startswith(prefixes)]
            if unused and not is_used(self) and self.process_index == 0:
                warnings.warn(f"{', '.join(unused)} unused: {reason}.", stacklevel=5)


@dataclass
class TrollGRPOConfig(TrollOptions, GRPOConfig):
    """
    Configuration of [`TrollGRPOTrainer`]: every parameter of [`~trl.GRPOConfig`], and seven more, whose defaults are
    the paper's (TROLL, arXiv 2510.03817).

    `epsilon` and `epsilon_high`, the clip range of an existing recipe, are accepted and unused: the projection
    replaces the clip.

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
        pessimistic (`bool`, *optional*, defaults to `False`):
            Whether the smaller of the projection's and the policy's surrogate counts of each token, as PPO's clip has
            the smaller of two: a token that has moved against its advantage then keeps its gradient. Not in the paper;
            see `docs/design.md`.
        max_skipped_updates (`int`, *optional*, defaults to `20`):
            An update that meets a NaN or an infinity is skipped; after this many in a row the run stops. At least 1.
        save_rollouts (`bool`, *optional*, defaults to `True`):
            Whether a checkpoint taken between the updates of a rollout batch holds the batch, so that a resumed run
            is the uninterrupted one, bit for bit. See `docs/reliability.md` for its size.

    Raises:
        ValueError: an option outside of its range, TRL's own included, and what TROLL cannot honour (`loss_type` cispo,
            sapo or vespo; `delta`), with the value and the reason.
    """

    _trl_config = GRPOConfig

    def _check(self):
        self._refuse_options_of_other_surrogates()
        super()._check()

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


@dataclass
class TrollRLOOConfig(TrollOptions, RLOOConfig):
    """
    Configuration of [`TrollRLOOTrainer`]: every parameter of [`~trl.RLOOConfig`], and seven more, whose defaults are
    the paper's (TROLL, arXiv 2510.03817). `epsilon` and `epsilon_high` are accepted and unused.

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
        pessimistic (`bool`, *optional*, defaults to `False`):
            Whether the smaller of the projection's and the policy's surrogate counts of each token, as PPO's clip has
            the smaller of two: a token that has moved against its advantage then keeps its gradient. Not in the paper;
            see `docs/design.md`.
        max_skipped_updates (`int`, *optional*, defaults to `20`):
            An update that meets a NaN or an infinity is skipped; after this many in a row the run stops. At least 1.
        save_rollouts (`bool`, *optional*, defaults to `True`):
            Whether a checkpoint taken between the updates of a rollout batch holds the batch, so that a resumed run
            is the uninterrupted one, bit for bit. See `docs/reliability.md` for its size.

    Raises:
        ValueError: an option outside of its range, TRL's own included, with the value.
    """

    _trl_config = RLOOConfig


def troll_fields():
    """The dataclass fields that TROLL adds to TRL's configs."""
    return fields(TrollOptions)


def trust_region_fields():
    """Those of them that define the trust region."""
    return [option for option in troll_fields() if option.name not in ("max_skipped_updates", "save_rollouts")]

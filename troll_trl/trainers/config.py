"""TRL's configs with TROLL's options added, and what TROLL cannot honour refused by name."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from troll_trl.fields import document, setting
from troll_trl.resilience.option_ranges import check_ranges, is_number
from troll_trl.trainers.trl_compat import silence_known_warnings
from troll_trl.trust_region.mask import DIVERGENCES, needs_support
from troll_trl.trust_region.regions import MaskTrustRegion, ProjectionTrustRegion, TrustRegion
from troll_trl.trust_region.sparse import check_support_options

if TYPE_CHECKING:  # TRL's config, which follows in the list of bases
    from trl import GRPOConfig as _TrlConfig
else:
    _TrlConfig = object

SUPPORTED_LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")

# Options of TRL whose silent acceptance would lose a run, since another objective is trained than was asked for:
# prefixes of their names, whether they have an effect, and why not. What else a config may set to no effect is TRL's
# business.
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("epsilon",),
        lambda _: False,
        "a trust region takes the place of the clip; its bound is `kl_bound`, or `divergence_bound` of a mask",
    ),
    (("sapo_", "vespo_"), lambda _: False, "they belong to loss types that TROLL does not support"),
    (
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip", "vllm_importance_sampling_cap"),
        lambda args: not args.use_vllm or args.vllm_importance_sampling_correction,
        "`vllm_importance_sampling_correction` is off",
    ),
    (("ref_model_",), lambda args: args.sync_ref_model, "`sync_ref_model` is off"),
    (("use_bias_correction_kl",), lambda args: args.beta != 0.0, "`beta` is 0"),
    (("entropy_coef_", "entropy_target"), lambda args: args.use_adaptive_entropy, "`use_adaptive_entropy` is off"),
    (("kl_bound", "regression_coef"), lambda args: not args.masks, "part of `trust_region` 'projection'"),
    (("divergence_", "ratio_cap"), lambda args: args.masks, "part of `trust_region` 'mask'"),
    (
        ("support_size", "tail_mass"),
        lambda args: not args.masks or needs_support(args.divergence_type),
        "a binary divergence needs no support",
    ),
)


@dataclass
class TrollOptions(_TrlConfig):
    """
    The options of TROLL, which [`TrollGRPOConfig`] and [`TrollRLOOConfig`] add to TRL's and document.

    Raises:
        ValueError: an option outside its range, TRL's own included, with the value.
    """

    _trl_config: ClassVar[type]  # the config of TRL's that is extended

    kl_bound: float = setting(
        0.05,  # as `trust_region.DEFAULT_KL_BOUND`, which a report reads
        "Bound ε on the KL of every token's projected policy π from the old policy q, in nats: KL(π‖q) ≤ ε. It must "
        "be positive; inf switches the projection off.",
    )
    regression_coef: float = setting(
        1.0,
        "Weight α ≥ 0 of the regression term KL(p ‖ stopgrad π), which pulls the policy p to its projection π.",
    )
    support_size: int = setting(
        64,
        "Keep at most this number K ≥ 1 of tokens per position, including the sampled one. All other tokens share one "
        "rest bucket with their exact mass.",
    )
    tail_mass: float = setting(
        1e-5,
        "Keep tokens by descending old probability until the rest has at most this mass δ in [0, 1).",
    )
    pessimistic: bool = setting(
        False,
        "Take the smaller of the projection's and the policy's surrogate, as PPO does with the clipped and the "
        "unclipped one. A token that has moved against its advantage then keeps its gradient. This is not in the "
        "paper; see docs/design.md.",
    )
    max_skipped_updates: int = setting(
        20,
        "Stop the run after this many skipped updates in a row. The trainer skips an update that contains a NaN or an "
        "infinity.",
    )
    save_rollouts: bool = setting(
        True,
        "Save an unfinished rollout batch with each checkpoint. A resumed run then repeats the uninterrupted one, bit "
        "for bit. docs/reliability.md has its size.",
    )

    def __post_init__(self):
        silence_known_warnings()
        check_ranges(self)  # before TRL, which divides by some of them
        super().__post_init__()
        self._check()

    @classmethod
    def from_trl(cls, args: Any) -> "TrollOptions":
        """
        A copy of TRL's plain config with TROLL's defaults added, for scripts that swap only the trainer class. Any
        other class, subclasses included, which may mean more than their fields, is a `TypeError`.

        The instance is copied, not rebuilt: TRL's `__post_init__` has already run and would refuse the
        `steps_per_generation` that it derived itself.
        """
        if type(args) is not cls._trl_config:
            raise TypeError(
                f"`args` must be a {cls.__name__} or a plain {cls._trl_config.__name__}, got {type(args).__module__}."
                f"{type(args).__qualname__}. Give a troll_trl.{cls.__name__}, or let your class derive from it."
            )
        config: Any = copy.copy(args)
        config.__class__ = cls
        for option in troll_fields(cls):
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
        Whether every update uses completions of the current weights. Policy and old policy are then equal, and
        neither a clip nor a projection ever acts. It is TRL's own test for whether an old policy must be scored.
        """
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def masks(self) -> bool:
        """Whether the trust region is a mask, and not the projection. RLOO has the projection alone."""
        return False

    def trust_region_options(self) -> dict[str, Any]:
        """The options that define the trust region, by name: those that have an effect."""
        names = ("kl_bound", "regression_coef", "support_size", "tail_mass", "pessimistic")
        return {name: getattr(self, name) for name in names}

    def _check(self):
        check_ranges(self)
        check_support_options(self.support_size, self.tail_mass)
        self._warn_of_unused_options()

    def _warn_of_unused_options(self):
        changed = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.default is not MISSING and getattr(self, option.name) != option.default
        }
        for prefixes, is_used, reason in _UNUSED:
            unused = [f"{name}={value}" for name, value in changed.items() if name.startswith(prefixes)]
            if unused and not is_used(self) and self.process_index == 0:
                warnings.warn(f"{', '.join(unused)} unused: {reason}.", stacklevel=5)


@document
@dataclass
class TrollGRPOConfig(TrollOptions, GRPOConfig):
    """
    Configuration of [`TrollGRPOTrainer`]: every parameter of [`~trl.GRPOConfig`], and the following. Their defaults
    are the papers' (TROLL, arXiv 2510.03817; DPPO, arXiv 2602.04879).

    `epsilon` and `epsilon_high`, the clip range of an existing recipe, have no effect: the trust region replaces the
    clip.

    Raises:
        ValueError: an option, TRL's own included, is outside of its range, or TROLL cannot honour it (`loss_type`
            cispo, sapo or vespo; `delta`). The message has the value and the reason.
    """

    _trl_config = GRPOConfig

    trust_region: str = setting(
        "projection",
        "'projection' for TROLL or 'mask' for DPPO. The mask removes a token's gradient from the surrogate if the "
        "token has moved with its advantage and its divergence from the old policy exceeds `divergence_bound`. It has "
        "no regression.",
    )
    divergence_type: str = setting(
        "binary_tv",
        "How the mask measures the policy p against the old policy q. For the sampled token a: 'binary_tv' is "
        "|p(a) − q(a)|, 'binary_kl' is KL(q‖p) of (a, not a). Over the kept tokens and the rest: 'topk_tv' is "
        "½ Σ |p − q|, 'topk_kl' is KL(q‖p).",
    )
    divergence_bound: float | None = setting(
        None,
        "Largest divergence at which the mask keeps a token's gradient. For a total variation: in (0, 1), by default "
        "0.15. For a KL: positive, in nats, by default 0.05.",
    )
    ratio_cap: float | None = setting(
        None, "Cap C ≥ 1 on the ratio by which the mask scales a gradient: min(p(a)/q(a), C). By default there is none."
    )

    @property
    def masks(self) -> bool:
        return self.trust_region == "mask"

    def trust_region_options(self) -> dict[str, Any]:
        chosen = {"trust_region": self.trust_region}
        if not self.masks:
            return chosen | super().trust_region_options()
        names = ["divergence_type", "divergence_bound", "ratio_cap"]
        names += ["support_size", "tail_mass"] if needs_support(self.divergence_type) else []
        return chosen | {name: getattr(self, name) for name in names}

    def _check(self):
        self._refuse_options_of_other_surrogates()
        self._check_mask()
        super()._check()

    def _check_mask(self):
        check_mask(self)
        if not self.masks:
            return
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"`importance_sampling_level={self.importance_sampling_level!r}` is not supported with `trust_region` "
                "'mask': the mask decides token by token, and a completion's ratio is one number for all its tokens. "
                "Set it to 'token', or `trust_region` to 'projection'."
            )
        if self.pessimistic:
            raise ValueError(
                "`pessimistic` is not supported with `trust_region` 'mask', which leaves a token that has moved "
                "against its advantage its gradient anyway. Remove it."
            )

    def _refuse_options_of_other_surrogates(self):
        if self.loss_type not in SUPPORTED_LOSS_TYPES:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` is not supported: a trust region takes the place of the clipped "
                "ratio, and cispo, sapo and vespo replace that ratio themselves. Choose one of "
                f"{', '.join(SUPPORTED_LOSS_TYPES)}, which differ in how tokens are averaged."
            )
        if self.delta is not None:
            raise ValueError(
                f"`delta={self.delta}` is not supported: it is the upper limit of two-sided clipping, and a trust "
                "region does not clip. Remove it."
            )


@document
@dataclass
class TrollRLOOConfig(TrollOptions, RLOOConfig):
    """
    Configuration of [`TrollRLOOTrainer`]: every parameter of [`~trl.RLOOConfig`], and the following. Their defaults
    are the paper's (TROLL, arXiv 2510.03817). `epsilon` and `epsilon_high` have no effect.

    Raises:
        ValueError: an option, TRL's own included, is outside of its range. The message has the value.
    """

    _trl_config = RLOOConfig


def troll_fields(config: type[TrollOptions]) -> list[Field]:
    """The dataclass fields that a config of TROLL's adds to TRL's."""
    trl_names = {option.name for option in fields(config._trl_config)}
    return [option for option in fields(config) if option.name not in trl_names]


def trust_region_of(config: Any) -> TrustRegion:
    """The trust region that a config asks for."""
    if config.masks:
        return MaskTrustRegion(config.divergence_type, config.divergence_bound, config.ratio_cap)
    return ProjectionTrustRegion(config.kl_bound, getattr(config, "pessimistic", False))


def check_mask(config: Any) -> None:
    """Raise a `ValueError` for a `trust_region` or an option of the mask that has no meaning. If there is a mask, set
    the default of its `divergence_bound`."""
    if config.trust_region not in ("projection", "mask"):
        raise ValueError(f"`trust_region` must be 'projection' or 'mask', got {config.trust_region!r}.")
    if config.divergence_type not in DIVERGENCES:
        raise ValueError(f"`divergence_type` must be one of {', '.join(DIVERGENCES)}, got {config.divergence_type!r}.")
    is_tv = config.divergence_type.endswith("_tv")
    if config.divergence_bound is None and config.masks:
        config.divergence_bound = 0.15 if is_tv else 0.05
    bound = config.divergence_bound
    if bound is not None and not (is_number(bound) and bound > 0 and not (is_tv and bound >= 1)):
        allowed = "in (0, 1), since no total variation exceeds 1" if is_tv else "positive"
        raise ValueError(f"`divergence_bound` of {config.divergence_type} must be {allowed}, got {bound!r}.")

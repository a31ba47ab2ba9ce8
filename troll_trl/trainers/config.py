"""TRL's configs with TROLL's options. They refuse, by name, the options that TROLL cannot honour."""

import warnings
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from troll_trl.fields import is_number, setting
from troll_trl.trainers.adaptive_rate import check_signal
from troll_trl.trainers.rollout_sampling import check_generation_kwargs
from troll_trl.trainers.vllm import check_sampling
from troll_trl.trust_region import DEFAULT_KL_BOUND, DEFAULT_TAIL_MASS
from troll_trl.trust_region.mask import checked_bound
from troll_trl.trust_region.regions import (
    MaskTrustRegion,
    PenaltyTrustRegion,
    ProjectionTrustRegion,
    TrustRegion,
    load_trust_region,
)
from troll_trl.trust_region.sparse import Support, check_support_options

if TYPE_CHECKING:
    from trl import GRPOConfig as _TrlConfig  # or RLOOConfig: TRL's config, which follows in the list of bases
else:
    _TrlConfig = object

SUPPORTED_LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")

# The options that each kind of trust region reads, without the options of a support
_OPTIONS_OF = {
    "projection": ("kl_bound", "regression_coef"),
    "penalty": ("kl_bound", "regression_coef", "divergence_type"),
    "mask": ("divergence_type", "divergence_bound", "ratio_cap"),
}
_SUPPORT_OPTIONS = ("support_size", "tail_mass")


@dataclass
class TrustRegionOptions(_TrlConfig):
    """The options of a trust region, which every config adds to TRL's, and their checks."""

    _kinds: ClassVar[tuple[str, ...]] = ("projection", "penalty", "mask")

    trust_region: str = setting(
        "projection",
        "'projection': TROLL. 'penalty': only TROLL's regression (see `regression_coef`), on tokens beyond `kl_bound`; "
        "nothing limits the probability ratio. 'mask' (only in GRPO): DPPO, which gives no gradient to a token that "
        "has moved farther than `divergence_bound` in its advantage's direction. For your own trust region, give its "
        "import path, such as my_lib.MyRegion (see docs/design.md).",
    )
    divergence_type: str | None = setting(
        None,
        "p is the policy, q the old policy, a the sampled token. For the mask, 'binary_tv' (default) is |p(a) − q(a)|, "
        "and 'binary_kl' is KL(q‖p). For the penalty, 'binary_kl' (default) is KL(p‖q), and 'topk_kl' is KL(p‖q) over "
        "the kept tokens and the rest bucket. The binary types compare two outcomes: a and all others.",
    )
    divergence_bound: float | None = setting(
        None,
        "Largest divergence at which the mask keeps a token's gradient. For 'binary_tv': in (0, 1), by default 0.15. "
        "For 'binary_kl': positive, in nats, by default 0.05.",
    )
    ratio_cap: float | None = setting(
        None,
        "Cap C ≥ 1 on the probability ratio r: the mask multiplies the gradient of each token by min(r, C). By "
        "default, no cap.",
    )
    # After `__post_init__`, this is a number. `None` is refused. The type includes it because transformers' parser
    # reads `float | str` only as numbers
    kl_bound: float | str | None = setting(
        "auto",
        "Bound ε, in nats; only the penalty allows 0. The projected policy π has KL(π‖q) ≤ ε for every token, where q "
        "is the old policy. The penalty acts on tokens whose policy p has KL(p‖q) > ε; if ε = 0, it acts on all that "
        "have moved. inf means no bound. 'auto' is the paper's 0.05, but with GRPO's projection and n > 8 optimizer "
        "updates per rollout batch (all completions of one generation), it is 0.05·(n/8)², at most 0.8.",
    )
    regression_coef: float = setting(
        1.0, "Weight α ≥ 0 of the regression KL(p ‖ stopgrad π), which moves the policy p towards its projection π."
    )
    support_size: int | None = setting(
        None,
        "Keep at most K ≥ 1 tokens per position, including the sampled token. One rest bucket has the exact total mass "
        "of all other tokens. The default is 64, or 20 with `old_policy` 'engine'.",
    )

    def __post_init__(self):
        self._prepare()
        super().__post_init__()
        for message in self._check():
            if self.process_index == 0:
                warnings.warn(message, stacklevel=3)  # names the line that makes the config

    def _prepare(self) -> None:
        """Fill in the defaults that TRL's `__post_init__` reads."""
        if isinstance(self.kl_bound, str):
            with suppress(ValueError):  # 'auto' stays, and `_check` refuses other text
                self.kl_bound = float(self.kl_bound)

    @cached_property
    def region(self) -> TrustRegion:
        """The trust region that the options define. It is made once, since a user's own may be costly to make."""
        if "." in self.trust_region:
            return load_trust_region(self.trust_region, self)
        bound: Any = self.kl_bound
        if self.trust_region == "penalty":
            return PenaltyTrustRegion(float(bound), binary=self.divergence_type != "topk_kl")
        if self.trust_region == "mask":
            largest: Any = self.divergence_bound
            return MaskTrustRegion(str(self.divergence_type), largest, self.ratio_cap)
        return ProjectionTrustRegion(float(bound))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.pop("region", None)  # it was made from other values

    def __getstate__(self) -> dict[str, Any]:
        # A push to the hub uploads a pickle of the config, `training_args.bin`
        state = {**vars(self), "hub_token": None}
        state.pop("region", None)  # the user's own may not be picklable
        return state

    @property
    def _default_support_size(self) -> int:
        return 20  # vLLM lists no more tokens by default

    def _check(self) -> list[str]:
        """Fill in defaults, and refuse what the method cannot honour. Return the warnings to issue."""
        kind = self.trust_region
        if not (isinstance(kind, str) and (kind in self._kinds or "." in kind)):
            raise ValueError(
                f"`trust_region` must be one of {', '.join(self._kinds)}, got {kind!r}. Your own trust region needs a "
                "dotted import path, such as my_lib.MyRegion."
            )
        if kind == "mask":
            self.divergence_type = "binary_tv" if self.divergence_type is None else self.divergence_type
            self.divergence_bound = checked_bound(self.divergence_type, self.divergence_bound)
            if self.ratio_cap is not None and not (is_number(self.ratio_cap) and self.ratio_cap >= 1):
                raise ValueError(f"`ratio_cap` must be at least 1, got {self.ratio_cap!r}.")
        if kind == "penalty":
            self.divergence_type = "binary_kl" if self.divergence_type is None else self.divergence_type
            if self.divergence_type not in ["binary_kl", "topk_kl"]:
                raise ValueError(
                    "`divergence_type` of the penalty must be 'binary_kl' (the sampled token and all others) or "
                    f"'topk_kl' (the kept tokens and the rest), got {self.divergence_type!r}."
                )
        if self.support_size is None:
            self.support_size = self._default_support_size
        messages = self._unused()
        if self.kl_bound == "auto":
            self.kl_bound = self._auto_kl_bound()
        bound: Any = self.kl_bound
        if not (is_number(bound) and (bound > 0 or (bound == 0 and kind == "penalty"))):  # inf means no limit
            allowed = "at least 0" if kind == "penalty" else "positive"
            raise ValueError(f"`kl_bound` must be {allowed} or 'auto', got {bound!r}.")
        if not (is_number(self.regression_coef) and 0 <= self.regression_coef < float("inf")):
            raise ValueError(f"`regression_coef` must be at least 0 and finite, got {self.regression_coef!r}.")
        _ = self.region  # refuses a wrong import path before a model is loaded
        return messages

    def _auto_kl_bound(self) -> float:
        """Return the value of `kl_bound` 'auto'."""
        return DEFAULT_KL_BOUND

    def _unused(self) -> list[str]:
        """Name the options of other trust regions that were set and have no effect on this one."""
        kind = self.trust_region
        if "." in kind:  # a user's trust region may read any of them
            return []
        keeps_support = kind == "projection" or (kind == "penalty" and self.divergence_type == "topk_kl")
        used = _OPTIONS_OF[kind] + (_SUPPORT_OPTIONS if keeps_support else ())
        of_any = {name for names in (*_OPTIONS_OF.values(), _SUPPORT_OPTIONS) for name in names}
        defaults = {"support_size": self._default_support_size}
        unused = [
            f"{option.name}={value}"
            for option in fields(self)
            if option.name in of_any.difference(used)
            and (value := getattr(self, option.name)) != defaults.get(option.name, option.default)
        ]
        return [f"`trust_region` {kind!r} does not use {', '.join(unused)}."] if unused else []


@dataclass
class TrollOptions(TrustRegionOptions):
    """The options of TROLL, which [`TrollGRPOConfig`] and [`TrollRLOOConfig`] add to TRL's and document."""

    _trl_config: ClassVar[type]  # the TRL config that is extended

    old_policy: str = setting(
        "trainer",
        "The distribution at the center of the trust region. 'trainer': the model's distribution, from a pass over the "
        "rollout batch. 'engine': vLLM's distribution. 'engine' skips the pass and turns off "
        "`vllm_importance_sampling_correction`.",
    )
    tail_mass: float = setting(
        DEFAULT_TAIL_MASS,
        "Keep the old policy's likeliest tokens until the mass of the others is at most δ, in [0, 1), or until "
        "`support_size` tokens are kept.",
    )
    max_skipped_updates: int = setting(
        20,
        "Skip updates that contain a NaN or an infinity. Stop the run after this many skips in a row.",
    )
    adaptive_learning_rate: bool = setting(
        False,
        "Multiply the scheduled learning rate by a factor between 1/100 and 10. The factor falls if the policy moves "
        "too far from the old policy, and grows if the policy hardly moves. Needs at least 2 updates per rollout "
        "batch and a trust region that measures `policy_kl`, which the mask does not.",
    )
    save_rollouts: bool = setting(
        True,
        "Save an unfinished rollout batch with each checkpoint. A resumed run then matches an uninterrupted run bit "
        "for bit (docs/reliability.md).",
    )

    @property
    def _default_support_size(self) -> int:
        return super()._default_support_size if self.old_policy == "engine" else 64

    def support_within(self, vocabulary: int) -> Support:
        """Return the support to keep from this many tokens. Only the default `support_size` may exceed `vocabulary`."""
        size: Any = self.support_size
        if size == self._default_support_size:
            size = min(size, vocabulary)
        check_support_options(size, self.tail_mass, vocabulary)
        return Support(size, self.tail_mass)

    def _prepare(self) -> None:
        if self.old_policy not in ("trainer", "engine"):
            raise ValueError(f"`old_policy` must be 'trainer' or 'engine', got {self.old_policy!r}.")
        options: dict[str, Any] = self.__dict__  # the fields of TRL's config
        if options["load_best_model_at_end"] and options["metric_for_best_model"] is None:
            # transformers would take the loss, which says nothing about the rewards: a group's advantages sum to 0
            options["metric_for_best_model"] = "eval_reward"
        super()._prepare()

    def _check(self) -> list[str]:
        if self.old_policy == "engine" and not self.use_vllm:
            raise ValueError("`old_policy='engine'` is vLLM's distribution, so it needs vLLM. Set `use_vllm=True`.")
        check_generation_kwargs(self.generation_kwargs)
        if self.old_policy == "engine":
            check_sampling(vars(self))
        if not (is_number(self.max_skipped_updates) and self.max_skipped_updates >= 1):
            raise ValueError(f"`max_skipped_updates` must be at least 1, got {self.max_skipped_updates!r}.")
        messages = super()._check()
        check_support_options(self.support_size, self.tail_mass)
        if self.adaptive_learning_rate:
            self._check_adaptive_learning_rate()
        return messages

    def _check_adaptive_learning_rate(self) -> None:
        """Refuse settings in which the trust region's KL does not measure the learning rate."""
        updates = self.updates_per_rollout_batch
        if updates < 2 or updates % 1:
            raise ValueError(
                "`adaptive_learning_rate` needs a whole number of at least 2 updates per rollout batch, got "
                f"{updates:g}: it measures how far the policy moves within a rollout batch. For 8 updates, set "
                f"`steps_per_generation={8 * self.gradient_accumulation_steps}`."
            )
        if self.old_policy == "engine":
            raise ValueError(
                "`adaptive_learning_rate` is not supported with `old_policy='engine'`: the difference between vLLM and "
                "the trainer would count as movement of the policy. Use `old_policy='trainer'`."
            )
        check_signal(self.region)

    @classmethod
    def from_trl(cls, args: Any) -> "TrollOptions":
        """
        Copy TRL's plain config and add TROLL's defaults, for scripts that swap only the trainer class. Any other class
        raises a `TypeError`, even a subclass, which may change more than its fields.

        The instance is copied, not rebuilt: TRL's `__post_init__` has already run and would refuse the
        `steps_per_generation` that it derived itself.
        """
        if type(args) is not cls._trl_config:
            raise TypeError(
                f"`args` must be a {cls.__name__} or a plain {cls._trl_config.__name__}, got {type(args).__module__}."
                f"{type(args).__qualname__}. Pass a troll_trl.{cls.__name__}, or let your class derive from it."
            )
        config = object.__new__(cls)
        config.__dict__.update(vars(args) | {option.name: option.default for option in troll_fields(cls)})
        for message in config._check():
            if config.process_index == 0:
                warnings.warn(message, stacklevel=6)  # names the line that makes the trainer
        return config

    @property
    def updates_per_rollout_batch(self) -> float:
        """Number of optimizer updates per rollout batch. Every completion counts `num_iterations` times."""
        return self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps

    @property
    def trust_region_idle(self) -> bool:
        """Whether every update uses completions of the current weights, so only noise makes a trust region act."""
        is_on_policy = self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0
        return is_on_policy and self.old_policy == "trainer"


@dataclass
class TrollGRPOConfig(TrollOptions, GRPOConfig):
    """
    Configuration of [`TrollGRPOTrainer`]: every parameter of [`~trl.GRPOConfig`], and the following. Their defaults
    are the papers' (TROLL, arXiv 2510.03817; DPPO, arXiv 2602.04879). `epsilon` and `epsilon_high`, the clip range of
    an existing recipe, have no effect: the trust region replaces the clip.

    Args:
        vllm_importance_sampling_correction (`bool | None`, *optional*):
            Whether TRL's importance sampling corrects the loss for the difference between vLLM and the training model.
            By default it does, except with `old_policy` 'engine', which leaves nothing to correct.
        trust_region (`str`, *optional*, defaults to `'projection'`):
            'projection': TROLL. 'penalty': only TROLL's regression (see `regression_coef`), on tokens beyond
            `kl_bound`; nothing limits the probability ratio. 'mask' (only in GRPO): DPPO, which gives no gradient to a
            token that has moved farther than `divergence_bound` in its advantage's direction. For your own trust
            region, give its import path, such as my_lib.MyRegion (see docs/design.md).
        divergence_type (`str | None`, *optional*):
            p is the policy, q the old policy, a the sampled token. For the mask, 'binary_tv' (default) is |p(a) −
            q(a)|, and 'binary_kl' is KL(q‖p). For the penalty, 'binary_kl' (default) is KL(p‖q), and 'topk_kl' is
            KL(p‖q) over the kept tokens and the rest bucket. The binary types compare two outcomes: a and all others.
        divergence_bound (`float | None`, *optional*):
            Largest divergence at which the mask keeps a token's gradient. For 'binary_tv': in (0, 1), by default 0.15.
            For 'binary_kl': positive, in nats, by default 0.05.
        ratio_cap (`float | None`, *optional*):
            Cap C ≥ 1 on the probability ratio r: the mask multiplies the gradient of each token by min(r, C). By
            default, no cap.
        kl_bound (`float | str | None`, *optional*, defaults to `'auto'`):
            Bound ε, in nats; only the penalty allows 0. The projected policy π has KL(π‖q) ≤ ε for every token, where q
            is the old policy. The penalty acts on tokens whose policy p has KL(p‖q) > ε; if ε = 0, it acts on all that
            have moved. inf means no bound. 'auto' is the paper's 0.05, but with GRPO's projection and n > 8
            optimizer updates per rollout batch (all completions of one generation), it is 0.05·(n/8)², at most 0.8.
        regression_coef (`float`, *optional*, defaults to `1.0`):
            Weight α ≥ 0 of the regression KL(p ‖ stopgrad π), which moves the policy p towards its projection π.
        support_size (`int | None`, *optional*):
            Keep at most K ≥ 1 tokens per position, including the sampled token. One rest bucket has the exact total
            mass of all other tokens. The default is 64, or 20 with `old_policy` 'engine'.
        old_policy (`str`, *optional*, defaults to `'trainer'`):
            The distribution at the center of the trust region. 'trainer': the model's distribution, from a pass over
            the rollout batch. 'engine': vLLM's distribution. 'engine' skips the pass and turns off
            `vllm_importance_sampling_correction`.
        tail_mass (`float`, *optional*, defaults to `1e-05`):
            Keep the old policy's likeliest tokens until the mass of the others is at most δ, in [0, 1), or until
            `support_size` tokens are kept.
        max_skipped_updates (`int`, *optional*, defaults to `20`):
            Skip updates that contain a NaN or an infinity. Stop the run after this many skips in a row.
        adaptive_learning_rate (`bool`, *optional*, defaults to `False`):
            Multiply the scheduled learning rate by a factor between 1/100 and 10. The factor falls if the policy moves
            too far from the old policy, and grows if the policy hardly moves. Needs at least 2 updates per rollout
            batch and a trust region that measures `policy_kl`, which the mask does not.
        save_rollouts (`bool`, *optional*, defaults to `True`):
            Save an unfinished rollout batch with each checkpoint. A resumed run then matches an uninterrupted run bit
            for bit (docs/reliability.md).

    Raises:
        ValueError: an option is outside of its range, or TROLL cannot honour it (`loss_type` cispo, sapo or vespo;
            `delta`). The message states the value and the reason.
    """

    _trl_config = GRPOConfig

    # TRL's field with another default: `None` means that the user has set no value
    vllm_importance_sampling_correction: bool | None = setting(
        None,
        "Whether TRL's importance sampling corrects the loss for the difference between vLLM and the training model. "
        "By default it does, except with `old_policy` 'engine', which leaves nothing to correct.",
    )

    def _auto_kl_bound(self) -> float:
        if self.trust_region != "projection":
            return super()._auto_kl_bound()
        # The more updates, the farther a token moves within a rollout batch. We measured 8 to 32 updates
        return DEFAULT_KL_BOUND * (min(max(self.updates_per_rollout_batch, 8), 32) / 8) ** 2

    def _prepare(self) -> None:
        if self.vllm_importance_sampling_correction is None:
            self.vllm_importance_sampling_correction = self.old_policy != "engine"
        super()._prepare()

    def _check(self) -> list[str]:
        if self.old_policy == "engine" and self.vllm_importance_sampling_correction:
            raise ValueError(
                "`vllm_importance_sampling_correction` is not supported with `old_policy='engine'`: the ratios are "
                "then relative to the sampling distribution, and nothing is left to correct. Remove it."
            )
        if self.loss_type not in SUPPORTED_LOSS_TYPES:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` is not supported: a trust region takes the place of the clip, and "
                f"only these losses have a clip: {', '.join(SUPPORTED_LOSS_TYPES)}."
            )
        if self.delta is not None:
            raise ValueError(
                f"`delta={self.delta}` is not supported: TRL clamps the ratio with `delta`, and a trust region "
                "replaces every clip. Remove it."
            )
        if self.trust_region == "mask" and self.importance_sampling_level != "token":
            raise ValueError(
                f"`importance_sampling_level={self.importance_sampling_level!r}` is not supported with `trust_region` "
                "'mask': the mask decides token by token, but a completion's ratio is one number for all its tokens. "
                "Set it to 'token', or `trust_region` to 'projection'."
            )
        return super()._check()


@dataclass
class TrollRLOOConfig(TrollOptions, RLOOConfig):
    """
    Configuration of [`TrollRLOOTrainer`]: every parameter of [`~trl.RLOOConfig`], and the options of
    [`TrollGRPOConfig`] from `trust_region` on, with the same defaults. RLOO has one ratio per completion, so it takes
    no mask, which decides token by token: `divergence_bound` and `ratio_cap` have no effect. 'auto' of `kl_bound` is
    always 0.05. `epsilon` and `epsilon_high` have no effect: the trust region replaces the clip.

    Raises:
        ValueError: an option is outside of its range. The message states the value.
    """

    _kinds = ("projection", "penalty")
    _trl_config = RLOOConfig


def troll_fields(config: type[TrollOptions]) -> list[Field]:
    """Return the dataclass fields that a TROLL config adds to TRL's."""
    trl_names = {option.name for option in fields(config._trl_config)}
    return [option for option in fields(config) if option.name not in trl_names]

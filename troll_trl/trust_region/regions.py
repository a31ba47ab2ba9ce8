"""
The trust regions: how each bounds a token in the loss, and which metrics it logs.

Each is a function of policy, old policy and advantages. To try another one, write a [`TrustRegion`] and set the option
`trust_region` to its import path; docs/design.md has an example.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from troll_trl.fields import imported
from troll_trl.trust_region.mask import mask_weight
from troll_trl.trust_region.penalty import kl_penalty
from troll_trl.trust_region.projection import kl_divergence, project


@dataclass
class TrustRegionOutput:
    """
    What a trust region returns for a micro-batch: a log-probability, a loss term and a weight of the advantage for each
    token.

    Attributes:
        log_probs (`torch.Tensor` of shape `(B, C)`, float32):
            Replaces `log p(a)` in TRL's surrogate, which has no clip.
        regression (`torch.Tensor` of shape `(B, C)`, float32, *optional*):
            A term of each token's loss, in nats, averaged as the surrogate is. `regression_coef` weights it.
        token_stats (`dict[str, torch.Tensor]`):
            For the metrics: numbers `(B, C)` for each token, by name. Any dtype is allowed. `policy_kl`, KL(p‖q) in
            nats, also drives an adaptive learning rate.
        weight (`torch.Tensor` of shape `(B, C)`, float32, *optional*):
            Multiplies the advantage. The loss treats it as a constant. RLOO, whose advantage belongs to a completion,
            refuses it.
    """

    log_probs: torch.Tensor
    regression: torch.Tensor | None = None
    token_stats: dict[str, torch.Tensor] = field(default_factory=dict)
    weight: torch.Tensor | None = None


class TrustRegion:
    """
    Base class for trust regions, which map policy, old policy and advantages to a [`TrustRegionOutput`].

    Policy and old policy are log-probabilities `(B, C, S)`, and advantages are `(B, 1)` or `(B, C)`, all float32. Slot
    0 of the log-probabilities is the sampled token. With a support, `S = K + 1`: the kept tokens of the old policy and
    the rest. Without one, `S = 1`. An unused slot is −∞ in both policies. At masked positions all mass is in the last
    slot, and what the function returns there has no effect.
    """

    needs_support = True
    # Metrics that divide the sum of one of the `token_stats` by the sum of another; "tokens" is 1 for every token
    mean_metrics: Mapping[str, tuple[str, str]] = {}
    # Metrics that are the largest value of one of the `token_stats`, which must not be negative
    max_metrics: Mapping[str, str] = {}

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        raise NotImplementedError

    def describe(self) -> str:
        """Return the text for the line that a run prints at its start."""
        return type(self).__name__


# Of the two `token_stats` that `_support_stats` adds
SUPPORT_METRICS = {
    "troll/support_size_mean": ("kept", "tokens"),
    "troll/rest_mass_mean": ("rest_mass", "tokens"),
}


class ProjectionTrustRegion(TrustRegion):
    """TROLL: the projection of every token's distribution onto a KL ball around the old policy, whose radius ε is
    `kl_bound`, in nats."""

    mean_metrics = {
        "troll/projected_fraction": ("projected", "tokens"),
        "troll/policy_kl_mean": ("policy_kl", "tokens"),
        "troll/kl_mean": ("kl", "tokens"),
        "troll/eta_mean": ("eta", "projected"),
        "troll/regression": ("regression", "tokens"),
        **SUPPORT_METRICS,
    }
    max_metrics = {"troll/policy_kl_max": "policy_kl", "troll/kl_max": "kl"}

    def __init__(self, kl_bound: float):
        self.kl_bound = kl_bound

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        projection = project(policy, old, self.kl_bound)
        # Where η is 0, the term is 0. If it were computed, its gradient with respect to the logits, p·(1 − Σp), would
        # be the rounding of Σp. Without another gradient, Adam would scale this up to full steps.
        regression = kl_divergence(policy, projection.log_probs.detach()).masked_fill(projection.eta == 0, 0.0)
        token_stats = {
            "projected": projection.eta > 0,
            "policy_kl": projection.policy_kl,
            "kl": projection.kl,
            "eta": projection.eta,
            "regression": regression.detach(),
            **_support_stats(old),
        }
        return TrustRegionOutput(projection.log_probs[..., 0], regression, token_stats)

    def describe(self) -> str:
        return f"KL bound {self.kl_bound:g}"


class MaskTrustRegion(TrustRegion):
    """DPPO (arXiv 2602.04879): a token that has moved too far in the direction of its advantage loses its gradient. It
    has the options of [`~troll_trl.trust_region.mask.mask_weight`]."""

    needs_support = False
    mean_metrics = {
        "troll/masked_fraction": ("masked", "tokens"),
        "troll/masked_fraction_positive": ("masked_positive", "positive"),
        "troll/masked_fraction_negative": ("masked_negative", "negative"),
        "troll/divergence_mean": ("divergence", "tokens"),
    }
    max_metrics = {"troll/divergence_max": "divergence"}

    def __init__(self, divergence_type: str, divergence_bound: float, ratio_cap: float | None = None):
        self.divergence_type = divergence_type
        self.divergence_bound = divergence_bound
        self.ratio_cap = ratio_cap

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        weight, divergence, masked = mask_weight(
            policy[..., 0], old[..., 0], advantages, self.divergence_type, self.divergence_bound, self.ratio_cap
        )
        positive, negative = (sign.expand_as(masked) for sign in (advantages > 0, advantages < 0))
        token_stats = {
            "masked": masked,
            "positive": positive,
            "negative": negative,
            "masked_positive": masked & positive,
            "masked_negative": masked & negative,
            "divergence": divergence,
        }
        return TrustRegionOutput(policy[..., 0], token_stats=token_stats, weight=weight)

    def describe(self) -> str:
        cap = "" if self.ratio_cap is None else f", ratios capped at {self.ratio_cap:g}"
        return f"masked beyond a {self.divergence_type} of {self.divergence_bound:g}{cap}"


class PenaltyTrustRegion(TrustRegion):
    """
    The penalty: TROLL's regression alone, for tokens outside of a KL ball of radius `kl_bound` ≥ 0, in nats. The ratio
    has no limit. By default, the ball is over two outcomes, the sampled token and all others, so no support is kept.
    With `binary=False`, it is over the kept tokens and the rest. [`~troll_trl.trust_region.penalty.kl_penalty`] has the
    mathematics.
    """

    max_metrics = {"troll/policy_kl_max": "policy_kl"}

    def __init__(self, kl_bound: float, binary: bool = True):
        self.kl_bound = kl_bound
        self.needs_support = not binary
        self.mean_metrics = {
            "troll/penalized_fraction": ("penalized", "tokens"),
            "troll/policy_kl_mean": ("policy_kl", "tokens"),
            "troll/regression": ("regression", "tokens"),
            **(SUPPORT_METRICS if self.needs_support else {}),
        }

    def __call__(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        regression, policy_kl, outside = kl_penalty(policy, old, self.kl_bound)
        token_stats = {
            "penalized": outside,
            "policy_kl": policy_kl,
            "regression": regression.detach(),
            **(_support_stats(old) if self.needs_support else {}),
        }
        return TrustRegionOutput(policy[..., 0], regression, token_stats)

    def describe(self) -> str:
        return f"a penalty beyond a {'' if self.needs_support else 'binary '}KL of {self.kl_bound:g}"


def apply_trust_region(
    trust_region: TrustRegion, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> TrustRegionOutput:
    """
    Apply `trust_region`, which may be the user's, to policy and old policy `(B, C, S)` and advantages `(B, 1)` or `(B,
    C)`. A tensor of any other shape would broadcast in the loss, and without a gradient nothing would train.

    Raises:
        TypeError: the result is not a [`TrustRegionOutput`].
        ValueError: a tensor has a shape other than `(B, C)`, or what the loss reads has no gradient.
    """
    name = type(trust_region).__name__
    bounded = trust_region(policy, old, advantages)
    if not isinstance(bounded, TrustRegionOutput):
        raise TypeError(f"`trust_region`: {name} returned {type(bounded).__name__}, not a troll_trl.TrustRegionOutput.")
    differentiable = {"log_probs": bounded.log_probs, "regression": bounded.regression}
    for term, value in (differentiable | {"weight": bounded.weight} | bounded.token_stats).items():
        if value is not None and value.shape != policy.shape[:-1]:
            raise ValueError(
                f"`trust_region`: `{term}` of {name} has shape {tuple(value.shape)}, expected "
                f"{tuple(policy.shape[:-1])}: one number for each token."
            )
    for term, value in differentiable.items():
        if policy.requires_grad and value is not None and not value.requires_grad:
            raise ValueError(
                f"`trust_region`: `{term}` of {name} has no gradient, so it would train nothing. Compute it from "
                "`policy` without `detach` or `torch.no_grad`."
            )
    return bounded


def load_trust_region(path: str, config: Any) -> TrustRegion:
    """
    Load the trust region at a dotted import path, or let the class or function at this path make one. A class or
    function that needs an argument gets the trainer's `config`. Raises a `ValueError` that names the option, and what
    is wrong with the path or what the user's code raised.
    """
    try:
        named = imported(path)
        trust_region = named if isinstance(named, TrustRegion) else _made_by(named, config)
        _check_methods(trust_region)
    except (Exception, SystemExit) as error:  # name the option, whatever the user's code raises
        raise ValueError(
            f"`trust_region` names {path!r}, which gives no trust region: {type(error).__name__}: {error}. Give the "
            "import path of a troll_trl.TrustRegion, such as my_lib.MyRegion."
        ) from error
    return trust_region


def _made_by(maker: Any, config: Any) -> Any:
    """Call the user's class or function, with `config` if it needs an argument."""
    required = [x for x in inspect.signature(maker).parameters.values() if x.default is x.empty]
    needed = any(x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in required)
    return maker(config) if needed else maker()


def _check_methods(trust_region: TrustRegion) -> None:
    """Raise a `TypeError` unless this is a trust region that can be called and described, before a model is loaded."""
    if not isinstance(trust_region, TrustRegion):
        raise TypeError(f"it makes {trust_region!r}")
    if type(trust_region).__call__ is TrustRegion.__call__:
        raise TypeError(f"{type(trust_region).__name__} has no `__call__(self, policy, old, advantages)`")
    inspect.signature(trust_region).bind("policy", "old", "advantages")
    if not isinstance(text := trust_region.describe(), str):
        raise TypeError(f"`describe` must return text, got {text!r}")
    for name, pair in trust_region.mean_metrics.items():
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"`mean_metrics[{name!r}]` must be a pair of names in `token_stats`, got {pair!r}")


def _support_stats(old: torch.Tensor) -> dict[str, torch.Tensor]:
    """The number of kept tokens and the mass of the rest, from old log-probabilities `(B, C, K + 1)`."""
    return {"kept": (old[..., :-1] > -math.inf).sum(-1), "rest_mass": old[..., -1].exp()}

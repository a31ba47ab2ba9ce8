"""TrustRegionModel: in TRL's loss, takes the place of the policy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from troll_trl.lm_head.patch import SparseCausalLMOutput
from troll_trl.trust_region.penalty import ROUNDING
from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput
from troll_trl.trust_region.sparse import keep_nothing


def snap_to_reference(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """
    `log_probs` `(B, C)`, equal to `reference` `(B, C)` wherever only rounding separates the two. `log_probs` are a
    reference model's, and `reference` the policy's.

    With the same weights, two passes differ in the last digits. If the loss took this for a step away from the
    reference model, it would be the only gradient of a batch without a learning signal, and Adam would scale it up to
    full steps.
    """
    same = (log_probs - reference).abs() <= ROUNDING * reference.abs().clamp(min=1)
    return torch.where(same, reference, log_probs)


def apply_trust_region(
    trust_region: TrustRegion, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> TrustRegionOutput:
    """
    What `trust_region` makes of policy and old policy `(B, C, S)` and advantages `(B, 1)` or `(B, C)`. It may be the
    user's: numbers of another shape than `(B, C)` would broadcast in the loss, and without a gradient nothing would
    train, without any other sign.

    Raises:
        TypeError: the result is no [`TrustRegionOutput`], or holds something else than tensors; what the loss reads is
            no float32 or float64.
        ValueError: a tensor has another shape than `(B, C)`, or no gradient; `token_stats` lacks a number that the
            metrics read; or the trust region wrote into its arguments.
    """
    name = type(trust_region).__name__
    given = {"policy": policy, "old": old, "advantages": advantages}
    versions = [_version(tensor) for tensor in given.values()]
    try:
        bounded = trust_region(policy, old, advantages)
    except Exception as error:
        error.add_note(f"`trust_region`: {name} raised this.")
        raise
    for (argument, tensor), version in zip(given.items(), versions, strict=True):
        if _version(tensor) != version:
            raise ValueError(
                f"`trust_region`: {name} wrote into `{argument}`, which the loss reads afterwards. Change a copy: "
                f"`{argument}.clone()`."
            )
    if not isinstance(bounded, TrustRegionOutput):
        raise TypeError(
            f"`trust_region`: {name} returned {type(bounded).__name__}, expected a troll_trl.TrustRegionOutput."
        )
    if not isinstance(bounded.token_stats, dict):
        raise TypeError(
            f"`trust_region`: `token_stats` of {name} is {type(bounded.token_stats).__name__}, expected a dict."
        )
    of_loss = {"log_probs": bounded.log_probs}
    if bounded.regression is not None:
        of_loss["regression"] = bounded.regression
    of_metrics = {f"token_stats[{key!r}]": value for key, value in bounded.token_stats.items()}
    for field, value in {**of_loss, **of_metrics}.items():
        _check_tensor(f"`trust_region`: `{field}` of {name}", value, policy.shape[:-1])
    for field, value in of_loss.items():
        _check_term(f"`trust_region`: `{field}` of {name}", value, field, policy.requires_grad)
    read = {key for pair in trust_region.ratios.values() for key in pair} | {*trust_region.maxima.values()}
    if missing := read - {"tokens"} - bounded.token_stats.keys():
        raise ValueError(
            f"`trust_region`: `token_stats` of {name} lacks {', '.join(map(repr, sorted(missing)))}, which its "
            "`ratios` or `maxima` name."
        )
    return bounded


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _check_tensor(said: str, value: Any, shape: torch.Size) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{said} is {type(value).__name__}, expected a tensor with one number for each token.")
    if value.shape != shape:
        raise ValueError(f"{said} has shape {tuple(value.shape)}, expected {tuple(shape)}: one number for each token.")


def _check_term(said: str, value: torch.Tensor, field: str, trains: bool) -> None:
    """Refuse numbers `(B, C)` of the loss that are rounded, or that train nothing although the policy `trains`."""
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{said} is {value.dtype}, expected torch.float32, which `policy` has.")
    if trains and not value.requires_grad:
        raise ValueError(
            f"{said} has no gradient, so it would train nothing. Compute it from `policy` without `detach` or "
            f"`torch.no_grad`{'' if field == 'log_probs' else ', or give None'}."
        )


def not_finite(bounded: TrustRegionOutput) -> torch.Tensor:
    """The tokens `(B, C)`, bool, for which a trust region gave a NaN or an infinity."""
    # The sum is tested, since every test of a tensor launches several kernels
    total = bounded.log_probs if bounded.regression is None else bounded.log_probs + bounded.regression
    return ~total.detach().isfinite()


@dataclass
class TrustRegionModel:
    """
    Takes the place of the policy in TRL's loss of one micro-batch: evaluates the policy on the old policy's support and
    bounds it. Keeps what the terms around TRL's surrogate need: `bounded`; `policy_log_probs` `(B, C)`, `log p(a)`; and
    `bad_tokens`, the number of tokens for which the trust region gave a NaN or an infinity.

    `old` `(B, C, S)` has log-probabilities of the old policy on its support `token_ids` `(B, C, K)` and the rest; or,
    without a support, of the sampled token, `S = 1`.
    """

    trust_region: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], TrustRegionOutput]
    old: torch.Tensor
    token_ids: torch.Tensor | None
    loss_mask: torch.Tensor  # (B, C) bool, the tokens that the loss is over
    advantages: torch.Tensor  # (B, 1) or (B, C)

    def wrap(self, model, completion_length: int):
        """A callable in place of `model` whose `log_probs` are what the trust region makes of the policy."""

        def trust_region_model(**model_inputs):
            if self.token_ids is None:  # TRL's own head
                output = model(**model_inputs)
                policy = output.log_probs[:, -completion_length:].unsqueeze(-1)  # (B, C, 1)
            else:
                output = model(**model_inputs, token_ids=self.token_ids, check_finite=False)
                policy = output.sparse_log_probs[:, -completion_length:]  # (B, C, K + 1)
            if policy.dtype != torch.float32:
                raise TypeError(
                    f"The model's log-probabilities are {policy.dtype}, not float32: a wrapper of the model casts its "
                    "outputs. The trust region would take their rounding for steps of the policy. Make the wrapper "
                    "keep the dtype."
                )
            # A token that takes no part in the loss must not enter an exp, nor must a NaN: `project` would refuse it on
            # one rank while the others wait. The guard has counted the NaN, and skips the update.
            ignored = ~self.loss_mask | self.old.isnan().any(-1) | policy.detach().isnan().any(-1)
            self.policy_log_probs = output.log_probs[:, -completion_length:].masked_fill(ignored, 0.0)  # (B, C)
            policy, old = keep_nothing(policy, ignored), keep_nothing(self.old, ignored)
            bounded = self.trust_region(policy, old, self.advantages)
            # Ignored positions have all their mass in the rest, and −∞ for a sampled token: −∞ − (−∞) is NaN
            sampled, regression = bounded.log_probs.masked_fill(ignored, 0.0), bounded.regression
            if regression is not None:
                regression = regression.masked_fill(ignored, 0.0)
            self.bounded = replace(bounded, log_probs=sampled, regression=regression)
            got_finite = (policy.detach()[..., 0] + old[..., 0]).isfinite()
            self.bad_tokens = (got_finite & not_finite(self.bounded)).sum()
            log_probs = torch.cat([output.log_probs[:, :-completion_length], sampled], 1)
            return without_supports(output, log_probs)

        return trust_region_model


def without_supports(output, log_probs: torch.Tensor) -> SparseCausalLMOutput:
    """An output for TRL, without supports and sparse log-probabilities, which TRL would hold through its loss."""
    return SparseCausalLMOutput(log_probs=log_probs, entropy=output.entropy, aux_loss=output.aux_loss)

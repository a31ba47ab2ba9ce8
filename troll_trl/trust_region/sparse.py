"""SparseDistribution: the kept tokens of a policy's distribution and one rest bucket with the exact remaining mass.

With the rest bucket, it is a proper categorical distribution over K + 1 outcomes, without default values or
renormalisation. Merging outcomes can only lower a KL, so a sparse KL never exceeds the true one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from troll_trl.kernels.support import mass_rule
from troll_trl.trust_region import DEFAULT_TAIL_MASS

UNUSED = -1  # token id of an unused slot


@dataclass(frozen=True)
class Support:
    """Which tokens an old policy keeps at each position: the sampled token, then the most likely others until the rest
    has at most `tail_mass`, and at most `size` tokens in all."""

    size: int  # K
    tail_mass: float = DEFAULT_TAIL_MASS  # δ


@dataclass
class SparseDistribution:
    """
    A distribution over a few kept tokens and one rest bucket for all other tokens.

    Attributes:
        token_ids (`torch.Tensor` of shape `(..., K)`, int32):
            Kept tokens: the sampled one in slot 0, the others by descending old probability; −1 in an unused slot.
        log_probs (`torch.Tensor` of shape `(..., K + 1)`, float32):
            Log-probability of every kept token, and of the rest in the last slot; −∞ in an unused slot.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor

    @staticmethod
    def log_probs_on_support(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """
        Log-probabilities of logits on a given support, differentiable. The dense reference of the sparse head.

        Args:
            logits (`torch.Tensor` of shape `(..., V)`):
                Logits after the sampling temperature. Half precision is computed in float32.
            token_ids (`torch.Tensor` of shape `(..., K)`, integer):
                Support; −1 marks an unused slot.

        Returns:
            `torch.Tensor` of shape `(..., K + 1)`, float32 (float64 for float64 logits).

        Raises:
            ValueError: non-finite logits, shapes that do not match, or a token id outside of −1…V−1.
        """
        _check_logits(logits)
        if token_ids.shape[:-1] != logits.shape[:-1]:
            raise ValueError(
                f"`token_ids` {tuple(token_ids.shape)} and `logits` {tuple(logits.shape)} must agree in all dimensions "
                "but the last."
            )
        vocabulary = logits.shape[-1]
        check_range("token_ids", token_ids, UNUSED, vocabulary)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        token_ids = token_ids.long()
        used = token_ids != UNUSED
        kept_logits = logits.gather(-1, token_ids.clamp(min=0)).masked_fill(~used, -math.inf)  # (..., K)
        # `scatter_` needs an index for an unused slot, too: one more column, which is then cut off
        is_kept = torch.zeros(*logits.shape[:-1], vocabulary + 1, dtype=torch.bool, device=logits.device)
        is_kept.scatter_(-1, torch.where(used, token_ids, vocabulary), True)
        is_kept = is_kept[..., :vocabulary]  # (..., V)
        # Sum the rest directly, because 1 − Σ kept would cancel. The log-sum-exp of an empty rest has a NaN gradient.
        rest_is_empty = is_kept.all(-1, keepdim=True)
        rest = logits.masked_fill(is_kept & ~rest_is_empty, -math.inf).logsumexp(-1, keepdim=True)
        rest = rest.masked_fill(rest_is_empty, -math.inf)
        log_probs = torch.log_softmax(torch.cat([kept_logits, rest], -1), -1)
        # The gradient of an outcome without mass stops here
        return log_probs.masked_fill(log_probs == -math.inf, -math.inf)

    @staticmethod
    def concatenate(parts: Sequence["SparseDistribution"]) -> "SparseDistribution":
        """Join distributions `(b, T, K)` along their first dimension."""
        return SparseDistribution(torch.cat([x.token_ids for x in parts]), torch.cat([x.log_probs for x in parts]))


def sparsify(
    logits: torch.Tensor, sampled_ids: torch.Tensor, support_size: int = 64, tail_mass: float = DEFAULT_TAIL_MASS
) -> SparseDistribution:
    """
    Select the support of a policy, the tokens to keep: the sampled token, then the others by descending probability
    until the kept mass, sampled token included, reaches `1 − tail_mass`, at most `support_size` in all (TROLL, arXiv
    2510.03817, section 4). The dense reference of the sparse head.

    Args:
        logits (`torch.Tensor` of shape `(..., V)`):
            Logits after the sampling temperature.
        sampled_ids (`torch.Tensor` of shape `(...)`, integer):
            The sampled token, always kept.
        support_size (`int`, *optional*, defaults to `64`):
            Largest number K of kept tokens.
        tail_mass (`float`, *optional*, defaults to `1e-5`):
            Mass δ that the rest may have.

    Returns:
        [`SparseDistribution`] with `token_ids` `(..., K)` and `log_probs` `(..., K + 1)`.

    Raises:
        ValueError: `support_size` outside of 1…V, `tail_mass` outside of [0, 1), non-finite logits, or sampled ids
            outside of the vocabulary or of a shape that differs from the positions'.
    """
    vocabulary = logits.shape[-1]
    check_support_options(support_size, tail_mass, vocabulary)
    _check_logits(logits)
    if sampled_ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"`sampled_ids` {tuple(sampled_ids.shape)} must have one token for each position of `logits` "
            f"{tuple(logits.shape)}."
        )
    check_range("sampled_ids", sampled_ids, 0, vocabulary)
    sampled_ids = sampled_ids.long().unsqueeze(-1)  # (..., 1)
    log_probs = torch.log_softmax(logits.detach().double(), -1)
    sampled_log_prob = log_probs.gather(-1, sampled_ids)
    others = log_probs.scatter(-1, sampled_ids, -math.inf).topk(support_size - 1, -1)  # (..., K − 1)
    keep = mass_rule(sampled_log_prob, others.values, tail_mass)
    token_ids = torch.cat([sampled_ids, others.indices.masked_fill(~keep, UNUSED)], -1)
    return SparseDistribution(
        token_ids.int(), SparseDistribution.log_probs_on_support(logits.detach(), token_ids).float()
    )


def trimmed(old: SparseDistribution) -> SparseDistribution:
    """Drop the slots of a distribution `(..., K)` that no position uses. Waits for the device."""
    used = (old.token_ids != UNUSED).flatten(0, -2).any(0)  # (K,); used slots come first
    width = max(int(used.sum()), 1)
    if width == len(used):
        return old
    log_probs = torch.cat([old.log_probs[..., :width], old.log_probs[..., -1:]], -1)
    return SparseDistribution(old.token_ids[..., :width].contiguous(), log_probs)


def rest_alone(slots: int, device: torch.device) -> torch.Tensor:
    """Log-probabilities `(slots,)` float32 of a distribution with all mass in the last slot, the rest."""
    log_probs = torch.full((slots,), -math.inf, device=device)
    log_probs[-1:] = 0.0  # a slice: for an element, PyTorch would copy a number from the host, and wait
    return log_probs


def move_to_rest(log_probs: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(..., S)` with all mass in the last slot, the sampled token's if `S = 1`, at the positions
    `where` `(...)`, bool."""
    return torch.where(where.unsqueeze(-1), rest_alone(log_probs.shape[-1], log_probs.device), log_probs)


def check_support_options(support_size: Any, tail_mass: float, vocabulary: int | None = None) -> None:
    """Raise a `ValueError` for a `support_size` that is not in 1…V or a `tail_mass` outside of [0, 1)."""
    whole = isinstance(support_size, int) and not isinstance(support_size, bool)
    if not whole or support_size < 1 or (vocabulary is not None and support_size > vocabulary):
        limit = "of at least 1" if vocabulary is None else f"in 1…{vocabulary} (the vocabulary)"
        raise ValueError(f"`support_size` must be a whole number {limit}, got {support_size}.")
    if not 0 <= tail_mass < 1:  # NaN fails this, too
        raise ValueError(f"`tail_mass` must be in [0, 1), got {tail_mass}.")


def _check_logits(logits: torch.Tensor) -> None:
    finite = logits.isfinite()
    if not finite.all():
        first = (~finite).nonzero()[0].tolist()
        raise ValueError(f"`logits` must be finite, got {logits[tuple(first)].item()} at index {first}.")


def check_range(name: str, ids: torch.Tensor, low: int, vocabulary: int) -> None:
    """Raise a `ValueError` for token ids that are not integers, or outside of low…V−1."""
    if ids.is_floating_point():
        raise ValueError(f"`{name}` must hold integers, got {ids.dtype}.")
    outside = (ids < low) | (ids >= vocabulary)
    if outside.any():
        raise ValueError(f"`{name}` must be in {low}…{vocabulary - 1}, got {ids[outside][0].item()}.")

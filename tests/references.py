"""Independent float64 references, slow and plain. They borrow nothing from `troll_trl`; benchmarks use them too."""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp


class ReferenceProjection(NamedTuple):
    """
    Result of [`reference_project`].

    Attributes:
        t (`float`):
            `1/(η + 1)`: 1 inside the bound, 0 where the bound cannot be met on the support of the policy.
        log_probs (`np.ndarray` of shape `(S,)`):
            Log-probabilities of the projected policy.
    """

    t: float
    log_probs: np.ndarray


def reference_kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """
    KL(p‖q) in nats along the last axis, from its definition.

    Args:
        log_p, log_q (`np.ndarray` of shape `(..., S)`):
            Log-probabilities; `-inf` is allowed.

    Returns:
        `np.ndarray` of shape `(...)`.
    """
    log_p, log_q = np.asarray(log_p, dtype=np.float64), np.asarray(log_q, dtype=np.float64)
    positive = log_p > -np.inf
    with np.errstate(invalid="ignore"):
        terms = np.where(positive, np.exp(log_p) * (log_p - log_q), 0.0)
    return terms.sum(-1)


def reference_project(log_p: np.ndarray, log_q: np.ndarray, bound: float) -> ReferenceProjection:
    """
    Minimiser of KL(π‖p) subject to KL(π‖q) ≤ bound, for one row, by Brent's root-finder.

    Where `q = 0`, so is π. Where only `p = 0`, so is π as long as the bound can be met without these tokens; otherwise
    the result is the limit of `p → 0` there: `q` with the mass of these tokens lowered until the KL is the bound.

    Args:
        log_p, log_q (`np.ndarray` of shape `(S,)`):
            Normalised log-probabilities; `-inf` is allowed. At least one slot has `q > 0`.
        bound (`float`):
            Bound on KL(π‖q), in nats.

    Returns:
        [`ReferenceProjection`]
    """
    log_p, log_q = np.asarray(log_p, dtype=np.float64), np.asarray(log_q, dtype=np.float64)
    if reference_kl(log_p, log_q) <= bound:
        return ReferenceProjection(1.0, log_p)
    in_q, in_both = log_q > -np.inf, (log_p > -np.inf) & (log_q > -np.inf)

    def family(t):
        """`q^(1 − t) p^t`, normalised over the common support."""
        log_pi = np.full_like(log_q, -np.inf)
        log_pi[in_both] = (1 - t) * log_q[in_both] + t * log_p[in_both]
        return log_pi - logsumexp(log_pi)

    def lowered(c):
        """`q` with the tokens that only `q` has multiplied by `exp(−c)`, normalised."""
        log_pi = np.where(in_q & ~in_both, log_q - c, log_q)
        return log_pi - logsumexp(log_pi)

    def excess(log_pi):
        return reference_kl(log_pi, log_q) - bound

    if not in_both.any():  # nothing of the policy can be kept
        return ReferenceProjection(0.0, log_q)
    if excess(family(0.0)) > 0:
        c = brentq(lambda c: excess(lowered(c)), 0.0, 1e4, xtol=1e-14, rtol=1e-14)
        return ReferenceProjection(0.0, lowered(c))
    if excess(family(1.0)) <= 0:
        return ReferenceProjection(1.0, family(1.0))
    t = brentq(lambda t: excess(family(t)), 0.0, 1.0, xtol=1e-15, rtol=1e-14)
    return ReferenceProjection(t, family(t))


def reference_support(
    logits: np.ndarray, sampled_id: int, support_size: int, tail_mass: float
) -> tuple[list[int], list[float]]:
    """
    The selection rule for one position, as a loop: the sampled token, then the others by descending probability until
    the kept mass reaches `1 − tail_mass`, at most `support_size` in all. Ties go to the lower id.

    Args:
        logits (`np.ndarray` of shape `(V,)`):
            Logits after the sampling temperature.
        sampled_id (`int`), support_size (`int`), tail_mass (`float`):
            As in the paper.

    Returns:
        Kept token ids, and the log-probabilities of the kept tokens and of all the others together: one more entry,
        `-inf` where no others are left.
    """
    logits = [float(z) for z in logits]
    log_z = _log_sum_exp(logits)
    kept = [sampled_id]
    for token in sorted(range(len(logits)), key=lambda v: (-logits[v], v)):
        kept_mass = math.fsum(math.exp(logits[v] - log_z) for v in kept)
        if len(kept) == support_size or kept_mass >= 1 - tail_mass:
            break
        if token != sampled_id:
            kept.append(token)
    rest = [logits[v] for v in range(len(logits)) if v not in kept]
    return kept, [logits[v] - log_z for v in kept] + [_log_sum_exp(rest) - log_z]


def reference_sparse_log_probs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """
    Log-probabilities of kept tokens and of the rest, from the softmax over the full vocabulary, a row at a time in
    float64. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `(N, V)`):
            Logits after the sampling temperature.
        token_ids (`torch.Tensor` of shape `(N, K)`):
            Support; −1 marks an unused slot.

    Returns:
        `torch.Tensor` of shape `(N, K + 1)`, float64: `-inf` in unused slots and for an empty rest.
    """
    rows = []
    for log_probs, ids in zip(logits.double().log_softmax(-1), token_ids.tolist(), strict=True):
        nothing = log_probs.new_tensor(-math.inf)
        rest = [v for v in range(len(log_probs)) if v not in set(ids)]
        entries = [log_probs[v] if v >= 0 else nothing for v in ids]
        rows.append(torch.stack([*entries, log_probs[rest].logsumexp(0) if rest else nothing]))
    return torch.stack(rows)


def _log_sum_exp(values: list[float]) -> float:
    if not values:
        return -math.inf
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def reference_divergence(name: str, log_p: np.ndarray, log_q: np.ndarray) -> float:
    """
    A divergence of DPPO's mask (arXiv 2602.04879), of a policy `p` from an old policy `q`, from its definition.

    Args:
        name (`str`):
            `binary_tv`, `binary_kl`, `topk_tv` or `topk_kl`.
        log_p, log_q (`np.ndarray` of shape `(S,)`):
            Log-probabilities, the sampled token's first.
    """
    p, q = np.exp(np.asarray(log_p, dtype=np.float64)), np.exp(np.asarray(log_q, dtype=np.float64))
    if name.startswith("binary_"):
        p, q = (np.array([x[0], x[1:].sum()]) for x in (p, q))
    if name.endswith("_tv"):
        return 0.5 * np.abs(p - q).sum()
    with np.errstate(divide="ignore"):
        return float(reference_kl(np.log(q), np.log(p)))


# A row whose KL(π_t‖q) is a plateau before a cliff, just above a bound of 0.3: log p and log q, not normalised
PLATEAU_AND_CLIFF = (
    [
        -69.918, -111.596, -153.253, -163.967, -53.134, -236.759, -132.389, -13.820, -170.547, -68.391, -145.899,
        -78.755, -238.332, -117.400, -9.954e-07, -107.239, -93.447,
    ],
    [
        -168.603, -126.925, -85.267, -74.554, -185.387, -1.762, -106.132, -224.701, -67.974, -170.130, -92.621,
        -159.766, -0.188, -121.121, -238.521, -131.282, -145.074,
    ],
)  # fmt: skip

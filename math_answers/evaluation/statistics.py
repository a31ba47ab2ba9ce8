"""Statistics of samples: pass@k, majority vote, bootstrap intervals over problems, paired differences."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

CONFIDENCE = 0.95

# Numbers that are resampled at a time: 32 MB, whatever the benchmark and the number of resamples
_BATCH_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference of means, B − A, and the two-sided p-value of "no difference"."""

    p_value: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """
    Unbiased estimate of the probability that at least one of `k` of a problem's samples is right: `1 − C(n−c, k) /
    C(n, k)`, as a product, since the binomials overflow (Chen et al., arXiv 2107.03374).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of every problem, got {samples}. Lower k or raise n.")
    if not 0 <= correct <= samples:
        raise ValueError(f"`correct` must be in 0…{samples}, got {correct}.")
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def majority_score(answers: Sequence[Hashable | None], rewards: Sequence[float]) -> float:
    """
    Score of the answer that most samples give; samples of one answer may differ in it, if one of them timed out.

    A sample without an answer (`None`) has no vote; if none has one, the score is 0. If several answers tie, one of
    them would be drawn: the score is its expectation, the mean over the tied answers.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = {answer for answer, count in votes.items() if count == most}
    return float(np.mean([reward for answer, reward in zip(answers, rewards, strict=True) if answer in tied]))


def estimate(groups: Sequence[np.ndarray], resamples: int, seed: int) -> list[Estimate]:
    """
    For each metric the mean of the groups' means with its percentile interval; problems are resampled within each
    group. A group is a benchmark, `(problems, metrics)`.
    """
    values, bootstrap = _bootstrap(groups, resamples, seed)
    return [Estimate(*map(float, row)) for row in zip(values, *bootstrap.confidence_interval, strict=True)]


def paired_difference(
    groups_a: Sequence[np.ndarray], groups_b: Sequence[np.ndarray], resamples: int, seed: int
) -> list[Difference]:
    """
    [`estimate`] of the difference B − A over the same problems, row by row, with its p-value.

    The p-value is twice the share of resampled differences on the far side of 0, counting 0 and one more of each: it is
    never 0. It is at least the p-value of a test of signs: for m problems that differ, all in one direction, 2^(1 − m).
    From six such problems on, it is below 0.05 if the interval leaves 0 out.
    """
    if [a.shape for a in groups_a] != [b.shape for b in groups_b]:
        raise ValueError("A paired difference needs the same problems and metrics on both sides.")
    differences = [b - a for a, b in zip(groups_a, groups_b, strict=True)]
    values, bootstrap = _bootstrap(differences, resamples, seed)
    # Rounding must not put a difference of 0 on one side of it
    means = np.where(np.abs(bootstrap.bootstrap_distribution) < 1e-12, 0.0, bootstrap.bootstrap_distribution)
    tail = np.minimum((means <= 0).sum(axis=-1), (means >= 0).sum(axis=-1))
    differing = sum((np.abs(group) > 1e-12).sum(axis=0) for group in differences)  # (metrics,)
    p_values = np.clip((tail + 1) * smallest_p_value(resamples), np.minimum(1.0, 2.0 ** (1 - differing)), 1.0)
    columns = zip(values, *bootstrap.confidence_interval, p_values, strict=True)
    return [Difference(*map(float, row)) for row in columns]


def student_t(values: Sequence[float] | np.ndarray, lowest: float = -np.inf, highest: float = np.inf) -> Estimate:
    """The mean of `values` and its 95 % Student-t interval, cut to `lowest` … `highest`; NaN ends for one value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, np.nan, np.nan)
    half = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * float(scipy.stats.sem(values))
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest))


def smallest_p_value(resamples: int) -> float:
    """The smallest two-sided p-value that random resamples can show."""
    return 2 / (resamples + 1)


def _bootstrap(groups: Sequence[np.ndarray], resamples: int, seed: int) -> tuple[np.ndarray, Any]:
    """
    The mean of the means of the groups, `(metrics,)`, and scipy's bootstrap of it, whose distribution is `(metrics,
    resamples)`: the same resamples serve every metric.
    """
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("There is no problem to take a mean over.")
    # scipy asks for two observations; of one problem every resample is that problem
    groups = [np.repeat(group, 2, axis=0) if len(group) == 1 else group for group in groups]
    batch = max(1, _BATCH_NUMBERS // sum(group.size for group in groups))
    settings = {"confidence_level": CONFIDENCE, "method": "percentile", "batch": batch, "rng": seed}
    bootstrap = scipy.stats.bootstrap(groups, _mean_of_means, axis=0, n_resamples=resamples, **settings)
    return _mean_of_means(*groups, axis=0), bootstrap


def _mean_of_means(*groups: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([group.mean(axis=axis) for group in groups], axis=0)


def default_ks(samples: int) -> list[int]:
    """Powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})

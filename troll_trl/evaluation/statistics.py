"""Statistics of samples: pass@k, and bootstrap intervals over problems."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """
    Estimate without bias the probability that at least one of `k` of a problem's samples is right: `1 − C(n−c, k) /
    C(n, k)`, as a product, since the binomials overflow (Chen et al., arXiv 2107.03374).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of every problem, got {samples}. Lower k or raise n.")
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def default_ks(samples: int) -> list[int]:
    """List the powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def estimate(groups: Sequence[np.ndarray], resamples: int, seed: int) -> list[Estimate]:
    """
    Compute for each metric the mean of the groups' means, with its percentile bootstrap interval.

    Args:
        groups (`Sequence[np.ndarray]`):
            `(problems, metrics)` for each benchmark, in which each problem has one row, whatever its number of samples:
            the samples of a problem are alike, and an interval over samples would be too narrow. For a paired
            comparison, the differences of two models on the same problems.
        resamples (`int`):
            How often problems are drawn, within each group.
        seed (`int`):
            Seed of the draws.
    """
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("There is no problem to take a mean over.")
    # scipy needs two observations. With one problem, every resample is this problem
    groups = [np.repeat(group, 2, axis=0) if len(group) == 1 else group for group in groups]
    batch = max(1, _BATCH_NUMBERS // sum(group.size for group in groups))
    settings = {"confidence_level": CONFIDENCE, "method": "percentile", "batch": batch, "rng": seed}
    found = scipy.stats.bootstrap(groups, _mean_of_means, axis=0, n_resamples=resamples, **settings)
    columns = zip(_mean_of_means(*groups, axis=0), *found.confidence_interval, strict=True)
    return [Estimate(*map(float, column)) for column in columns]


def _mean_of_means(*groups: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([group.mean(axis=axis) for group in groups], axis=0)

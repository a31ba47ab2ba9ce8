"""Statistics of samples: pass@k, majority vote, bootstrap intervals over problems, paired differences."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95

# Numbers that one chunk of resamples holds: 32 MB, whatever the benchmark and the number of resamples
_CHUNK_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """
    A mean over problems.

    Parameters:
        value (`float`):
            The mean.
        low (`float`):
            Lower end of its 95 % interval.
        high (`float`):
            Upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """
    A paired difference of means, B − A.

    Parameters:
        p_value (`float`):
            Two-sided, of "no difference".
    """

    p_value: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """
    Unbiased estimate of the probability that at least one of `k` samples is right: `1 − C(n−c, k) / C(n, k)`, as a
    product, since the binomials overflow (Chen et al., arXiv 2107.03374).

    Args:
        samples (`int`):
            n, samples of the problem.
        correct (`int`):
            c, those that are right.
        k (`int`):
            Samples drawn, 1 to n.

    Returns:
        `float`: between 0 and 1.

    Raises:
        ValueError: `k` or `correct` is out of range.
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
    Score of the answer that most samples give.

    A sample without an answer has no vote; if none has one, the score is 0. Where several answers tie, one of them
    would be drawn: the score is its expectation, the mean over the tied answers. The order of the samples has no say.

    Args:
        answers (`Sequence[Hashable | None]`):
            Normalised answer of each sample, `None` for none.
        rewards (`Sequence[float]`):
            Reward of each sample. If samples of one answer differ in it (one of them timed out), their mean counts.

    Returns:
        `float`: between 0 and 1.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = {answer for answer, count in votes.items() if count == most}
    return float(np.mean([reward for answer, reward in zip(answers, rewards, strict=True) if answer in tied]))


def bootstrap_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """
    Means over problems drawn with replacement.

    Args:
        values (`np.ndarray`):
            (problems, metrics): the same resamples serve every metric.
        resamples (`int`):
            Number of resamples.
        seed (`int`):
            Seed of the resamples.

    Returns:
        `np.ndarray`: (resamples, metrics).
    """
    problems, metrics = values.shape
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_NUMBERS // (problems * metrics))
    means = np.empty((resamples, metrics))
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        means[start : start + rows] = values[generator.integers(problems, size=(rows, problems))].mean(axis=1)
    return means


def estimate(groups: Sequence[np.ndarray], resamples: int, seed: int) -> list[Estimate]:
    """
    Mean of the groups' means, with its percentile interval; problems are resampled within each group.

    Args:
        groups (`Sequence[np.ndarray]`):
            A (problems, metrics) array for each benchmark; one alone for the estimate of one benchmark.
        resamples (`int`):
            Number of bootstrap resamples.
        seed (`int`):
            Seed of the resamples.

    Returns:
        `list[Estimate]`: one for each metric.
    """
    values, means = _means(groups, resamples, seed)
    low, high = _interval(means)
    return [Estimate(float(values[i]), float(low[i]), float(high[i])) for i in range(len(values))]


def paired_difference(
    groups_a: Sequence[np.ndarray], groups_b: Sequence[np.ndarray], resamples: int, seed: int
) -> list[Difference]:
    """
    Difference B − A of the means over the same problems, with its percentile interval and p-value.

    The p-value is that of the interval: twice the share of resampled differences on the far side of 0 (0 included,
    and one more of each, so that it is never 0). It is below 0.05 where the interval leaves 0 out.

    Args:
        groups_a (`Sequence[np.ndarray]`):
            A (problems, metrics) array for each benchmark.
        groups_b (`Sequence[np.ndarray]`):
            Likewise; row by row the same problems.
        resamples (`int`):
            Number of bootstrap resamples.
        seed (`int`):
            Seed of the resamples.

    Returns:
        `list[Difference]`: one for each metric.

    Raises:
        ValueError: shapes differ.
    """
    if [a.shape for a in groups_a] != [b.shape for b in groups_b]:
        raise ValueError("A paired difference needs the same problems and metrics on both sides.")
    values, means = _means([b - a for a, b in zip(groups_a, groups_b, strict=True)], resamples, seed)
    # Rounding must not put a difference of 0 on one side of it
    means[np.abs(means) < 1e-12] = 0.0
    tail = np.minimum((means <= 0).sum(axis=0), (means >= 0).sum(axis=0))
    p_values = np.minimum(1.0, 2 * (tail + 1) / (resamples + 1))
    low, high = _interval(means)
    return [Difference(*map(float, row)) for row in zip(values, low, high, p_values, strict=True)]


def _means(groups: Sequence[np.ndarray], resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("There is no problem to take a mean over.")
    values = np.mean([group.mean(axis=0) for group in groups], axis=0)
    # A seed for each group: equal resamples in groups of equal size would correlate them
    means = [bootstrap_means(group, resamples, seed + index) for index, group in enumerate(groups)]
    return values, np.mean(means, axis=0)


def _interval(means: np.ndarray) -> np.ndarray:
    return np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)


def default_ks(samples: int) -> list[int]:
    """Powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def problem_metrics(
    rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[Hashable | None]], ks: Sequence[int]
) -> dict[str, np.ndarray]:
    """
    Metrics of each problem, whose means over problems are the metrics of a benchmark.

    Args:
        rewards (`Sequence[Sequence[float]]`):
            Rewards of the samples of each problem; 1 counts as right.
        answers (`Sequence[Sequence[Hashable | None]]`):
            Normalised answers of the same samples.
        ks (`Sequence[int]`):
            k of each pass@k.

    Returns:
        `dict[str, np.ndarray]`: (problems,) by name: `mean`, `pass@k` for each k, `maj`.

    Raises:
        ValueError: a k is above the number of samples of a problem.
    """
    columns: dict[str, list[float]] = {"mean": [float(np.mean(of_problem)) for of_problem in rewards]}
    for k in ks:
        columns[f"pass@{k}"] = [
            pass_at_k(len(of_problem), sum(reward == 1 for reward in of_problem), k) for of_problem in rewards
        ]
    columns["maj"] = [majority_score(*of_problem) for of_problem in zip(answers, rewards, strict=True)]
    return {name: np.array(column) for name, column in columns.items()}

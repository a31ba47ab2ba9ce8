"""The series of a report: how they are called, thinned out, averaged over seeds, and what they end with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from troll_trl.report.runs import PEAK_MEMORY, TOKENS_PER_SECOND, Group, Run

MAX_POINTS = 120  # a longer curve is averaged over neighbouring lines: more points hide each other
FINAL_SHARE = 0.1  # "at the end" is the last tenth of a run's updates


@dataclass(frozen=True)
class Series:
    """
    One metric, and how it is shown.

    Args:
        key (`str`):
            Its name in a log line.
        title (`str`):
            What it is.
        unit (`str`, *optional*, defaults to `""`):
            Unit on its axis; `"%"` for a share of 1.
        log (`bool`, *optional*, defaults to `False`):
            Draw on a logarithmic axis.
        largest (`bool`, *optional*, defaults to `False`):
            It is a maximum: neighbours are combined by their maximum, and the table shows that of the whole run.
        lowest (`float`, *optional*):
            What it cannot fall below.
    """

    key: str
    title: str
    unit: str = ""
    log: bool = False
    largest: bool = False
    lowest: float | None = 0.0

    @property
    def highest(self) -> float:
        return 1.0 if self.unit == "%" else math.inf


ENTROPY = Series("entropy", "Entropy of the policy", "nats per token")
PROJECTED = Series("troll/projected_fraction", "Projected tokens", "%")
KL_MAX_BEFORE = Series("troll/policy_kl_max", "Largest KL(p‖q) before", "nats", log=True, largest=True)
KL_MAX_AFTER = Series("troll/kl_max", "Largest KL(π‖q) after", "nats", log=True, largest=True)
KL_MEAN_BEFORE = Series("troll/policy_kl_mean", "Mean KL(p‖q) before", "nats", log=True)
KL_MEAN_AFTER = Series("troll/kl_mean", "Mean KL(π‖q) after", "nats", log=True)
ETA = Series("troll/eta_mean", "Multiplier η, mean over projected tokens")
REGRESSION = Series("troll/regression", "Regression KL(p‖π), mean", "nats", log=True)
SUPPORT = Series("troll/support_size_mean", "Kept tokens per position, mean", "tokens")
CLIPPED = Series("clip_ratio/region_mean", "Clipped tokens", "%")
CLIPPED_LOW = Series("clip_ratio/low_mean", "Clipped at the lower end", "%")
CLIPPED_HIGH = Series("clip_ratio/high_mean", "Clipped at the upper end", "%")
LENGTH = Series("completions/mean_length", "Completion length, mean", "tokens")
TRUNCATED = Series("completions/clipped_ratio", "Truncated completions", "%")
GRADIENT = Series("grad_norm", "Gradient norm, before its clip")
THROUGHPUT = Series(TOKENS_PER_SECOND, "Throughput, prompts and completions", "tokens/s")
MEMORY = Series(PEAK_MEMORY, "Peak memory of a process", "GiB")


def reward_series(groups: Sequence[Group], success: str | None = None) -> list[Series]:
    """
    The total reward, then one series per reward function; those that are a success rate in per cent.

    Args:
        groups (`Sequence[Group]`):
            All runs.
        success (`str`, *optional*):
            Name of the reward function whose mean is the success rate. By default, all with `accuracy` in their name.

    Raises:
        ValueError: no run logged a reward function called `success`.
    """
    keys = {key for group in groups for run in group.runs for line in run.updates.values() for key in line}
    names = sorted(key.split("/")[1] for key in keys if key.startswith("rewards/") and key.endswith("/mean"))
    if success is not None and success not in names:
        raise ValueError(f"No run logged a reward function {success!r}; there are: {', '.join(names) or 'none'}.")
    rates, others = [], []
    for name in names:
        key = f"rewards/{name}/mean"
        if name == success or (success is None and "accuracy" in name and _within(groups, key, 0, 1)):
            rates.append(Series(key, f"Success rate ({name})", "%"))
        else:
            others.append(Series(key, f"Reward: {name}", lowest=None))
    total = [Series("reward", "Reward, weighted sum of all functions", lowest=None)]
    if len(names) == 1 and _equal(groups, "reward", f"rewards/{names[0]}/mean"):
        total = []  # a single function of weight 1: the same curve again
    return rates + total + others


def _within(groups: Sequence[Group], key: str, low: float, high: float) -> bool:
    return all(low <= y <= high for group in groups for run in group.runs for y in run.series(key)[1])


def _equal(groups: Sequence[Group], key: str, other: str) -> bool:
    runs = [run for group in groups for run in group.runs]
    return all(line.get(key) == line.get(other) for run in runs for line in run.updates.values())


# -- Curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Mean, smallest and largest over seeds, at common `x`; all `(n,)`."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(run: Run, series: Series, against_time: bool, prefix: str = "") -> tuple[np.ndarray, np.ndarray] | None:
    """
    One run's points of a series, at most `MAX_POINTS`.

    Args:
        run ([`Run`]), series ([`Series`]):
            What to take.
        against_time (`bool`):
            Whether `x` is seconds of training in place of updates.
        prefix (`str`, *optional*):
            `"eval_"` for held-out problems.

    Returns:
        `x` and `y`, both `(n,)`, or `None` where the run has not logged it. Zeros are no points of a logarithmic axis.
    """
    x, y = run.series(prefix + series.key)
    seconds = run.seconds(x) if against_time else x
    if len(x) == 0 or seconds is None:
        return None
    x, y = thin_out(seconds, y, series.largest)
    if series.log:
        x, y = x[y > 0], y[y > 0]
    return (x, y) if len(x) else None


def thin_out(x: np.ndarray, y: np.ndarray, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Combine neighbours until at most `MAX_POINTS` are left: `x` by their mean, `y` by their mean or maximum."""
    size = math.ceil(len(x) / MAX_POINTS)
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    means = np.add.reduceat(y, starts) / counts
    return np.add.reduceat(x, starts) / counts, np.maximum.reduceat(y, starts) if largest else means


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """Seeds combined where all of them have values, linearly interpolated to all their `x`; empty if they never do."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = np.unique(np.concatenate([x for x, _ in curves]))
    x = x[(first <= x) & (x <= last)]
    values = np.stack([np.interp(x, *points) for points in curves])
    return Band(x, values.mean(0), values.min(0), values.max(0))


# -- What a run ends with ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """
    A mean over seeds and its 95 % interval.

    Attributes:
        mean (`float`):
            Over seeds.
        interval (`tuple[float, float]`, *optional*):
            Student's t over two or more seeds, cut to the values that are possible; `None` for one seed.
        seeds (`int`):
            How many.
    """

    mean: float
    interval: tuple[float, float] | None
    seeds: int


def final(group: Group, series: Series, prefix: str = "", first: bool = False) -> Estimate | None:
    """
    A series at the end of its runs: the mean over the last tenth of the updates, of a maximum that of the whole run,
    of a held-out series its last value (or its first).

    Returns:
        [`Estimate`] over the seeds that logged it; `None` if none did.
    """
    values = []
    for run in group.runs:
        steps, y = run.series(prefix + series.key)
        if len(y) == 0:
            continue
        if prefix:
            values.append(y[0 if first else -1])
        elif series.largest:
            values.append(y.max())
        else:
            late = y[steps > (1 - FINAL_SHARE) * run.last_update]
            values.append(late.mean() if len(late) else y[-1])
    return estimate(values, -math.inf if series.lowest is None else series.lowest, series.highest)


def estimate(values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf) -> Estimate | None:
    """Mean of `values` and its 95 % Student-t interval, cut to `lowest` … `highest`; `None` without values."""
    if len(values) == 0:
        return None
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, None, 1)
    half = t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, (max(mean - half, lowest), min(mean + half, highest)), len(values))


# The 97.5 % quantile of Student's t for 1 … 10 degrees of freedom; scipy is no dependency
_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution, to 1e-3."""
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    # Cornish-Fisher expansion around the normal quantile (Abramowitz and Stegun 26.7.5), here exact to 1e-4
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)

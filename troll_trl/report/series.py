"""The series of a report: how they are called, thinned out, averaged over seeds, and what they end with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from troll_trl.report.runs import PEAK_MEMORY, TOKENS_PER_SECOND, Group, ReportError, Run

MAX_POINTS = 120  # a longer curve is averaged over neighbouring lines: more points hide each other
HELD_OUT = "eval_"  # before the name of a metric on held-out problems
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
            Unit on its axis; `"% of …"` for a share of 1.
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
    def is_share(self) -> bool:
        return self.unit.startswith("%")

    @property
    def highest(self) -> float:
        return 1.0 if self.is_share else math.inf


ENTROPY = Series("entropy", "Entropy of the policy", "nats per token")
PROJECTED = Series("troll/projected_fraction", "Projected tokens", "% of tokens")
KL_MAX_BEFORE = Series("troll/policy_kl_max", "Largest KL(p‖q), before the projection", "nats", log=True, largest=True)
KL_MAX_AFTER = Series("troll/kl_max", "Largest KL(π‖q), after the projection", "nats", log=True, largest=True)
KL_MEAN_BEFORE = Series("troll/policy_kl_mean", "Mean KL(p‖q), before the projection", "nats", log=True)
KL_MEAN_AFTER = Series("troll/kl_mean", "Mean KL(π‖q), after the projection", "nats", log=True)
ETA = Series("troll/eta_mean", "Mean multiplier η of the projected tokens")
REGRESSION = Series("troll/regression", "Mean regression KL(p‖π)", "nats", log=True)
SUPPORT = Series("troll/support_size_mean", "Mean number of kept tokens per position", "tokens")
CLIPPED = Series("clip_ratio/region_mean", "Clipped tokens", "% of tokens")
CLIPPED_LOW = Series("clip_ratio/low_mean", "Clipped at the lower end", "% of tokens")
CLIPPED_HIGH = Series("clip_ratio/high_mean", "Clipped at the upper end", "% of tokens")
LENGTH = Series("completions/mean_length", "Mean completion length", "tokens")
TRUNCATED = Series("completions/clipped_ratio", "Truncated completions", "% of completions")
GRADIENT = Series("grad_norm", "Gradient norm, before gradient clipping")
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
        ReportError: no run logged a reward function called `success`.
    """
    keys = {key for group in groups for run in group.runs for line in run.updates.values() for key in line}
    keys = {key.removeprefix(HELD_OUT) for key in keys}  # a run may have been evaluated only
    names = sorted(key.split("/")[1] for key in keys if key.startswith("rewards/") and key.endswith("/mean"))
    if success is not None and success not in names:
        raise ReportError(f"No run logged a reward function {success!r}; there are: {', '.join(names) or 'none'}.")
    rates, others = [], []
    for name in names:
        key = f"rewards/{name}/mean"
        if name == success or (success is None and "accuracy" in name and _within(groups, key, 0, 1)):
            rates.append(Series(key, f"Success rate ({name})", "% of completions"))
        else:
            others.append(Series(key, f"Reward: {name}", lowest=None))
    total = [Series("reward", "Reward, weighted sum of all functions", lowest=None)]
    if len(names) == 1 and _equal(groups, "reward", f"rewards/{names[0]}/mean"):
        total = []  # a single function of weight 1: the same curve again
    return rates + total + others


def _within(groups: Sequence[Group], key: str, low: float, high: float) -> bool:
    series = [run.series(prefix + key)[1] for group in groups for run in group.runs for prefix in ("", HELD_OUT)]
    return all(low <= y <= high for values in series for y in values)


def _equal(groups: Sequence[Group], key: str, other: str) -> bool:
    lines = [line for group in groups for run in group.runs for line in run.updates.values()]
    return all(line.get(prefix + key) == line.get(prefix + other) for line in lines for prefix in ("", HELD_OUT))


# -- Curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Mean, smallest and largest over seeds, at common `x`; all `(n,)`."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(run: Run, series: Series, against_time: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """
    One run's points of a series on training problems, at most `MAX_POINTS`.

    Args:
        run ([`Run`]), series ([`Series`]):
            What to take.
        against_time (`bool`):
            Whether `x` is seconds of training in place of updates.

    Returns:
        `x` and `y`, both `(n,)`, or `None` where the run has not logged it. Zeros are no points of a logarithmic axis.
    """
    x, y = run.series(series.key)
    seconds = run.seconds(x) if against_time else x
    if len(x) == 0 or seconds is None:
        return None
    generations = len(run.series("num_tokens")[0])
    x, y = thin_out(seconds, y, series.largest, lines_per_batch=round(len(x) / generations) if generations else 1)
    if series.log:
        x, y = x[y > 0], y[y > 0]
    return (x, y) if len(x) else None


def held_out(group: Group, series: Series, against_time: bool) -> Band | None:
    """A series on held-out problems, at the updates at which every run was evaluated; `None` if there are none."""
    runs = [dict(zip(*run.series(HELD_OUT + series.key), strict=True)) for run in group.runs]
    steps = np.array(sorted(set.intersection(*(set(run) for run in runs))))
    clocks = [clock for run in group.runs if (clock := run.seconds(steps)) is not None]
    if len(steps) == 0 or (against_time and len(clocks) < len(runs)):
        return None
    x = np.mean(clocks, axis=0) if against_time else steps
    values = np.array([[run[step] for step in steps] for run in runs])
    return Band(x, values.mean(0), values.min(0), values.max(0))


def thin_out(x: np.ndarray, y: np.ndarray, largest: bool, lines_per_batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """
    Combine neighbours until at most `MAX_POINTS` are left: `x` by their mean, `y` by their mean or maximum.

    Whole rollout batches are combined, of `lines_per_batch` lines each: within one, the policy drifts from the old
    policy, and groups of other sizes would show a beat of that.
    """
    if len(x) <= MAX_POINTS:
        return x, y
    batch = max(lines_per_batch, 1)
    size = batch * math.ceil(len(x) / MAX_POINTS / batch)
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
    A mean and its 95 % interval, by Student's t and cut to the values that are possible.

    Attributes:
        mean (`float`):
            Over seeds.
        interval (`tuple[float, float]`, *optional*):
            Of the mean over two or more seeds. For one seed, of the mean over its last log lines, which says nothing
            about other seeds; `None` where there is but one value.
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
    lowest = -math.inf if series.lowest is None else series.lowest
    values, late = [], np.array([])
    for run in group.runs:
        steps, y = run.series(prefix + series.key)
        if len(y) == 0:
            continue
        if prefix:
            late = y[:1] if first else y[-1:]
        elif series.largest:
            late = y.max(keepdims=True)
        else:
            late = y[steps > (1 - FINAL_SHARE) * run.last_update]
            late = late if len(late) else y[-1:]
        values.append(float(late.mean()))
    if not values:
        return None
    interval = t_interval(values if len(values) > 1 else late, lowest, series.highest)
    return Estimate(float(np.mean(values)), interval, len(values))


def t_interval(values: Sequence[float] | np.ndarray, lowest: float, highest: float) -> tuple[float, float] | None:
    """95 % Student-t interval of the mean of `values`, cut to `lowest` … `highest`; `None` for fewer than two."""
    if len(values) < 2:
        return None
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = t_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    return max(mean - half, lowest), min(mean + half, highest)


# The 97.5 % quantile of Student's t for 1 … 10 degrees of freedom; scipy is no dependency
_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution, to 1e-4 of it."""
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    # Cornish-Fisher expansion around the normal quantile (Abramowitz and Stegun, 26.7.5)
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3

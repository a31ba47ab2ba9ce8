"""The metrics of a report: how they are called, thinned out, averaged over seeds, and what they end with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

from troll_trl.report.runs import PEAK_MEMORY, TOKENS_PER_SECOND, Group, ReportError, Run

MAX_POINTS = 120  # a longer curve is averaged over neighbouring lines: more points hide each other
HELD_OUT = "eval_"  # before the name of a metric on held-out problems
FINAL_SHARE = 0.1  # "at the end" is the last tenth of a run's updates


@dataclass(frozen=True)
class Metric:
    """One metric, and how it is shown."""

    key: str  # its name in a log line
    title: str
    unit: str = ""  # "% of …" for a share of 1
    log: bool = False  # on a logarithmic axis
    largest: bool = False  # it is a maximum: combined by the maximum, and the table shows that of the whole run
    lowest: float = 0.0  # what it cannot fall below

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("%")

    @property
    def highest(self) -> float:
        return 1.0 if self.is_share else math.inf


ENTROPY = Metric("entropy", "Entropy of the policy", "nats per token")
PROJECTED = Metric("troll/projected_fraction", "Projected tokens", "% of tokens")
KL_MAX_BEFORE = Metric("troll/policy_kl_max", "Largest KL(p‖q), before the projection", "nats", log=True, largest=True)
KL_MAX_AFTER = Metric("troll/kl_max", "Largest KL(π‖q), after the projection", "nats", log=True, largest=True)
KL_MEAN_BEFORE = Metric("troll/policy_kl_mean", "Mean KL(p‖q), before the projection", "nats", log=True)
KL_MEAN_AFTER = Metric("troll/kl_mean", "Mean KL(π‖q), after the projection", "nats", log=True)
ETA = Metric("troll/eta_mean", "Mean multiplier η of the projected tokens")
REGRESSION = Metric("troll/regression", "Mean regression KL(p‖π)", "nats", log=True)
SUPPORT = Metric("troll/support_size_mean", "Mean number of kept tokens per position", "tokens")
CLIPPED = Metric("clip_ratio/region_mean", "Clipped tokens", "% of tokens")
CLIPPED_LOW = Metric("clip_ratio/low_mean", "Clipped at the lower end", "% of tokens")
CLIPPED_HIGH = Metric("clip_ratio/high_mean", "Clipped at the upper end", "% of tokens")
LENGTH = Metric("completions/mean_length", "Mean completion length", "tokens")
TRUNCATED = Metric("completions/clipped_ratio", "Truncated completions", "% of completions")
GRADIENT = Metric("grad_norm", "Gradient norm, before gradient clipping")
THROUGHPUT = Metric(TOKENS_PER_SECOND, "Throughput, prompts and completions", "tokens/s")
MEMORY = Metric(PEAK_MEMORY, "Peak memory of a process", "GiB")


def reward_metrics(groups: Sequence[Group], success: str | None = None) -> list[Metric]:
    """
    The total reward, and each reward function; success rates come first, in per cent. The mean of the function that
    `success` names is one, by default those with `accuracy` in their name.
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
            rates.append(Metric(key, f"Success rate ({name})", "% of completions"))
        else:
            others.append(Metric(key, f"Reward: {name}", lowest=-math.inf))
    total = [Metric("reward", "Reward, weighted sum of all functions", lowest=-math.inf)]
    if len(names) == 1 and _equal(groups, "reward", f"rewards/{names[0]}/mean"):
        total = []  # a single function of weight 1: the same curve again
    return rates + total + others


def _within(groups: Sequence[Group], key: str, low: float, high: float) -> bool:
    logged = [run.points(prefix + key)[1] for group in groups for run in group.runs for prefix in ("", HELD_OUT)]
    return all(low <= y <= high for values in logged for y in values)


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


def curve(run: Run, metric: Metric, against_time: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """
    One run's points on training problems, `x` (updates, or seconds of training) and `y`, both `(n,)` with `n` at most
    `MAX_POINTS`; `None` where the run has not logged it. Zeros are no points of a logarithmic axis.
    """
    x, y = run.points(metric.key)
    seconds = run.seconds(x) if against_time else x
    if len(x) == 0 or seconds is None:
        return None
    generations = len(run.points("num_tokens")[0])
    x, y = thin_out(seconds, y, metric.largest, lines_per_batch=round(len(x) / generations) if generations else 1)
    if metric.log:
        x, y = x[y > 0], y[y > 0]
    return (x, y) if len(x) else None


def held_out(group: Group, metric: Metric, against_time: bool) -> Band | None:
    """A metric on held-out problems, at the updates at which every run was evaluated; `None` if there are none."""
    runs = [dict(zip(*run.points(HELD_OUT + metric.key), strict=True)) for run in group.runs]
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
    The mean over seeds and its 95 % interval, by Student's t and cut to the values that are possible. For one seed the
    interval is that of the mean over its last log lines, which says nothing about other seeds; `None` where there is
    but one value.
    """

    mean: float
    interval: tuple[float, float] | None
    seeds: int


def final(group: Group, metric: Metric, prefix: str = "", first: bool = False) -> Estimate | None:
    """
    A metric at the end of its runs, over the seeds that logged it: the mean over the last tenth of the updates, of a
    maximum that of the whole run, of a held-out metric its last value (or its first).
    """
    values, late = [], np.array([])
    for run in group.runs:
        steps, y = run.points(prefix + metric.key)
        if len(y) == 0:
            continue
        if prefix:
            late = y[:1] if first else y[-1:]
        elif metric.largest:
            late = y.max(keepdims=True)
        else:
            late = y[steps > (1 - FINAL_SHARE) * run.last_update]
            late = late if len(late) else y[-1:]
        values.append(float(late.mean()))
    if not values:
        return None
    interval = t_interval(values if len(values) > 1 else late, metric.lowest, metric.highest)
    return Estimate(float(np.mean(values)), interval, len(values))


def t_interval(values: Sequence[float] | np.ndarray, lowest: float, highest: float) -> tuple[float, float] | None:
    """95 % Student-t interval of the mean of `values`, cut to `lowest` … `highest`; `None` for fewer than two."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * error
    return max(mean - half, lowest), min(mean + half, highest)

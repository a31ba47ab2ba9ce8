"""The metrics of a report: their names, their curves over seeds, and the values that runs end with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from math_answers.evaluation.statistics import Estimate, student_t
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
    largest: bool = False  # a maximum: curves combine it by the maximum, and the table shows that of the run
    lowest: float = 0.0  # what it cannot fall below

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("%")


ENTROPY = Metric("entropy", "Entropy of the policy", "nats per token")
PROJECTED = Metric("troll/projected_fraction", "Projected tokens", "% of tokens")
KL_MAX_BEFORE = Metric("troll/policy_kl_max", "Largest KL(p‖q), before the projection", "nats", log=True, largest=True)
KL_MAX_AFTER = Metric("troll/kl_max", "Largest KL(π‖q), after the projection", "nats", log=True, largest=True)
KL_MEAN_BEFORE = Metric("troll/policy_kl_mean", "Mean KL(p‖q), before the projection", "nats", log=True)
KL_MEAN_AFTER = Metric("troll/kl_mean", "Mean KL(π‖q), after the projection", "nats", log=True)
ETA = Metric("troll/eta_mean", "Mean multiplier η of the projected tokens")
REGRESSION = Metric("troll/regression", "Mean regression KL(p‖π)", "nats", log=True)
SUPPORT = Metric("troll/support_size_mean", "Mean number of kept tokens per position", "tokens")
PENALIZED = Metric("troll/penalized_fraction", "Penalized tokens", "% of tokens")
CLIPPED = Metric("clip_ratio/region_mean", "Clipped tokens", "% of tokens")
CLIPPED_LOW = Metric("clip_ratio/low_mean", "Clipped at the lower end", "% of tokens")
CLIPPED_HIGH = Metric("clip_ratio/high_mean", "Clipped at the upper end", "% of tokens")
MASKED = Metric("troll/masked_fraction", "Masked tokens", "% of tokens")
MASKED_NEGATIVE = Metric("troll/masked_fraction_negative", "Masked, of negative advantage", "% of these")
MASKED_POSITIVE = Metric("troll/masked_fraction_positive", "Masked, of positive advantage", "% of these")
DIVERGENCE_MAX = Metric("troll/divergence_max", "Largest divergence that the mask saw", log=True, largest=True)
DIVERGENCE_MEAN = Metric("troll/divergence_mean", "Mean divergence that the mask saw", log=True)
LENGTH = Metric("completions/mean_length", "Mean completion length", "tokens")
TRUNCATED = Metric("completions/clipped_ratio", "Truncated completions", "% of completions")
GRADIENT = Metric("grad_norm", "Gradient norm, before gradient clipping")
THROUGHPUT = Metric(TOKENS_PER_SECOND, "Throughput, prompts and completions", "tokens/s")
MEMORY = Metric(PEAK_MEMORY, "Peak memory of a process", "GiB", largest=True)


def reward_metrics(groups: Sequence[Group], success: str | None = None) -> list[Metric]:
    """The total reward, and each reward function; success rates come first, in per cent. The function that `success`
    names is a success rate; by default every function with `accuracy` in its name is one."""
    log = pd.concat([run.log for group in groups for run in group.runs])
    held_out = log.filter(regex=f"^{HELD_OUT}").rename(columns=lambda key: key.removeprefix(HELD_OUT))
    log = pd.concat([log, held_out])  # some functions are only evaluated
    means = log.filter(regex="^rewards/.*/mean$").sort_index(axis=1)
    names = [key.split("/")[1] for key in means]
    if success is not None and success not in names:
        raise ReportError(f"No run logged a reward function {success!r}; there are: {', '.join(names) or 'none'}.")
    found = [Metric("reward", "Reward, weighted sum of all functions", lowest=-math.inf)]
    if len(names) == 1 and "reward" in log and log["reward"].equals(means.squeeze(axis=1)):
        found = []  # a single function of weight 1: the total is the same curve again
    for name, key in zip(names, means, strict=True):
        if name == success or (success is None and "accuracy" in name and means[key].dropna().between(0, 1).all()):
            found.append(Metric(key, f"Success rate ({name})", "% of completions"))
        else:
            found.append(Metric(key, f"Reward: {name}", lowest=-math.inf))
    return sorted(found, key=lambda metric: not metric.is_share)


def curve(run: Run, metric: Metric, against_time: bool) -> pd.Series:
    """One run's values on training problems; a logarithmic axis drops zeros. Neighbours are combined until at most
    `MAX_POINTS` are left: places by their mean, values by their mean or maximum."""
    values = run.values(metric.key, against_time)
    if len(values) > MAX_POINTS:
        # Whole rollout batches: within a batch the policy drifts, and other groups would show a beat of that drift
        batch = max(round(len(values) / (len(run.values("num_tokens")) or len(values))), 1)  # its number of lines
        number = np.arange(len(values)) // (batch * math.ceil(len(values) / MAX_POINTS / batch))
        places, groups = values.index.to_series().groupby(number).mean(), values.groupby(number)
        values = (groups.max() if metric.largest else groups.mean()).set_axis(places)
    return values[values > 0] if metric.log else values


def curves(group: Group, metric: Metric, against_time: bool) -> list[pd.Series]:
    """The [`curve`]s of the runs that logged a metric."""
    return [one for run in group.runs if len(one := curve(run, metric, against_time))]


def band(curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Columns `mean`, `min` and `max` over seeds, linearly interpolated to the places of all of them. The band ends
    where the first seed ends; it is empty if the seeds share no place."""
    values = pd.concat(curves, axis=1, sort=True).interpolate("index", limit_area="inside").dropna()
    return _spread(values)


def _spread(values: pd.DataFrame) -> pd.DataFrame:
    """Mean, smallest and largest of each row. (`DataFrame.agg` raises for no rows in some versions of pandas.)"""
    return pd.DataFrame({"mean": values.mean(axis=1), "min": values.min(axis=1), "max": values.max(axis=1)})


def held_out(group: Group, metric: Metric, against_time: bool) -> pd.DataFrame:
    """As [`band`], for a reward on held-out problems, at the updates at which every run was evaluated."""
    if not metric.key.startswith("reward"):
        return pd.DataFrame()
    values = [run.values(HELD_OUT + metric.key) for run in group.runs]
    spread = _spread(pd.concat(values, axis=1, join="inner").sort_index())
    if not against_time:
        return spread
    if any(run.clock.empty for run in group.runs):
        return spread.iloc[:0]
    return spread.set_axis(np.mean([run.seconds(spread.index) for run in group.runs], axis=0))


def time_unit(longest: float) -> tuple[str, float]:
    """The unit for times up to `longest` seconds, and its length in seconds."""
    return next((unit for unit in (("hours", 3600.0), ("minutes", 60.0)) if longest > 2 * unit[1]), ("seconds", 1.0))


def final(group: Group, metric: Metric, prefix: str = "", first: bool = False) -> tuple[Estimate, int] | None:
    """A metric at the end of its runs, over the seeds that logged it, and their number. The value of a run is the mean
    over the last tenth of its updates; for a maximum the largest of the run; for a held-out metric the last (or first).
    For one seed the interval is over the last log lines."""
    ends = []
    for run in group.runs:
        values = run.values(prefix + metric.key)
        end = values[values.index > (1 - FINAL_SHARE) * run.last_update]
        if metric.largest:
            end = values.nlargest(1)
        elif prefix or end.empty:
            end = values[:1] if first else values[-1:]
        if len(end):
            ends.append(end)
    if not ends:
        return None
    means = ends[0] if len(ends) == 1 else [end.mean() for end in ends]
    return student_t(means, metric.lowest, 1.0 if metric.is_share else math.inf), len(ends)

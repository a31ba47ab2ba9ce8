"""The runs of a study in groups of tasks, and the means and differences that tables and figures show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from evidence.results import Record

RESAMPLES = 10_000
STOPPED = "its time was up"  # of a record that says nothing about its method


class Estimate(NamedTuple):
    """A mean, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def show(self, sign: str = "") -> str:
        if self.low == self.high:  # one seed
            return f"{100 * self.value:{sign}.1f}"
        return "{:{}} [{:{}}, {:{}}]".format(*(x for end in self for x in (100 * end, f"{sign}.1f")))


def estimate(groups: Sequence[np.ndarray]) -> Estimate:
    """The mean of the groups' means, with an interval that resamples seeds within each group. Each group is
    `(seeds,)`."""
    mean = lambda *of_groups, axis: np.mean([group.mean(axis=axis) for group in of_groups], axis=0)
    # scipy needs two observations. With one seed, every resample is this seed
    groups = [np.repeat(group, 2) if len(group) == 1 else group for group in groups]
    settings = {"n_resamples": RESAMPLES, "method": "percentile", "batch": 1000, "rng": 0}
    interval = scipy.stats.bootstrap(groups, mean, **settings).confidence_interval
    return Estimate(float(mean(*groups, axis=-1)), float(interval.low), float(interval.high))


@dataclass
class Group:
    """Tasks that are averaged, and their runs by method, learning rate, task and seed."""

    tasks: list[str]
    runs: dict[str, dict[float, dict[str, dict[int, Record]]]] = field(default_factory=dict)

    def add(self, method: str, record: Record) -> None:
        of_rate = self.runs.setdefault(method, {}).setdefault(record["varied"]["learning_rate"], {})
        of_rate.setdefault(record["task"], {})[record["seed"]] = record

    @property
    def rates(self) -> list[float]:
        return sorted({rate for of_method in self.runs.values() for rate in of_method})

    def cells(self, method: str, rate: float | None) -> list[dict[int, Record]] | None:
        """The records of every task by seed, at a rate or, without one, at the best rate of each task; `None` if a task
        has none."""
        rates = [self.best(method, task) if rate is None else rate for task in self.tasks]
        cells = [
            self.runs.get(method, {}).get(of_task, {}).get(task) if of_task is not None else None
            for of_task, task in zip(rates, self.tasks, strict=True)
        ]
        return [cell for cell in cells if cell] if all(cells) else None

    def best(self, method: str, task: str) -> float | None:
        """The rate with the largest mean success; on a tie, the smallest."""
        of_rates = {rate: of_rate[task] for rate, of_rate in self.runs.get(method, {}).items() if task in of_rate}
        return max(sorted(of_rates), key=lambda rate: successes(of_rates[rate]).mean(), default=None)

    def mean(self, method: str, rate: float | None) -> Estimate | None:
        cells = self.cells(method, rate)
        return estimate([successes(cell) for cell in cells]) if cells else None

    def lead(self, method: str, other: str, rate: float | None) -> Estimate | None:
        """Success of a method minus the success of another, over seeds that both have from the same start."""
        cells = zip(self.cells(method, rate) or [], self.cells(other, rate) or [], strict=False)
        leads = [np.subtract(*paired(ours, theirs)) for ours, theirs in cells]
        return estimate(leads) if len(leads) == len(self.tasks) and all(map(len, leads)) else None


def successes(cell: Mapping[int, Record], seeds: Iterable[int] | None = None) -> np.ndarray:
    """`(seeds,)`, in the order of the seeds; 0 for a run that failed."""
    chosen = sorted(cell if seeds is None else seeds)
    return np.array([0.0 if "error" in cell[seed] else cell[seed]["success"] for seed in chosen])


def paired(ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> tuple[np.ndarray, np.ndarray]:
    """The successes of ours and of theirs, `(seeds,)` each, over seeds that both have from the same start."""
    seeds = [seed for seed in ours.keys() & theirs.keys() if _same_start(ours[seed], theirs[seed])]
    return successes(ours, seeds), successes(theirs, seeds)


def _same_start(one: Record, other: Record) -> bool:
    digests = [record["start_digest"] for record in (one, other) if "start_digest" in record]
    return len(set(digests)) <= 1


def group_runs(records: Iterable[Record], plan: Mapping[str, Any]) -> dict[str, Group]:
    """The groups of a plan, the key `tables` of a grid. Without a plan, each task and number of updates per rollout
    batch is a group, and a method with other settings is another method."""
    asked_for = set(plan.get("studies", []))
    reported = [
        record
        for record in records
        if record.get("error") != STOPPED and (not asked_for or asked_for & set(record["studies"]))
    ]
    groups: dict[str, Group] = {}
    if not plan:
        for record in reported:
            varied = {key: value for key, value in record["varied"].items() if key != "learning_rate"}
            name = ", ".join([record["task"], *(str(n) for n in [varied.pop("steps_per_generation", None)] if n)])
            method = ", ".join([record["method"], *(f"{key} {value}" for key, value in sorted(varied.items()))])
            groups.setdefault(name, Group([record["task"]])).add(method, record)
    labels = {method: label for label, methods in plan.get("methods", {}).items() for method in methods}
    for name, of in plan.get("groups", {}).items():
        group = groups[name] = Group(of["tasks"])
        for record in reported:
            updates = record["varied"].get("steps_per_generation")
            seed = record["seed"]
            asked = record["task"] in group.tasks and updates in of.get("steps_per_generation", [updates])
            if asked and record["method"] in labels and seed in of.get("seeds", plan.get("seeds", [seed])):
                group.add(labels[record["method"]], record)
    return groups


def methods_of(groups: Mapping[str, Group], plan: Mapping[str, Any]) -> list[str]:
    found = list(dict.fromkeys(method for group in groups.values() for method in group.runs))
    return [label for label in plan.get("methods", found) if label in found]

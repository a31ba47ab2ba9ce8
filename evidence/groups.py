"""The runs of a study in groups of tasks, and the means and differences that tables and figures show."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from evidence.results import Record

RESAMPLES = 10_000
STOPPED = "its time was up"  # of a record that says nothing about its method
SELECTED_BY = ("steps_per_generation", "num_iterations")  # settings of a cell that a plan's groups and methods may name


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


class Setting(NamedTuple):
    """What the runs of one name in the tables may differ in: the method of the grid, and the settings of its cell."""

    method: str
    varied: tuple[tuple[str, Any], ...]  # sorted by name

    @property
    def rate(self) -> float:
        return dict(self.varied)["learning_rate"]


def setting_of(record: Record) -> Setting:
    return Setting(record["method"], tuple(sorted(record["varied"].items())))


Runs = dict[str, dict[Setting, dict[str, dict[int, Record]]]]  # by method in the tables, setting, task and seed


@dataclass
class Group:
    """
    Tasks that are averaged, and their runs.

    Args:
        tasks (`list[str]`):
            The tasks, of equal weight.
        choosing (`Collection[int]`, *optional*):
            Seeds that only choose each method's best setting on a task. By default, the reported seeds choose.
    """

    tasks: list[str]
    choosing: Collection[int] = ()
    tuning: Runs = field(default_factory=dict)
    runs: Runs = field(default_factory=dict)

    def add(self, method: str, record: Record) -> None:
        chooses = record["seed"] in self.choosing
        for runs, of_seed in ((self.tuning, chooses or not self.choosing), (self.runs, not chooses)):
            if of_seed:
                of_setting = runs.setdefault(method, {}).setdefault(setting_of(record), {})
                of_setting.setdefault(record["task"], {})[record["seed"]] = record

    @property
    def rates(self) -> list[float]:
        return sorted({setting.rate for of_method in self.runs.values() for setting in of_method})

    def cells(self, method: str, rate: float | None = None) -> list[dict[int, Record]] | None:
        """The records of every task by seed, in the best setting of each task or, with a `rate`, in the best one with
        that rate; `None` if a task has none."""
        settings = [self.best(method, task, rate) for task in self.tasks]
        of_method: dict[Any, Any] = self.runs.get(method, {})
        cells = [of_method.get(setting, {}).get(task) for setting, task in zip(settings, self.tasks, strict=True)]
        return cells if all(cells) else None

    def best(self, method: str, task: str, rate: float | None = None) -> Setting | None:
        """The setting with the largest mean success; on a tie, the smallest. If there are seeds that choose, all of
        them must have run it."""
        cells = {
            setting: of_setting[task]
            for setting, of_setting in sorted(self.tuning.get(method, {}).items())
            if task in of_setting and rate in (None, setting.rate)
        }
        # A setting that only one of the choosing seeds has would win by its luck
        complete = [setting for setting, cell in cells.items() if len(cell) >= len(self.choosing)]
        return max(complete, key=lambda setting: successes(cells[setting]).mean(), default=None)

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
    seeds = paired_seeds(ours, theirs)
    return successes(ours, seeds), successes(theirs, seeds)


def paired_seeds(ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> list[int]:
    """The seeds that both have from the same start, in order."""
    return sorted(seed for seed in ours.keys() & theirs.keys() if _same_start(ours[seed], theirs[seed]))


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
    choosing = plan.get("choosing", [])
    for name, of in plan.get("groups", {}).items():
        group = groups[name] = Group(of["tasks"], choosing)
        for record in reported:
            seeds = [*choosing, *of.get("seeds", plan.get("seeds", [record["seed"]]))]
            if record["task"] in group.tasks and record["seed"] in seeds and _has_settings(record, of):
                for label, methods in plan.get("methods", {}).items():
                    selected = methods if isinstance(methods, dict) else {"methods": methods}
                    of_method = record["method"] in selected["methods"] and _has_settings(record, selected)
                    if of_method and record["seed"] in selected.get("seeds", [record["seed"]]):
                        group.add(label, record)
    return groups


def _has_settings(record: Record, of: Mapping[str, Any]) -> bool:
    """Whether the cell of a record has one of the values that `of` lists for each of its settings."""
    return all(record["varied"].get(name) in values for name, values in of.items() if name in SELECTED_BY)


def methods_of(groups: Mapping[str, Group], plan: Mapping[str, Any]) -> list[str]:
    found = list(dict.fromkeys(method for group in groups.values() for method in group.runs))
    return [label for label in plan.get("methods", found) if label in found]

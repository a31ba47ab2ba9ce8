"""
The tables and the figure of a study, from the results of its runs.

    python -m evidence.tables evidence/newest.yaml
    python -m evidence.tables evidence/results/peers.jsonl

The second line prints tables of every task, for any file of results. The first line writes evidence/tables/newest.md
and evidence/figures/newest.png, as the key `tables` of the grid says:

    groups    by name: `tasks` of equal weight, `steps_per_generation` if the grid varies it, `seeds` of its own
    methods   by the name in the tables: methods of the grid, of which a task has one
    seeds     the reported ones
    against   methods from which the others are subtracted
    figure    `rates` (success against the learning rate) or `curves` (held-out success against updates)
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from evidence.grid import read_grid
from evidence.results import Record, read_records

HERE = Path(__file__).resolve().parent
RESAMPLES = 10_000
STOPPED = "its time was up"  # of a record that says nothing of its method
LEGEND = (
    "Made by `python -m evidence.tables`. Success after training in percent, and differences in points, paired by "
    "seed: means over tasks of equal weight with 95 % bootstrap intervals over seeds, drawn within each task. The "
    "intervals of few seeds are too narrow. A failed run has a success of 0. An empty place lacks runs. The best "
    "rate of a method on a task has the largest mean success of the same runs."
)


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
    """The mean of the means of the groups, each `(seeds,)`, whose seeds are drawn within each group."""
    mean = lambda *of_groups, axis: np.mean([group.mean(axis=axis) for group in of_groups], axis=0)
    # scipy asks for two observations; of one seed every resample is that seed
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
        """The rate with the largest mean success; of equal ones the smallest."""
        of_rates = {rate: of_rate[task] for rate, of_rate in self.runs.get(method, {}).items() if task in of_rate}
        return max(sorted(of_rates), key=lambda rate: successes(of_rates[rate]).mean(), default=None)

    def mean(self, method: str, rate: float | None) -> Estimate | None:
        cells = self.cells(method, rate)
        return estimate([successes(cell) for cell in cells]) if cells else None

    def lead(self, method: str, other: str, rate: float | None) -> Estimate | None:
        """Success of a method minus that of another, over seeds that both have from the same start."""
        pairs = []
        for ours, theirs in zip(self.cells(method, rate) or [], self.cells(other, rate) or [], strict=False):
            seeds = [seed for seed in ours.keys() & theirs.keys() if _same_start(ours[seed], theirs[seed])]
            pairs.append(successes(ours, seeds) - successes(theirs, seeds))
        return estimate(pairs) if len(pairs) == len(self.tasks) and all(map(len, pairs)) else None


def successes(cell: Mapping[int, Record], seeds: Iterable[int] | None = None) -> np.ndarray:
    """`(seeds,)`, in the order of the seeds; 0 for a run that failed."""
    chosen = sorted(cell if seeds is None else seeds)
    return np.array([0.0 if "error" in cell[seed] else cell[seed]["success"] for seed in chosen])


def _same_start(one: Record, other: Record) -> bool:
    digests = [record["start_digest"] for record in (one, other) if "start_digest" in record]
    return len(set(digests)) <= 1


def group_runs(records: Iterable[Record], plan: Mapping[str, Any]) -> dict[str, Group]:
    """The groups of a plan, the key `tables` of a grid. Without a plan, each task and number of updates per rollout
    batch is a group, and a method with other settings is another method."""
    reported = [record for record in records if record.get("error") != STOPPED]
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
            updates, seed = record["varied"].get("steps_per_generation"), record["seed"]
            asked = record["task"] in group.tasks and of.get("steps_per_generation", updates) == updates
            if asked and record["method"] in labels and seed in of.get("seeds", plan.get("seeds", [seed])):
                group.add(labels[record["method"]], record)
    return groups


# -- The tables -------------------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def methods_of(groups: Mapping[str, Group], plan: Mapping[str, Any]) -> list[str]:
    found = list(dict.fromkeys(method for group in groups.values() for method in group.runs))
    return [label for label in plan.get("methods", found) if label in found]


def success_table(groups: Mapping[str, Group], methods: Sequence[str]) -> str:
    rates = sorted({rate for group in groups.values() for rate in group.rates})
    show = lambda mean: mean.show() if mean else ""
    rows = [
        [name, method, *(show(group.mean(method, rate)) for rate in (None, *rates)), _best_rates(group, method)]
        for name, group in groups.items()
        for method in methods
        if method in group.runs
    ]
    header = ["tasks", "method", "at each task's best rate", *(f"{rate:g}" for rate in rates), "best rates"]
    return markdown(header, rows)


def _best_rates(group: Group, method: str) -> str:
    bests = [group.best(method, task) for task in group.tasks]
    return ", ".join("–" if best is None else f"{best:g}" for best in bests)


def lead_table(groups: Mapping[str, Group], methods: Sequence[str], against: Sequence[str]) -> str:
    rates = sorted({rate for group in groups.values() for rate in group.rates})
    rows = []
    for name, group in groups.items():
        for place, other in enumerate(against):
            for method in methods:
                if method in against[: place + 1]:  # each pair once
                    continue
                leads = [group.lead(method, other, rate) for rate in (None, *rates)]
                if any(leads):
                    rows.append([name, f"{method} minus {other}", *(lead.show("+") if lead else "" for lead in leads)])
    return markdown(["tasks", "", "each at its best rates", *(f"{rate:g}" for rate in rates)], rows)


# What a record has, its unit, and its factor
LOGGED = {
    "start": ("start %", 100),
    "area": ("area %", 100),
    "length": ("length", 1),
    "entropy": ("entropy", 1),
    "seconds_per_update": ("s an update", 1),
    "seconds_without_generation": ("without generation", 1),
    "peak_gib": ("peak GiB", 1),
}


def run_table(groups: Mapping[str, Group], methods: Sequence[str]) -> str:
    """Means over the runs of every cell, of what they logged."""
    rows = []
    for name, group in groups.items():
        for method in methods:
            for rate, of_tasks in sorted(group.runs.get(method, {}).items()):
                records = [record for of_task in of_tasks.values() for record in of_task.values()]
                texts = [str(len(records)), str(sum("error" in record for record in records))]
                for key, (_, factor) in LOGGED.items():
                    values = [factor * record[key] for record in records if record.get(key) is not None]
                    texts.append(f"{np.mean(values):.2f}" if values else "")
                rows.append([name, method, f"{rate:g}", *texts])
    return markdown(["tasks", "method", "rate", "runs", "failed", *(unit for unit, _ in LOGGED.values())], rows)


def table_page(name: str, records: Sequence[Record], plan: Mapping[str, Any]) -> str:
    groups = group_runs(records, plan)
    methods = methods_of(groups, plan)
    parts = [f"# Tables of `{name}`", LEGEND, "## Success", success_table(groups, methods)]
    if against := [method for method in plan.get("against", []) if method in methods]:
        parts += ["## Differences", lead_table(groups, methods, against)]
    return "\n\n".join([*parts, "## What the runs logged", run_table(groups, methods)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="YAML file of a grid, or a .jsonl file of results")
    file = parser.parse_args().file
    if file.suffix == ".jsonl":
        sys.stdout.write(table_page(file.stem, read_records(file), {}))
        return
    from evidence.figures import draw  # imports matplotlib, which the tables do without

    plan = read_grid(file).tables
    records = read_records(file.parent / "results" / f"{file.stem}.jsonl")
    for folder in ("tables", "figures"):
        (file.parent / folder).mkdir(exist_ok=True)
    (file.parent / "tables" / f"{file.stem}.md").write_text(table_page(file.stem, records, plan))
    draw(group_runs(records, plan), plan, file.parent / "figures" / f"{file.stem}.png")


if __name__ == "__main__":
    main()

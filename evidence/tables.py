"""
The tables and the figure of a study, from the results of its runs.

    python -m evidence.tables evidence/newest.yaml
    python -m evidence.tables evidence/results/peers.jsonl

The second line prints tables of every task, for any file of results. The first line writes evidence/tables/newest.md
and evidence/figures/newest.png, as the key `tables` of the grid says:

    groups    by name: `tasks` of equal weight, values of `steps_per_generation` if the grid varies it, own `seeds`
    methods   by the name in the tables: methods of the grid; each task has one of them
    seeds     the reported ones
    against   methods that are subtracted from the others
    figure    `rates` (success against the learning rate) or `curves` (held-out success against updates)
    drawn     `groups` and `methods` of the figure, if not all
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.grid import read_grid
from evidence.groups import Group, group_runs, methods_of
from evidence.results import Record, read_records

LEGEND = (
    "Made by `python -m evidence.tables`. Success after training in percent, and differences in points, paired by "
    "seed: means over tasks of equal weight with 95 % bootstrap intervals over seeds, drawn within each task. The "
    "intervals of few seeds are too narrow. A failed run has a success of 0. An empty place lacks runs. The best "
    "rate of a method on a task has the largest mean success of the same runs."
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


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

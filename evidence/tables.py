"""
The tables and the figure of a study, from the results of its runs.

    python -m evidence.tables evidence/adaptive.yaml
    python -m evidence.tables evidence/results/peers.jsonl

The second line prints tables of every task, for any file of results. The first line writes evidence/tables/adaptive.md
and evidence/figures/adaptive.png, as the key `tables` of the grid says:

    groups    by name: `tasks` of equal weight; own `seeds`; values of `steps_per_generation` and `num_iterations`
    methods   by the name in the tables: methods of the grid or, to select by the same values too, a mapping with the
              key `methods`. If a task has runs in several settings, the best one counts
    seeds     the reported ones
    choosing  seeds that only choose the best settings; without them, the reported seeds choose
    against   methods that are subtracted from the others
    reward    training reward: the tables show the seconds until a run reached it
    figure    `rates` (success against the learning rate) or `curves` (held-out success against a cost)
    costs     of curves: `updates`, `completions` and `minutes`; by default updates and minutes
    rates     of curves: learning rates, or null for the best setting of each task; by default all rates
    drawn     `groups` and `methods` of the figure, if not all
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.grid import read_grid
from evidence.groups import Group, Setting, group_runs, methods_of
from evidence.results import Record, read_records, seconds_to_reward

LEGEND = (
    "Made by `python -m evidence.tables`. Success after training in percent, and differences in points, paired by "
    "seed: means over tasks of equal weight with 95 % bootstrap intervals over seeds, drawn within each task. The "
    "intervals of few seeds are too narrow. A failed run has a success of 0. An empty place lacks runs. The best "
    "rate of a method on a task has the largest mean success {}."
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
    bests = [(group.best(method, task), task) for task in group.tasks]
    return ", ".join("–" if best is None else show_setting(best, group.tuning[method], task) for best, task in bests)


def show_setting(setting: Setting, runs: Mapping[Setting, Mapping[str, Any]], task: str) -> str:
    """The learning rate of a setting, and what else differs between the settings in which a method ran a task. `runs`
    are by setting and task."""
    described = {other: {"": other.method} | dict(other.varied) for other in runs if task in runs[other]}
    ours = described[setting]
    differs = [name for name in ours if len({of.get(name) for of in described.values()}) > 1]
    others = [f"{name} {ours[name]}".strip() for name in differs if name != "learning_rate"]
    return " ".join([f"{setting.rate:g}", *others])


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


def run_table(groups: Mapping[str, Group], methods: Sequence[str], reward: float | None = None) -> str:
    """Means over the runs of every cell, of what they logged. With a training `reward`, also the seconds of the runs
    that reached it, and their number if some did not."""
    rows = []
    for name, group in groups.items():
        for method in methods:
            runs = group.runs.get(method, {})
            shown: dict[str, list[Record]] = {}
            for setting in sorted(runs, key=lambda setting: (setting.rate, setting)):
                for task, cell in runs[setting].items():
                    shown.setdefault(show_setting(setting, runs, task), []).extend(cell.values())
            for text, records in shown.items():
                texts = [str(len(records)), str(sum("error" in record for record in records))]
                for key, (_, factor) in LOGGED.items():
                    values = [factor * record[key] for record in records if record.get(key) is not None]
                    texts.append(f"{np.mean(values):.2f}" if values else "")
                if reward is not None:
                    reached = [at for record in records if (at := seconds_to_reward(record, reward)) is not None]
                    some = f" ({len(reached)} of {len(records)})" if len(reached) < len(records) else ""
                    texts.append(f"{np.mean(reached):.0f}{some}" if reached else "never")
                rows.append([name, method, text, *texts])
    header = ["tasks", "method", "rate", "runs", "failed", *(unit for unit, _ in LOGGED.values())]
    return markdown([*header, *([] if reward is None else [f"s to a reward of {reward:g}"])], rows)


def table_page(name: str, records: Sequence[Record], plan: Mapping[str, Any]) -> str:
    groups = group_runs(records, plan)
    methods = methods_of(groups, plan)
    chosen_on = plan.get("choosing")
    legend = LEGEND.format(f"on seeds {', '.join(map(str, chosen_on))}" if chosen_on else "of the same runs")
    parts = [f"# Tables of `{name}`", legend, "## Success", success_table(groups, methods)]
    if against := [method for method in plan.get("against", []) if method in methods]:
        parts += ["## Differences", lead_table(groups, methods, against)]
    return "\n\n".join([*parts, "## What the runs logged", run_table(groups, methods, plan.get("reward"))]) + "\n"


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

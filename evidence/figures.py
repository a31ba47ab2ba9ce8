"""
The figures of the studies, from the runs that `evidence.groups` has grouped.

    python -m evidence.figures

draws every figure again: the figures of evidence/figures.yaml, and of the grids that have results and `tables`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.groups import Group, estimate, group_runs, methods_of
from evidence.results import Record, read_records

HERE = Path(__file__).resolve().parent

# For each method, by its name in the tables: its name in the legend, colour, marker and line, the same in all figures.
# Methods that differ only in an option share a colour
LOOKS = {
    "TROLL": ("TROLL", "C0", "o", "-"),
    "TROLL, adaptive rate": ("TROLL, adaptive learning rate", "C0", "o", "--"),
    "TROLL, ε 0.2": ("TROLL, bound of 0.2", "C0", "o", ":"),
    "TROLL 8x4": ("TROLL, 8×4", "C0", "o", ":"),
    "TROLL, ε 0.5": ("TROLL, bound of 0.5", "C0", "o", "-"),
    "TROLL, ε 0.5, adaptive rate": ("TROLL, adaptive rate (2 seeds)", "C9", "o", "--"),
    "TROLL, ε 0.5, 8×2": ("TROLL, each completion twice", "C0", "o", "--"),
    "TROLL, ε 0.5, 2×4": ("TROLL, each completion four times", "C0", "o", ":"),
    "penalty, ε 0.2": ("penalty, bound of 0.2", "C2", "D", "-"),
    "penalty, ε 0.2, 8×2": ("penalty, each completion twice", "C2", "D", "--"),
    "penalty, ε 0.2, adaptive rate": ("penalty, adaptive rate (2 seeds)", "C8", "D", "--"),
    "binary penalty": ("penalty on two outcomes", "C2", "D", "-"),
    "binary penalty, adaptive rate": ("penalty, adaptive learning rate", "C2", "D", "--"),
    "binary penalty 8x4": ("penalty, 8×4", "C2", "D", ":"),
    "TRL's default (1 update)": ("TRL's default, 1 update per rollout batch", "k", "x", "-"),
    "TRL's default, updates of 8": ("TRL's default, updates of 8", "k", "+", ":"),
    "TRL's default, 8,192 completions": ("TRL's default, 8,192 completions", "0.5", "x", "--"),
    "clip 0.2": ("TRL's clip of 0.2", "C3", "s", "-"),
    "clip 0.2, adaptive rate": ("clip of 0.2, adaptive learning rate", "C3", "s", "--"),
    "clip 0.2 8x4": ("clip of 0.2, 8×4", "C3", "s", ":"),
    "clip or mask": ("best clip or mask", "C1", "^", "-."),
    "tuned clip": ("clip with a tuned range", "C1", "^", "--"),
    "TV mask": ("DPPO's mask, total variation", "C4", "v", "-."),
    "KL mask": ("DPPO's mask, KL", "C6", "v", ":"),
}


def draw(groups: Mapping[str, Group], plan: Mapping[str, Any], file: Path) -> None:
    """Draw a panel for each group or, if the plan asks for `curves`, for each group, kind of cost and learning rate.
    Each method has a line. A band is a 95 % interval over seeds."""
    drawn = plan.get("drawn", {})
    groups = {name: groups[name] for name in drawn.get("groups", groups)}
    methods = [method for method in methods_of(groups, plan) if method in drawn.get("methods", [method])]
    titles = {name: of.get("title", name) for name, of in plan.get("groups", {}).items()}
    curves = plan.get("figure") == "curves"
    if curves:
        rates = plan.get("rates", sorted({rate for group in groups.values() for rate in group.rates}))
        costs = plan.get("costs", ["updates", "minutes"])
        panels, columns = list(_curve_panels(groups, methods, titles, rates, costs)), len(rates)
        if columns == 1:
            columns = len(panels) // len(groups)  # a row for each group
    else:
        panels, columns = list(_rate_panels(groups, methods, titles)), 2
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context({"font.size": 14}):  # legible at a width of 400 pixels
        figure = Figure(figsize=(4.4 * columns, 3.8 * rows + 1.2), layout="constrained")
        axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        for (title, x_label, lines), of_panel in zip(panels, axes, strict=False):
            for method, points in lines.items():
                _line(of_panel, points, method)
            of_panel.set(xlabel=x_label)
            of_panel.set_title(title, size=13)
            of_panel.grid(alpha=0.3)
            if not curves:
                rates = sorted({rate for points in lines.values() for rate in points[:, 0]})
                of_panel.set_xscale("log")
                of_panel.set_xticks(rates, [_rate(rate) for rate in rates], size=11, rotation=45)
                of_panel.minorticks_off()
        axes[0].set_ylim(0, None)
        figure.supylabel("problems solved, %")
        shown = [of_panel.get_legend_handles_labels() for of_panel in axes]
        handles = {name: line for lines, names in shown for line, name in zip(lines, names, strict=True)}
        free = list(axes[len(panels) :])
        for unused in free:
            unused.set_axis_off()
        if free:  # in place of an empty panel
            free[0].legend(handles.values(), handles.keys(), loc="center", frameon=False)
        else:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper center", ncols=min(columns, 2), frameon=False
            )
        figure.savefig(file, dpi=110)


Lines = dict[str, np.ndarray]  # for each method `(points, 4)`: x, mean, and the ends of its interval
Panel = tuple[str, str, Lines]  # title, name of x, lines


def _rate_panels(groups: Mapping[str, Group], methods: list[str], titles: Mapping[str, str]) -> Iterator[Panel]:
    """Success after training against the learning rate."""
    for name, group in groups.items():
        means = {method: [(rate, group.mean(method, rate)) for rate in group.rates] for method in methods}
        lines = {
            method: np.array([(rate, *mean) for rate, mean in of_method if mean]).reshape(-1, 4)
            for method, of_method in means.items()
        }
        yield titles.get(name, name), "learning rate", lines


# What a figure draws curves against: the label of the axis
COSTS = {"updates": "updates", "completions": "completions generated", "minutes": "minutes of training"}


def _curve_panels(
    groups: Mapping[str, Group],
    methods: list[str],
    titles: Mapping[str, str],
    rates: Sequence[float | None],
    costs: Sequence[str],
) -> Iterator[Panel]:
    """Held-out success against each of the `costs` that all runs recorded, at each of the `rates`; `None` is the best
    setting of each task."""
    for name, group in groups.items():
        own_rates = [rate for rate in rates if rate is None or rate in group.rates]
        records = {(method, rate): _records(group, method, rate) for method in methods for rate in own_rates}
        recorded = {cost: all(costs_of(record, cost) for runs in records.values() for record in runs) for cost in costs}
        for cost in (cost for cost in costs if recorded[cost]):
            for rate in own_rates:
                lines = {method: mean_curve(records[method, rate], cost) for method in methods}
                title = titles.get(name, name)
                yield title if rate is None else f"{title}, learning rate {_rate(rate)}", COSTS[cost], lines


def _records(group: Group, method: str, rate: float | None) -> list[Record]:
    cells = group.cells(method, rate) or []
    return [record for cell in cells for record in cell.values() if "curve" in record]


def costs_of(record: Record, cost: str) -> list[float]:
    """The cost of a run up to each point of its curve; empty if the run recorded none."""
    if cost == "updates":
        return [update for update, _ in record["curve"]]
    if cost == "minutes":
        return [seconds / 60 for _, seconds in record.get("seconds", [])]
    return [completions for _, completions in record.get("completions", [])]


def mean_curve(records: list[Record], cost: str) -> np.ndarray:
    """
    The mean curve of runs: `(points, 4)` with the cost, the mean success, and the ends of its interval.

    Runs are averaged at equal numbers of completions or, if they recorded none, of updates: in the settings of two
    tasks, an update may have another number of completions. After the first update of a rollout batch, the later ones
    take no further completions, so the last point with a number counts.
    """
    by_completions = cost != "updates" and all(costs_of(record, "completions") for record in records)
    place = "completions" if by_completions else "updates"
    runs = []
    for record in records:
        points = zip(costs_of(record, cost), (height for _, height in record["curve"]), strict=True)
        runs.append(dict(zip(costs_of(record, place), points, strict=True)))
    means = []
    for at in sorted(set.intersection(*map(set, runs))) if runs else []:
        costs, heights = np.transpose([run[at] for run in runs])
        means.append((costs.mean(), *estimate([heights])))
    return np.array(means).reshape(-1, 4)


def _rate(rate: float) -> str:
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _line(axes: Axes, points: np.ndarray, method: str) -> None:
    if len(points):
        label, color, marker, line = LOOKS.get(method, (method, "0.5", "o", "-"))
        x, mean, low, high = points.T
        axes.fill_between(x, 100 * low, 100 * high, color=color, alpha=0.15, linewidth=0)
        face = "white" if line != "-" and marker in "oDs" else color  # hollow: an option of a method
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": line, "markerfacecolor": face}
        axes.plot(x, 100 * mean, label=label, markersize=7, **look)


def draw_study(name: str, plan: Mapping[str, Any]) -> None:
    """Draw the figure of a plan. Each of its `parts`, if it has any, is a plan for the `results` of another study."""
    groups: dict[str, Group] = {}
    titled: dict[str, Any] = {}
    for part in plan.get("parts", [plan]):
        groups |= group_runs(read_records(HERE / "results" / f"{part.get('results', name)}.jsonl"), part)
        titled |= part["groups"]
    draw(groups, {**part, "groups": titled}, HERE / "figures" / f"{name}.png")


def main() -> None:
    plans = yaml.safe_load((HERE / "figures.yaml").read_text(encoding="utf-8"))
    for grid in HERE.glob("*.yaml"):
        if (HERE / "results" / f"{grid.stem}.jsonl").exists() and grid.stem not in plans:
            plans[grid.stem] = yaml.safe_load(grid.read_text(encoding="utf-8")).get("tables")
    for name, plan in plans.items():
        if plan:
            draw_study(name, plan)


if __name__ == "__main__":
    main()

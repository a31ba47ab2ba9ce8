"""The figures of the study, from the records of its runs."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence import age
from evidence.tables import (
    RESAMPLES,
    STALENESS,
    Record,
    at_staleness,
    mean,
    methods_of,
    rates_of,
    select,
    settings_of,
    tasks_of,
)
from troll_trl.evaluation.statistics import estimate

# Told apart without colours as well
STYLES: dict[str, dict[str, Any]] = {
    "troll": {"color": "C0", "marker": "o", "linestyle": "-", "linewidth": 2.2},
    "troll-wide": {"color": "C0", "marker": "D", "linestyle": "--", "linewidth": 2.2},
    "clip": {"color": "C3", "marker": "s", "linestyle": "-"},
    "clip-higher": {"color": "C1", "marker": "^", "linestyle": "--"},
    "none": {"color": "0.35", "marker": "x", "linestyle": ":"},
    "cispo": {"color": "C2", "marker": "v", "linestyle": "-."},
    "sapo": {"color": "C4", "marker": "d", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    "pessimistic": {"color": "C2", "marker": "D", "linestyle": "-", "linewidth": 2.2},
    "clip-wider": {"color": "C1", "marker": "^", "linestyle": "--"},
}


def _panels(tasks: Sequence[str]) -> tuple[Figure, dict[str, Axes]]:
    figure = Figure(figsize=(4 * len(tasks) + 0.5, 3.8), layout="constrained")
    return figure, dict(zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True))


def draw_learning(records: Sequence[Record], study: str, file: Path) -> None:
    """Held-out success against updates, each method at its own learning rate: means over seeds."""
    settings = settings_of(records, study)
    figure, panels = _panels(tasks_of(records, study))
    for task, axes in panels.items():
        for method in methods_of(records, study):
            _plot_mean(axes, select(records, study, task, method, **settings).records, method)
        axes.set(title=task, xlabel="updates", ylabel="held-out success, %")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def _plot_mean(axes: Axes, records: Sequence[Record], method: str, label: str | None = None) -> None:
    curves = [record["curve"] for record in records if "curve" in record]
    if curves:
        steps, heights = np.array(curves).mean(0).T
        axes.plot(steps, 100 * heights, label=label or method, markersize=5, **STYLES[method])


def draw_rare(records: Sequence[Record], study: str, file: Path) -> None:
    """Held-out success against updates, all methods at one learning rate, means over the same ten seeds in a panel."""
    # `remedy`, `remedy-wider` and `remedy-others` have the same rate, and of a task the same seeds
    records = [record for record in records if any(name.startswith(study) for name in record["studies"])]
    tasks = {"label-0.5": "0.3 % right at the start", "label-2": "1.2 % right", "label-30": "18 % right"}
    figure, panels = _panels(list(tasks))
    for task, axes in panels.items():
        for method in ("troll", "pessimistic", "clip", "clip-wider"):
            _plot_mean(axes, [r for r in records if (r["task"], r["method"]) == (task, method)], method)
        axes.set(title=f"{task}: {tasks[task]}", xlabel="updates", ylabel="held-out success, %")
        axes.grid(alpha=0.3)
    panels["label-2"].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def draw_real(records: Sequence[Record], study: str, file: Path) -> None:
    """Success of the real model against updates, TROLL at two bounds too: every seed, thin, and the means."""
    figure, panels = _panels([study])
    axes = panels[study]
    shown = {
        ("troll", 0.5): ("troll-wide", "troll, ε = 0.5"),
        ("clip-higher", None): ("clip-higher", "clip, 0.2/0.28"),
        ("clip", None): ("clip", "clip, 0.2"),
        ("troll", None): ("troll", "troll, ε = 0.05"),
        ("none", None): ("none", "no limits"),
    }
    of_cell: dict[tuple[str, float | None], list[Record]] = {cell: [] for cell in shown}
    for record in records:
        cell = record["method"], record["varied"].get("kl_bound")
        if cell in of_cell and (record["task"], record["varied"]["learning_rate"]) == ("no-dropout", 1e-3):
            of_cell[cell].append(record)
    for cell, (style, label) in shown.items():
        _plot_mean(axes, of_cell[cell], style, label)
        for record in of_cell[cell]:
            steps, heights = np.array(record["curve"]).T
            thin = {key: STYLES[style][key] for key in ("color", "linestyle")}
            axes.plot(steps, 100 * heights, linewidth=0.6, alpha=0.5, **thin)
    axes.set(xlabel="updates", ylabel="right and stated, held out, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def draw_rates(records: Sequence[Record], study: str, file: Path) -> None:
    """Area under the curve against the learning rate, on the two seeds of the tuning."""
    figure, panels = _panels(tasks_of(records, study))
    rates = rates_of(records, study)
    for task, axes in panels.items():
        for method in methods_of(records, study):
            cells = [select(records, study, task, method, learning_rate=rate) for rate in rates]
            areas = [100 * cell.values("area").mean() for cell in cells]
            axes.plot(rates, areas, label=method, markersize=5, **STYLES[method])
        axes.set(title=task, xlabel="learning rate", ylabel="area under the curve, %", xscale="log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def draw_staleness(records: Sequence[Record], study: str, file: Path) -> None:
    """Success against updates per rollout batch: means over five seeds with their bootstrap intervals."""
    (task,) = tasks_of(records, study)
    figure, panels = _panels([task])
    axes = panels[task]
    for index, method in enumerate(methods_of(records, study)):
        cells = [at_staleness(records, task, method, updates) for updates in STALENESS]
        values = [mean(cell, "success") for cell in cells]
        x = np.array(STALENESS) * 1.03 ** (index - 1)  # side by side
        heights = 100 * np.array([value.value for value in values])
        ends = 100 * np.array([[value.low, value.high] for value in values]).T
        errors = np.abs(ends - heights)
        axes.errorbar(x, heights, errors, label=method, markersize=5, capsize=2, **STYLES[method])
    axes.set(title=task, xlabel="updates per rollout batch", ylabel="held-out success, %", xscale="log")
    axes.set_xticks(STALENESS, [str(updates) for updates in STALENESS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def draw_age(records: Sequence[Record], study: str, file: Path) -> None:
    """Area and success against updates per rollout batch, means over the rare tasks: a line for each trust region."""
    runs = age.Runs(records)
    figure, panels = _panels(["success", "area"])
    lines = {"rule": "TROLL, ε by the rule", "clip": "clip", "tv": "DPPO, total variation", "kl": "DPPO, KL"}
    for (key, axes), (index, name) in product(panels.items(), enumerate(lines)):
        found = {n: cells for n in age.AGES if (cells := runs.cells(age.RARE, n, name)) is not None}
        groups = [[cell.values(key)[:, None] for cell in cells] for cells in found.values()]
        values = [estimate(group, RESAMPLES, seed=0)[0] for group in groups]
        if values:
            heights = 100 * np.array([value.value for value in values])
            ends = 100 * np.array([[value.low, value.high] for value in values]).T
            x = np.array(list(found)) * 1.02 ** (index - 1.5)  # next to each other
            style = STYLES[{"rule": "troll", "clip": "clip", "tv": "clip-higher", "kl": "cispo"}[name]]
            axes.errorbar(x, heights, np.abs(ends - heights), markersize=5, capsize=2, **style)
            axes.annotate(lines[name], (x[-1], heights[-1]), (6, 0), textcoords="offset points", color=style["color"])
        title = "success after 128 updates, %" if key == "success" else "mean height of the learning curve, %"
        axes.set(xlabel="updates per rollout batch", ylabel=title, xscale="log", xlim=(7, 60))
        axes.set_xticks(age.AGES, [str(n) for n in age.AGES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


# Of each grid: what draws it, and the study whose runs it is of
Figures = dict[str, tuple[Callable[[Sequence[Record], str, Path], None], str]]
_OF_THE_FIRST: Figures = {
    "learning": (draw_learning, "headline"),
    "long": (draw_learning, "long"),
    "rates": (draw_rates, "tuning"),
    "staleness": (draw_staleness, "staleness"),
}
FIGURES: dict[str, Figures] = {
    "cpu": _OF_THE_FIRST,
    "gpu": _OF_THE_FIRST,
    "rarity": {"learning": (draw_rare, "remedy")},
    "smollm2": {"learning": (draw_real, "smollm2")},
    "age": {"updates": (draw_age, "deciding-rare-32")},
}

"""The figures of the study, from the records of its runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from evidence import age, rate
from evidence.tables import RESAMPLES, Record
from math_answers.evaluation.statistics import Estimate, estimate

# Distinct without colours as well
STYLES: dict[str, dict[str, Any]] = {
    "troll": {"color": "C0", "marker": "o", "linestyle": "-", "linewidth": 2.2},
    "clip": {"color": "C3", "marker": "s", "linestyle": "-"},
    "clip-higher": {"color": "C1", "marker": "^", "linestyle": "--"},
    "clip-wider": {"color": "C1", "marker": "^", "linestyle": "--"},
    "kl": {"color": "C2", "marker": "v", "linestyle": "-."},
    "tv": {"color": "C4", "marker": "D", "linestyle": ":"},
}
AREA, SUCCESS = "mean height of the learning curve, %", "success after training, %"


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Panels one below the other: a screen 400 pixels wide shows text of 9 points with 8 pixels."""
    figure = Figure(figsize=(6, 3.8 * count), layout="constrained")
    panels = list(figure.subplots(count, squeeze=False)[:, 0])
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _name_lines(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """
    Write names to the right of the ends of lines, one above the other where ends are close.

    Args:
        ends (`Mapping[str, tuple[float, float, str]]`):
            By name: x and y of the line's end, in data coordinates, and the line's colour.
    """
    low, high = axes.get_ylim()
    gap, names = 0.065 * (high - low), sorted(ends, key=lambda name: ends[name][1])
    heights = [ends[name][1] for name in names]
    for _ in range(50):  # push apart what is too close, both by half
        for i in range(len(heights) - 1):
            lack = max(0.0, gap - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - lack, heights[i + 1] + lack
    for name, height in zip(names, heights, strict=True):
        x, _, color = ends[name]
        style: dict[str, Any] = {"color": color, "va": "center", "fontsize": 9, "annotation_clip": False}
        axes.annotate(name, (x, height), (7, 0), textcoords="offset points", **style)


def draw_age(records: Sequence[Record], study: str, file: Path) -> None:
    """Area and success against updates per rollout batch, means over the rare tasks: a line for each trust region."""
    runs = age.Runs(records)
    names = {"rule": ("troll", "TROLL, ε by the rule"), "clip": ("clip", "clip, tuned")}
    names |= {"tv": ("clip-higher", "DPPO, total variation"), "kl": ("kl", "DPPO, KL")}
    lines: dict[str, dict[tuple[str, str], dict[int, Estimate]]] = {"area": {}, "success": {}}
    for (key, of_key), (region, name) in product(lines.items(), names.items()):
        found = {n: cells for n in age.AGES if (cells := runs.cells(age.RARE, n, region)) is not None}
        groups = {n: [cell.values(key)[:, None] for cell in cells] for n, cells in found.items()}
        of_key[name] = {n: estimate(group, RESAMPLES, seed=0)[0] for n, group in groups.items()}
    _draw_ages(lines, file, end=75)


def _draw_ages(lines: Mapping[str, Mapping[tuple[str, str], Mapping[int, Estimate]]], file: Path, end: float) -> None:
    """`lines` by key of a record, by style and name of the line, by updates per rollout batch."""
    figure, panels = _panels(len(lines))
    for (key, of_key), axes in zip(lines.items(), panels, strict=True):
        ends, ages = {}, sorted({n for values in of_key.values() for n in values})
        for index, ((style, name), values) in enumerate(of_key.items()):
            if values:
                heights = 100 * np.array([value.value for value in values.values()])
                limits = 100 * np.array([[value.low, value.high] for value in values.values()]).T
                x = np.array(list(values)) * 1.02 ** (index - 1.5)  # next to each other
                axes.errorbar(x, heights, np.abs(limits - heights), markersize=5, capsize=2, **STYLES[style])
                ends[name] = x[-1], heights[-1], STYLES[style]["color"]
        label = {"area": AREA, "success": SUCCESS}[key]
        axes.set(xlabel="updates per rollout batch", ylabel=label, xscale="log", xlim=(0.9 * min(ages, default=8), end))
        axes.set_ylim(bottom=0)
        axes.set_xticks(ages, [str(n) for n in ages])
        axes.minorticks_off()
        _name_lines(axes, ends)
    figure.savefig(file, dpi=110)


def draw_rate(records: Sequence[Record], study: str, file: Path) -> None:
    """Success against the learning rate, a line for each trust region; bands are 95 % intervals over seeds."""
    runs = rate.Runs(records)
    styles = dict(zip(rate.LABELS, ("troll", "clip", "clip-wider", "tv", "kl"), strict=True))
    with matplotlib.rc_context({"font.size": 14}):  # legible at a width of 400 pixels
        layout = ConstrainedLayoutEngine(wspace=0.06)  # the outer tick labels of neighbours stay apart
        figure = Figure(figsize=(8, 8.4), layout=layout)
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for (kind, updates), axes in zip(rate.PLACES, panels.flat, strict=True):
            for region, style in styles.items():
                of_rates = [[x[:, None] for x in at] for at in runs.at_rates(rate.KINDS[kind], updates, region)]
                means = [estimate(of_rate, RESAMPLES, seed=0)[0] for of_rate in of_rates]
                if means:
                    value, low, high = (
                        100 * np.array([getattr(m, end) for m in means]) for end in ("value", "low", "high")
                    )
                    axes.fill_between(rate.RATES, low, high, color=STYLES[style]["color"], alpha=0.2, linewidth=0)
                    axes.plot(rate.RATES, value, label=rate.LABELS[region], **STYLES[style])
            axes.set(title=f"{kind}, {updates} updates", xscale="log", ylim=(0, 80))
            axes.set_xticks(rate.RATES, rate.RATE_NAMES)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.supylabel("success after training, %")
        figure.supxlabel("learning rate")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(file, dpi=110)


# For each grid: names of figures, what draws each, and the study that must have runs
Figures = dict[str, tuple[Callable[[Sequence[Record], str, Path], None], str]]
FIGURES: dict[str, Figures] = {
    "age": {"age-updates": (draw_age, "deciding-rare-32")},
    "rate": {"rate": (draw_rate, "rates")},
}

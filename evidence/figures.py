"""The figure of a study, from the runs that `evidence.groups` has grouped."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.groups import Group, methods_of

# Distinct without colours as well
STYLES = [
    {"color": color, "marker": marker, "linestyle": line}
    for color, marker, line in zip(
        ("C0", "C3", "C2", "C1", "C4", "C5"), "osvD^P", ("-", "--", "-.", ":", "--", "-."), strict=True
    )
]


def draw(groups: Mapping[str, Group], plan: Mapping[str, Any], file: Path) -> None:
    """A panel for each group or, if the plan asks for `curves`, for each group and learning rate; a line for each
    method."""
    curves = plan.get("figure") == "curves"
    panels = [(name, group, rate) for name, group in groups.items() for rate in (group.rates if curves else [None])]
    styles = dict(zip(methods_of(groups, plan), itertools.cycle(STYLES), strict=False))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context({"font.size": 14}):  # legible at a width of 400 pixels
        figure = Figure(figsize=(4 * columns, 3.6 * rows + 0.8), layout="constrained")
        axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for (name, group, rate), of_panel in zip(panels, axes.flat, strict=False):
            for method, style in styles.items():
                lines = _curves(group, method, rate) if rate is not None else _successes(group, method)
                _line(of_panel, lines, method, style)
            of_panel.set(title=name if rate is None else f"{name}, {rate:g}", ylim=(0, None))
            of_panel.set_xlabel("updates" if curves else "learning rate")
            if not curves:
                of_panel.set_xscale("log")
                of_panel.set_xticks(group.rates, [f"{x:g}" for x in group.rates], fontsize=10)
                of_panel.minorticks_off()
            of_panel.grid(alpha=0.3)
        for unused in axes.flat[len(panels) :]:
            unused.set_axis_off()
        figure.supylabel("held-out success, %" if curves else "success after training, %")
        handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(file, dpi=110)


def _successes(group: Group, method: str) -> np.ndarray:
    """Learning rates, and mean success with the ends of its interval: `(points, 4)`."""
    means = [(rate, group.mean(method, rate)) for rate in group.rates]
    return np.array([(rate, *mean) for rate, mean in means if mean]).reshape(-1, 4)


def _curves(group: Group, method: str, rate: float) -> np.ndarray:
    """Updates, and held-out success: mean, lowest and highest over the runs, `(points, 4)`."""
    cells = group.cells(method, rate) or []
    curves = [record["curve"] for cell in cells for record in cell.values() if "curve" in record]
    steps = [dict(map(tuple, curve)) for curve in curves]
    common = sorted(set.intersection(*map(set, steps))) if steps else []
    values = [[of_run[step] for of_run in steps] for step in common]
    return np.array([(x, np.mean(y), min(y), max(y)) for x, y in zip(common, values, strict=True)]).reshape(-1, 4)


def _line(axes: Axes, points: np.ndarray, label: str, style: Mapping[str, Any]) -> None:
    if len(points):
        x, mean, low, high = points.T
        axes.fill_between(x, 100 * low, 100 * high, color=style["color"], alpha=0.2, linewidth=0)
        axes.plot(x, 100 * mean, label=label, **style)

"""The figures of a report: runs overlaid, seeds as a band, legible in black and white."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from math_answers.printable import printable
from troll_trl.report import metrics
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

# Okabe and Ito's colours without yellow, which is faint on white, and without black, which the bound has. Lines and
# markers tell groups apart without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_DOTTED = {"linestyle": (0, (1, 1.3)), "markerfacecolor": "white"}
_HELD_OUT = {"markersize": 7, "markerfacecolor": "white", "linewidth": 0.8}
_ERROR_BAR: Any = {"clip_on": False, "markeredgewidth": 1.5, "elinewidth": 1.5, "capsize": 3, "zorder": 4}
_BOUND: Any = {"linestyle": "--", "linewidth": 1.1}
_STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False}
_STYLE |= {"axes.spines.right": False, "text.parse_math": False}  # a label with dollars is no formula


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the first metric as the group's line, a second one thin and dotted, and the bound of both."""

    title: str
    metrics: tuple[Metric, ...]
    against_time: bool = False

    @property
    def name(self) -> str:
        return f"{self.title} against time" if self.against_time else self.title

    def held_out(self, group: Group) -> pd.DataFrame:
        return metrics.held_out(group, self.metrics[0], self.against_time)

    def shows(self, group: Group) -> bool:
        drawn = (metrics.curves(group, metric, self.against_time) for metric in self.metrics)
        return len(self.held_out(group)) > 0 or any(drawn)


@dataclass
class Plot:
    """A figure, `columns` panels wide, its PNG (`None` without anything to draw), and notes on what it leaves out."""

    name: str
    title: str
    panels: list[Panel]
    columns: int = 2
    file: Path | None = None
    notes: list[str] = field(default_factory=list)


def draw_figures(groups: Sequence[Group], success: str | None, output: Path) -> list[Plot]:
    """Draw all figures that the runs have data for into `output`, in the order of the page. Remove the other ones of an
    earlier report. `success` is as for [`reward_metrics`]."""
    plots = _plots(groups, success)
    with matplotlib.rc_context(_STYLE):
        for plot in plots:
            plot.notes = list(_left_out(groups, plot))
            _draw(groups, plot, output / f"{plot.name}.png")
    return [plot for plot in plots if plot.file or plot.name != "mask"]  # few runs have a mask


def _plots(groups: Sequence[Group], success: str | None) -> list[Plot]:
    def panels(*shown: Metric) -> list[Panel]:
        return [Panel(one.title, (one,)) for one in shown]

    rewards = [
        Panel(metric.title, (metric,), against_time)
        for metric in metrics.reward_metrics(groups, success)
        for against_time in (False, True)
    ]
    kl = [
        Panel("Largest KL of a token from the old policy", (metrics.KL_MAX_AFTER, metrics.KL_MAX_BEFORE)),
        Panel("Mean KL of the tokens from the old policy", (metrics.KL_MEAN_AFTER, metrics.KL_MEAN_BEFORE)),
        *panels(metrics.PROJECTED, metrics.PENALIZED, metrics.ETA, metrics.REGRESSION, metrics.SUPPORT),
    ]
    mask = panels(metrics.MASKED, metrics.MASKED_NEGATIVE, metrics.MASKED_POSITIVE)
    mask += panels(metrics.DIVERGENCE_MAX, metrics.DIVERGENCE_MEAN)
    return [
        Plot("reward", "Reward and success", rewards),
        Plot("optimization", "Entropy and gradient", panels(metrics.ENTROPY, metrics.GRADIENT)),
        Plot("trust_region", "Trust region", kl),
        Plot("clip", "Clip", panels(metrics.CLIPPED, metrics.CLIPPED_LOW, metrics.CLIPPED_HIGH), columns=3),
        Plot("mask", "Mask", mask, columns=3),
        Plot("completions", "Completions", panels(metrics.LENGTH, metrics.TRUNCATED)),
        Plot("cost", "Throughput and memory", panels(metrics.THROUGHPUT, metrics.MEMORY)),
    ]


def _left_out(groups: Sequence[Group], plot: Plot) -> Iterator[str]:
    """Notes on which panels of a figure lack a group: its runs did not log the metric, or no time."""
    for group in groups:
        empty = [panel.name for panel in plot.panels if not panel.shows(group)]
        if empty:
            what = "any of this" if len(empty) == len(plot.panels) else "; ".join(empty)
            yield f"Nothing to draw for {printable(group.label)}: {what}."


def _draw(groups: Sequence[Group], plot: Plot, file: Path) -> None:
    shown = [panel for panel in plot.panels if any(panel.shows(group) for group in groups)]
    if not shown:
        file.unlink(missing_ok=True)  # of an earlier report
        return
    columns = min(plot.columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(9.6 if len(shown) > 1 else 4.8, 2.8 * rows + 0.5), layout="constrained")
    for place, panel in enumerate(shown, 1):
        _draw_panel(figure.add_subplot(rows, columns, place), groups, panel)
    handles = list(_legend(groups, shown))
    # A space in front: matplotlib leaves out labels that begin with an underscore
    figure.legend(handles, [f" {handle.get_label()}" for handle in handles], loc="outside upper center", ncols=3)
    figure.savefig(file, dpi=150)
    plot.file = file


def _draw_panel(axes: Axes, groups: Sequence[Group], panel: Panel) -> None:
    runs = [run for group in groups for run in group.runs]
    longest = max(max(run.clock, default=0.0) if panel.against_time else run.last_update for run in runs)
    unit, scale = metrics.time_unit(longest) if panel.against_time else ("", 1.0)
    first = panel.metrics[0]
    axes.set(title=panel.title, xlabel=f"training time ({unit})" if panel.against_time else "updates")
    axes.set(ylabel=first.unit.replace("%", "share") or "no unit", yscale="log" if first.log else "linear")
    for number, group in enumerate(groups):
        look = _style(number)
        if len(held_out := panel.held_out(group)):
            aside = 0.0 if panel.against_time else (number - (len(groups) - 1) / 2) * 0.012 * held_out.index[-1]
            mean, low, high = (held_out[name] for name in ("mean", "min", "max"))
            spread = None if low.equals(high) else (mean - low, high - mean)
            axes.errorbar(held_out.index / scale + aside, mean, spread, **look | _HELD_OUT | _ERROR_BAR)
            look["marker"] = ""
        for metric, dotted in zip(panel.metrics, ({}, _DOTTED | {"linewidth": 1.0}), strict=False):
            curves = metrics.curves(group, metric, panel.against_time)
            if curves:
                _draw_curves(axes, [one.set_axis(one.index / scale) for one in curves], look | dotted, number)
    _set_limits(axes, first)
    axes.set_xlim(0, 1.03 * longest / scale or None)
    for bound, colour in _bounds(groups).items() if len(panel.metrics) > 1 else ():
        axes.axhline(bound, color=colour, zorder=1, **_BOUND)
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, bound / 1.5), max(top, bound * 1.5))  # well inside a logarithmic axis


def _draw_curves(axes: Axes, curves: list[pd.Series], look: dict[str, Any], number: int) -> None:
    """The mean of a group's curves and the band around it; beyond the shortest run, thin lines of the longer ones."""
    band = metrics.band(curves)
    count = max(1, round(len(band) / 8))  # markers of different groups at different places
    axes.plot(band.index, band["mean"], markevery=(number * count // 3 % count, count), **look)
    if len(curves) == 1:
        return
    edge = {"linewidth": 0.4, "edgecolor": look["color"], "facecolor": look["color"]}
    axes.fill_between(band.index, band["min"], band["max"], alpha=0.18, **edge)
    common = band.index.max() if len(band) else -math.inf
    for curve in curves:
        if curve.index[-1] > common:
            beyond = curve.iloc[max(int(curve.index.searchsorted(common, side="right")) - 1, 0) :]
            axes.plot(beyond.index, beyond, **look | {"linewidth": 0.6, "marker": "", "alpha": 0.7})


def _set_limits(axes: Axes, metric: Metric) -> None:
    if metric.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    if metric.log:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
    elif math.isfinite(metric.lowest):
        top = axes.dataLim.y1
        axes.set_ylim(metric.lowest, metric.lowest + 1.08 * (top - metric.lowest) if top > metric.lowest else None)


def _style(number: int) -> dict[str, Any]:
    cycles = {"color": _COLOURS, "linestyle": _LINES, "marker": _MARKERS}
    return {name: cycle[number % len(cycle)] for name, cycle in cycles.items()} | {"markersize": 4.5, "linewidth": 1.5}


def _bounds(groups: Sequence[Group]) -> dict[float, str]:
    bounds = [(group.kl_bound, _style(number)["color"]) for number, group in enumerate(groups)]
    known = {bound: colour for bound, colour in bounds if bound is not None and math.isfinite(bound)}
    return known if len(known) > 1 else dict.fromkeys(known, "black")


def _legend(groups: Sequence[Group], panels: Sequence[Panel]) -> Iterator[Line2D | Patch]:
    drawn = [(n, group) for n, group in enumerate(groups) if any(panel.shows(group) for panel in panels)]
    grey: Any = {"color": "0.3", "marker": "o"}
    for number, group in drawn:
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        yield Line2D([], [], **_style(number), label=f"{printable(' '.join(group.label.split())):.60}{seeds}")
    if any(len(group.runs) > 1 for _, group in drawn):
        yield Patch(facecolor="0.5", alpha=0.3, label="band: smallest to largest seed")
    if any(len(panel.held_out(group)) for _, group in drawn for panel in panels):
        yield Line2D([], [], **grey | _HELD_OUT, label="large markers: held-out problems")
    if any(len(panel.metrics) > 1 for panel in panels):
        yield Line2D([], [], **grey | _DOTTED, markersize=4.5, label="dotted: before the projection")
        for bound, colour in _bounds(groups).items():
            yield Line2D([], [], color=colour, **_BOUND, label=f"bound {bound:.3g} nats")

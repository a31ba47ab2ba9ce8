"""The figures of a report: runs overlaid, seeds as a band, legible in black and white."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter

from troll_trl.report import metrics
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

# Okabe and Ito's colours without yellow, which is faint on white, and black, which is the bound's. Lines and markers
# tell groups apart without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_DOTTED = {"linestyle": (0, (1, 1.3)), "markerfacecolor": "white"}
_HELD_OUT = {"markersize": 7, "markerfacecolor": "white", "linewidth": 0.8}
_STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False}
_STYLE |= {"axes.spines.right": False, "text.parse_math": False}  # a label is no formula, whatever dollars it holds
_WIDTH, _PANEL_HEIGHT = 9.6, 2.8  # inches
_LONGEST_LABEL = 60  # characters in a legend


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the first metric as the group's line, a second one thin and dotted."""

    title: str
    metrics: tuple[Metric, ...]
    against_time: bool = False
    held_out: bool = False
    bound: bool = False

    def curves(self, group: Group, metric: Metric) -> list[pd.Series]:
        curves = (metrics.curve(run, metric, self.against_time) for run in group.runs)
        return [curve for curve in curves if curve is not None]

    def band_held_out(self, group: Group) -> pd.DataFrame | None:
        return metrics.held_out(group, self.metrics[0], self.against_time) if self.held_out else None

    def shows(self, group: Group) -> bool:
        return self.band_held_out(group) is not None or any(self.curves(group, metric) for metric in self.metrics)


@dataclass
class Plot:
    """A figure, `columns` panels wide; its PNG (`None` if no run logged anything of it), and what was left out."""

    name: str
    title: str
    caption: str
    columns: int
    panels: list[Panel]
    file: Path | None = None
    notes: list[str] = field(default_factory=list)


def draw_figures(groups: Sequence[Group], success: str | None, output: Path) -> list[Plot]:
    """
    Draw all figures that the runs have data for into `output`, in the order of the page. A figure of an earlier report
    goes if it has no data this time. `success` is as for [`reward_metrics`].
    """
    plots = _plans(groups, success)
    with matplotlib.rc_context(_STYLE):
        for plot in plots:
            _draw(groups, plot, output / f"{plot.name}.png")
    return plots


def _plans(groups: Sequence[Group], success: str | None) -> list[Plot]:
    def panels(*shown: Metric) -> list[Panel]:
        return [Panel(one.title, (one,)) for one in shown]

    rewards = [
        Panel(metric.title, (metric,), against_time, held_out=True)
        for metric in metrics.reward_metrics(groups, success)
        for against_time in (False, True)
    ]
    kl = [
        Panel("Largest KL of a token from the old policy", (metrics.KL_MAX_AFTER, metrics.KL_MAX_BEFORE), bound=True),
        Panel("Mean KL of the tokens from the old policy", (metrics.KL_MEAN_AFTER, metrics.KL_MEAN_BEFORE), bound=True),
        *panels(metrics.PROJECTED, metrics.ETA, metrics.REGRESSION, metrics.SUPPORT),
    ]
    clip = panels(metrics.CLIPPED, metrics.CLIPPED_LOW, metrics.CLIPPED_HIGH)
    mask = panels(metrics.MASKED, metrics.MASKED_NEGATIVE, metrics.MASKED_POSITIVE)
    mask += panels(metrics.DIVERGENCE_MAX, metrics.DIVERGENCE_MEAN)
    completions = panels(metrics.LENGTH, metrics.TRUNCATED)
    of_reward = (
        "Left against updates (optimizer steps), right against training time: the sum of TRL's step_time, which is "
        "generation, forward and backward passes, without evaluations and checkpoints. Held-out points of the same "
        "update stand side by side."
    )
    of_kl = (
        "KL from the old policy q before the projection, KL(p‖q), and after it, KL(π‖q), which the bound holds for. "
        "On a logarithmic axis zeros (updates with the weights of the rollout) are not drawn."
    )
    of_clip = "Share of tokens whose gradient the clip dropped, of runs that clip."
    of_mask = "Share of tokens whose gradient the mask dropped, and the divergence that it compares with its bound."
    of_cost = (
        "Tokens of prompts and completions on all ranks per second of training time, each rollout batch over the time "
        "of all its updates; largest memory of one process since its start."
    )
    return [
        Plot("reward", "Reward and success", of_reward, 2, rewards),
        Plot("optimization", "Entropy and gradient", "", 2, panels(metrics.ENTROPY, metrics.GRADIENT)),
        Plot("trust_region", "Trust region", of_kl, 2, kl),
        Plot("clip", "Clip", of_clip, 3, clip),
        *([Plot("mask", "Mask", of_mask, 3, mask)] if any(metrics.MASKED.key in group.log for group in groups) else []),
        Plot("completions", "Completions", "On training problems.", 2, completions),
        Plot("cost", "Throughput and memory", of_cost, 2, panels(metrics.THROUGHPUT, metrics.MEMORY)),
    ]


def _draw(groups: Sequence[Group], plot: Plot, file: Path) -> None:
    shown = [panel for panel in plot.panels if any(panel.shows(group) for group in groups)]
    plot.notes = list(_left_out(groups, plot))
    if not shown:
        file.unlink(missing_ok=True)  # of an earlier report
        return
    columns = min(plot.columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    size = (_WIDTH if len(shown) > 1 else _WIDTH / 2, _PANEL_HEIGHT * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, shown, strict=False):
        _draw_panel(axes, groups, panel)
    for axes in grid[len(shown) :]:
        axes.remove()
    handles = list(_legend(groups, shown))
    # A space in front: matplotlib leaves out labels that begin with an underscore
    figure.legend(handles, [f" {handle.get_label()}" for handle in handles], loc="outside upper center", ncols=3)
    figure.savefig(file, dpi=150)
    plot.file = file


def _left_out(groups: Sequence[Group], plot: Plot) -> Iterator[str]:
    """Notes on what a figure lacks: why, whose, and which panels."""
    titles = defaultdict(list)
    for panel in plot.panels:
        reasons = [_why_missing(group, panel) for group in groups]
        for reason in dict.fromkeys(reason for reason in reasons if reason):
            labels = [group.label for group, other in zip(groups, reasons, strict=True) if other == reason]
            who = "any run" if len(labels) == len(groups) and reason == "Not logged by" else ", ".join(labels)
            titles[reason, who].append(panel.title + (" against time" if panel.against_time else ""))
    for (reason, who), names in titles.items():
        yield f"{reason} {who}: {'any of this' if len(names) == len(plot.panels) else '; '.join(names)}."


def _why_missing(group: Group, panel: Panel) -> str:
    keys = {prefix + metric.key for metric in panel.metrics for prefix in ("", metrics.HELD_OUT)[: 1 + panel.held_out]}
    if not keys & set(group.log):
        return "Not logged by"
    if panel.against_time and all(run.clock is None for run in group.runs):
        return "No step_time logged by"
    if not panel.shows(group):
        return "Zero throughout in"
    if panel.held_out and metrics.HELD_OUT + panel.metrics[0].key in group.log and panel.band_held_out(group) is None:
        return "Held-out points, as no update was evaluated by all runs, of"
    return "" if all(keys & set(run.log) for run in group.runs) else "Logged by only some runs of"


# -- One panel --------------------------------------------------------------------------------------------------------


def _draw_panel(axes: Axes, groups: Sequence[Group], panel: Panel) -> None:
    scale, unit = _time_unit(groups) if panel.against_time else (1.0, "")
    axes.set_yscale("log" if panel.metrics[0].log else "linear")
    for number, group in enumerate(groups):
        style = _style(number)
        if (held_out := panel.band_held_out(group)) is not None:
            aside = 0.0 if panel.against_time else (number - (len(groups) - 1) / 2) * 0.012 * held_out.index[-1]
            spread = (held_out["mean"] - held_out["min"], held_out["max"] - held_out["mean"])
            yerr = None if held_out["min"].equals(held_out["max"]) else np.stack(spread)
            look = style | _HELD_OUT | {"clip_on": False, "markeredgewidth": 1.5}
            x = held_out.index / scale + aside
            axes.errorbar(x, held_out["mean"], yerr=yerr, elinewidth=1.5, capsize=3, zorder=4, **look)
            style["marker"] = ""
        for rank, metric in enumerate(panel.metrics):
            look = style | _DOTTED | {"linewidth": 1.0} if rank else style
            if curves := panel.curves(group, metric):
                _draw_curves(axes, curves, scale, look, number)
    _set_axes(axes, panel, unit)
    axes.set_xlim(0, 1.03 * _longest(groups, panel.against_time) / scale or None)
    for bound, colour, _ in _bounds(groups) if panel.bound else ():
        axes.axhline(bound, color=colour, linestyle="--", linewidth=1.1, zorder=1)
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, bound / 1.5), max(top, bound * 1.5))  # well inside a logarithmic axis


def _set_axes(axes: Axes, panel: Panel, time_unit: str) -> None:
    first = panel.metrics[0]
    axes.set_title(panel.title)
    axes.set_xlabel(f"training time ({time_unit})" if panel.against_time else "updates")
    axes.set_ylabel(first.unit.replace("%", "share") or "no unit")
    if first.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    if first.log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    elif math.isfinite(first.lowest):
        top = axes.dataLim.y1
        axes.set_ylim(first.lowest, first.lowest + 1.08 * (top - first.lowest) if top > first.lowest else None)


def _draw_curves(axes: Axes, curves: list[pd.Series], scale: float, look: dict[str, Any], number: int) -> None:
    """The mean of a group's curves and the band around it; beyond the shortest run, thin lines of the longer ones."""
    band = metrics.band(curves)
    count = max(1, round(len(band) / 8))  # markers of different groups at different places
    axes.plot(band.index / scale, band["mean"], markevery=(number * count // 3 % count, count), **look)
    if len(curves) > 1:
        edge = {"linewidth": 0.4, "edgecolor": look["color"], "facecolor": look["color"]}
        axes.fill_between(band.index / scale, band["min"], band["max"], alpha=0.18, **edge)
        common = band.index[-1] if len(band) else -math.inf
        for curve in curves:
            if curve.index[-1] > common:
                beyond = curve.iloc[max(int(curve.index.searchsorted(common, side="right")) - 1, 0) :]
                axes.plot(beyond.index / scale, beyond, **look | {"linewidth": 0.6, "marker": "", "alpha": 0.7})


def _style(number: int) -> dict[str, Any]:
    cycles = {"color": _COLOURS, "linestyle": _LINES, "marker": _MARKERS}
    return {name: of[number % len(of)] for name, of in cycles.items()} | {"markersize": 4.5, "linewidth": 1.5}


def _longest(groups: Sequence[Group], against_time: bool) -> float:
    """Updates or seconds of the longest run: the panels of all figures share their axis."""
    runs = [run for group in groups for run in group.runs]
    if against_time:
        return max((run.clock[1][-1] for run in runs if run.clock is not None), default=0.0)
    return max(run.last_update for run in runs)


def _time_unit(groups: Sequence[Group]) -> tuple[float, str]:
    longest = _longest(groups, against_time=True)
    return next((unit for unit in ((3600.0, "hours"), (60.0, "minutes")) if longest > 2 * unit[0]), (1.0, "seconds"))


def _bounds(groups: Sequence[Group]) -> list[tuple[float, str, str]]:
    """Each bound, its colour (black if all groups share one) and its name in the legend."""
    known = [(_style(number)["color"], *group.kl_bound) for number, group in enumerate(groups) if group.kl_bound]
    known = [row for row in known if math.isfinite(row[1])]
    if len({row[1:] for row in known}) == 1:
        known = [("black", *known[0][1:])]
    return [
        (bound, colour, f"bound {bound:.3g} nats" + (" (inferred from the largest KL)" if inferred else ""))
        for colour, bound, inferred in known
    ]


def _legend(groups: Sequence[Group], panels: Sequence[Panel]) -> Iterator[Line2D | Patch]:
    drawn = [(n, group) for n, group in enumerate(groups) if any(panel.shows(group) for panel in panels)]
    grey: Any = {"color": "0.3", "marker": "o"}
    for number, group in drawn:
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        label = " ".join(group.label.split())
        label = label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
        yield Line2D([], [], **_style(number), label=label + seeds)
    if any(len(group.runs) > 1 for _, group in drawn):
        yield Patch(facecolor="0.5", alpha=0.3, label="band: smallest to largest seed")
    if any(panel.band_held_out(group) is not None for _, group in drawn for panel in panels):
        yield Line2D([], [], **grey | _HELD_OUT, label="large markers: held-out problems")
    if any(len(panel.metrics) > 1 for panel in panels):
        yield Line2D([], [], **grey | _DOTTED, markersize=4.5, label="dotted: before the projection")
    for _, colour, name in _bounds(groups) if any(panel.bound for panel in panels) else ():
        yield Line2D([], [], color=colour, linestyle="--", linewidth=1.1, label=name)

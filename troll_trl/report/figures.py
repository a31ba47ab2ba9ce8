"""The figures of a report: runs overlaid, seeds as a band, legible in black and white. Needs matplotlib (`plots`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter

from troll_trl.report import metrics
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

# Okabe and Ito's colours but for yellow, which is faint on white, and black, which is the bound's. Lines and markers
# tell groups apart without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_DOTTED = (0, (1, 1.3))
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a label is no formula, whatever dollars it holds
}
_WIDTH, _PANEL_HEIGHT = 9.6, 2.8  # inches
_LONGEST_LABEL = 60  # characters in a legend


Curves = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the first metric as the group's line, a second one thin and dotted."""

    title: str
    metrics: tuple[Metric, ...]
    against_time: bool = False
    held_out: bool = False
    bound: bool = False


@dataclass(frozen=True)
class Plan:
    """A figure to draw, `columns` panels wide."""

    name: str
    title: str
    caption: str
    columns: int
    panels: list[Panel]


@dataclass
class Drawn:
    """A figure: its plan, its PNG (`None` if no run had anything to show), and what was left out."""

    plan: Plan
    file: Path | None = None
    notes: list[str] = field(default_factory=list)


def draw_figures(groups: Sequence[Group], success: str | None, output: Path) -> list[Drawn]:
    """
    Draw all figures that the runs have data for into `output`, in the order of the page; one of an earlier report that
    has no data this time is removed. `success` is as for [`reward_metrics`].
    """
    with matplotlib.rc_context(_STYLE):
        return [_draw(groups, plan, output / f"{plan.name}.png") for plan in _plans(groups, success)]


def _plans(groups: Sequence[Group], success: str | None) -> Iterator[Plan]:
    def panels(*shown: Metric) -> list[Panel]:
        return [Panel(one.title, (one,)) for one in shown]

    rewards = [
        Panel(metric.title, (metric,), against_time, held_out=True)
        for metric in metrics.reward_metrics(groups, success)
        for against_time in (False, True)
    ]
    text = (
        "Left against updates (optimizer steps), right against training time: the sum of TRL's step_time, which is "
        "generation, forward and backward passes, without evaluations and checkpoints. Held-out points of the same "
        "update stand side by side."
    )
    yield Plan("reward", "Reward and success", text, 2, rewards)
    yield Plan("optimization", "Entropy and gradient", "", 2, panels(metrics.ENTROPY, metrics.GRADIENT))
    kl = [
        Panel("Largest KL of a token from the old policy", (metrics.KL_MAX_AFTER, metrics.KL_MAX_BEFORE), bound=True),
        Panel("Mean KL of the tokens from the old policy", (metrics.KL_MEAN_AFTER, metrics.KL_MEAN_BEFORE), bound=True),
    ]
    text = (
        "KL from the old policy q before the projection, KL(p‖q), and after it, KL(π‖q), which the bound holds for. "
        "On a logarithmic axis zeros (updates with the weights of the rollout) are not drawn."
    )
    yield Plan(
        "trust_region",
        "Trust region",
        text,
        2,
        kl + panels(metrics.PROJECTED, metrics.ETA, metrics.REGRESSION, metrics.SUPPORT),
    )
    text = "Share of tokens whose gradient the clip dropped, of runs that clip."
    yield Plan("clip", "Clip", text, 3, panels(metrics.CLIPPED, metrics.CLIPPED_LOW, metrics.CLIPPED_HIGH))
    yield Plan("completions", "Completions", "On training problems.", 2, panels(metrics.LENGTH, metrics.TRUNCATED))
    text = (
        "Tokens of prompts and completions on all ranks per second of training time, each rollout batch over the time "
        "of all its updates; largest memory of one process since its start."
    )
    yield Plan("cost", "Throughput and memory", text, 2, panels(metrics.THROUGHPUT, metrics.MEMORY))


def _draw(groups: Sequence[Group], plan: Plan, file: Path) -> Drawn:
    drawn = Drawn(plan)
    shown = [panel for panel in plan.panels if any(_has_data(group, panel) for group in groups)]
    drawn.notes = list(_left_out(groups, plan))
    if not shown:
        file.unlink(missing_ok=True)  # that of an earlier report
        return drawn
    columns = min(plan.columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(
        figsize=(_WIDTH if len(shown) > 1 else _WIDTH / 2, _PANEL_HEIGHT * rows + 0.5), layout="constrained"
    )
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, shown, strict=False):
        _draw_panel(axes, groups, panel)
    for axes in grid[len(shown) :]:
        axes.remove()
    handles = list(_legend(groups, shown))
    # A space in front: matplotlib leaves out labels that begin with an underscore
    figure.legend(handles, [f" {handle.get_label()}" for handle in handles], loc="outside upper center", ncols=3)
    figure.savefig(file, dpi=150)
    drawn.file = file
    return drawn


def _curves(group: Group, metric: Metric, panel: Panel) -> Curves:
    curves = (metrics.curve(run, metric, panel.against_time) for run in group.runs)
    return [curve for curve in curves if curve is not None]


def _has_data(group: Group, panel: Panel) -> bool:
    held_out = panel.held_out and metrics.held_out(group, panel.metrics[0], panel.against_time) is not None
    return held_out or any(_curves(group, metric, panel) for metric in panel.metrics)


def _left_out(groups: Sequence[Group], plan: Plan) -> Iterator[str]:
    """Notes on what a figure lacks: why, whose, and which panels."""
    titles: dict[tuple[str, str], list[str]] = {}
    for panel in plan.panels:
        reasons = [_why_missing(group, panel) for group in groups]
        for reason in dict.fromkeys(reason for reason in reasons if reason):
            labels = [group.label for group, other in zip(groups, reasons, strict=True) if other == reason]
            who = "any run" if len(labels) == len(groups) and reason == "Not logged by" else ", ".join(labels)
            name = panel.title + (" against time" if panel.against_time else "")
            titles.setdefault((reason, who), []).append(name)
    for (reason, who), names in titles.items():
        yield f"{reason} {who}: {'any of this' if len(names) == len(plan.panels) else '; '.join(names)}."


def _why_missing(group: Group, panel: Panel) -> str:
    keys = [prefix + metric.key for metric in panel.metrics for prefix in ("", metrics.HELD_OUT)[: 1 + panel.held_out]]
    if not any(run.logs(key) for run in group.runs for key in keys):
        return "Not logged by"
    if panel.against_time and all(run.clock is None for run in group.runs):
        return "No step_time logged by"
    if not _has_data(group, panel):
        return "Zero throughout in"
    evaluated = panel.held_out and any(run.logs(metrics.HELD_OUT + panel.metrics[0].key) for run in group.runs)
    if evaluated and metrics.held_out(group, panel.metrics[0], panel.against_time) is None:
        return "Held-out points, as no update was evaluated by all runs, of"
    return "" if all(any(run.logs(key) for key in keys) for run in group.runs) else "Logged by only some runs of"


# -- One panel --------------------------------------------------------------------------------------------------------


def _draw_panel(axes: Axes, groups: Sequence[Group], panel: Panel) -> None:
    scale, unit = _time_unit(groups) if panel.against_time else (1.0, "")
    axes.set_yscale("log" if panel.metrics[0].log else "linear")
    for number, group in enumerate(groups):
        style = _style(number)
        held_out = metrics.held_out(group, panel.metrics[0], panel.against_time) if panel.held_out else None
        if held_out is not None:
            aside = 0.0 if panel.against_time else (number - (len(groups) - 1) / 2) * 0.012 * held_out.x[-1]
            _draw_held_out(axes, held_out.x / scale + aside, held_out, style)
            style["marker"] = ""
        for rank, metric in enumerate(panel.metrics):
            look = style | {"linestyle": _DOTTED, "linewidth": 1.0, "markerfacecolor": "white"} if rank else style
            _draw_curves(axes, _curves(group, metric, panel), scale, look, number)
    _set_axes(axes, panel, unit)
    axes.set_xlim(0, 1.03 * _longest(groups, panel.against_time) / scale or None)
    if panel.bound:
        for bound, colour, _ in _bounds(groups):
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


def _draw_curves(axes: Axes, curves: Curves, scale: float, look: dict[str, Any], number: int) -> None:
    """The mean of a group's curves and the band around it; beyond the shortest run, thin lines of the longer ones."""
    if not curves:
        return
    band = metrics.band(curves)
    # Markers of different groups at different places
    count = max(1, round(len(band.x) / 8))
    axes.plot(band.x / scale, band.mean, markevery=(number * count // 3 % count, count), **look)
    if len(curves) > 1:
        edge = {"linewidth": 0.4, "edgecolor": look["color"]}
        axes.fill_between(band.x / scale, band.low, band.high, alpha=0.18, facecolor=look["color"], **edge)
        common = band.x[-1] if len(band.x) else -math.inf
        for x, y in curves:
            if x[-1] > common:
                beyond = max(int(np.searchsorted(x, common, side="right")) - 1, 0)
                axes.plot(x[beyond:] / scale, y[beyond:], **look | {"linewidth": 0.6, "marker": "", "alpha": 0.7})


def _draw_held_out(axes: Axes, x: np.ndarray, band: metrics.Band, style: dict[str, Any]) -> None:
    """Large hollow markers, and bars from the smallest to the largest seed."""
    look = (
        style
        | {"clip_on": False}
        | {"markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.5, "linewidth": 0.8}
    )
    spread = None if np.array_equal(band.low, band.high) else np.stack([band.mean - band.low, band.high - band.mean])
    axes.errorbar(x, band.mean, yerr=spread, elinewidth=1.5, capsize=3, zorder=4, **look)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _LINES[number % len(_LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


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
    known = {number: group.kl_bound for number, group in enumerate(groups) if group.kl_bound is not None}
    known = {number: bound for number, bound in known.items() if math.isfinite(bound[0])}
    if len(set(known.values())) == 1:
        known = dict([known.popitem()])
        colours = ["black"]
    else:
        colours = [_COLOURS[number % len(_COLOURS)] for number in known]
    return [
        (bound, colour, f"bound {bound:.3g} nats" + (" (inferred from the largest KL)" if inferred else ""))
        for (bound, inferred), colour in zip(known.values(), colours, strict=True)
    ]


def _legend(groups: Sequence[Group], panels: Sequence[Panel]) -> Iterator[Line2D | Patch]:
    drawn = [(n, group) for n, group in enumerate(groups) if any(_has_data(group, panel) for panel in panels)]
    for number, group in drawn:
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        yield Line2D([], [], **_style(number), label=_shortened(group.label) + seeds)
    if any(len(group.runs) > 1 for _, group in drawn):
        yield Patch(facecolor="0.5", alpha=0.3, label="band: smallest to largest seed")
    held_out = [panel for panel in panels if panel.held_out]
    if any(metrics.held_out(group, panel.metrics[0], panel.against_time) for _, group in drawn for panel in held_out):
        look: dict[str, Any] = {
            "color": "0.3",
            "marker": "o",
            "markersize": 7,
            "markerfacecolor": "white",
            "linewidth": 0.8,
        }
        yield Line2D([], [], **look, label="large markers: held-out problems")
    if any(len(panel.metrics) > 1 for panel in panels):
        look = {"color": "0.3", "linestyle": _DOTTED, "marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
        yield Line2D([], [], **look, label="dotted: before the projection")
    if any(panel.bound for panel in panels):
        for _, colour, name in _bounds(groups):
            yield Line2D([], [], color=colour, linestyle="--", linewidth=1.1, label=name)


def _shortened(label: str) -> str:
    label = " ".join(label.split())
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"

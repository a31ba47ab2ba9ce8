"""The figures of the study, from the records of its runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from evidence import peers, rate
from evidence.tables import RESAMPLES, Record
from math_answers.evaluation.statistics import estimate

# Distinct without colours as well
STYLES: dict[str, dict[str, Any]] = {
    "troll": {"color": "C0", "marker": "o", "linestyle": "-", "linewidth": 2.2},
    "clip": {"color": "C3", "marker": "s", "linestyle": "-"},
    "clip-wider": {"color": "C1", "marker": "^", "linestyle": "--"},
    "kl": {"color": "C2", "marker": "v", "linestyle": "-."},
    "tv": {"color": "C4", "marker": "D", "linestyle": ":"},
    "binary-pull": {"color": "C0", "marker": "o", "linestyle": "--", "markerfacecolor": "white"},
    "cpgd": {"color": "C5", "marker": "v", "linestyle": "-."},
    "candidate": {"color": "C2", "marker": "D", "linestyle": ":", "linewidth": 2.2},
}


def draw_rate(records: Sequence[Record], study: str, file: Path) -> None:
    """Success against the learning rate, a line for each trust region; bands are 95 % intervals over seeds."""
    runs = rate.Runs(records)
    styles = dict(zip(rate.LABELS, ("troll", "clip", "clip-wider", "tv", "kl"), strict=True))
    places = {f"{kind}, {updates} updates": (rate.KINDS[kind], updates) for kind, updates in rate.PLACES}
    lines = {
        place: {region: runs.at_rates(tasks, updates, region) for region in styles}
        for place, (tasks, updates) in places.items()
    }
    _draw(lines, rate.LABELS, styles, file)


def draw_peers(records: Sequence[Record], study: str, file: Path) -> None:
    """The same for TROLL, the tuned clip, and the peers that cost as little as a clip."""
    runs = peers.Runs(records)
    styles = {"troll": "troll", "clip": "clip", "clip-binary-pull": "binary-pull"}
    styles |= {"cpgd": "cpgd", "candidate": "candidate"}
    lines = {
        f"{place} updates": {method: runs.at_rates(tasks, updates, method) for method in styles}
        for place, (tasks, updates) in peers.PLACES.items()
    }
    _draw(lines, peers.LABELS, styles, file)


def _draw(
    lines: Mapping[str, Mapping[str, list[list[np.ndarray]]]],
    labels: Mapping[str, str],
    styles: Mapping[str, str],
    file: Path,
) -> None:
    """Four panels by title; in each the successes of every line, by rate and by task `(seeds,)`."""
    with matplotlib.rc_context({"font.size": 14}):  # legible at a width of 400 pixels
        layout = ConstrainedLayoutEngine(wspace=0.06)  # the outer tick labels of neighbours stay apart
        figure = Figure(figsize=(8, 8.4), layout=layout)
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for (title, of_panel), axes in zip(lines.items(), panels.flat, strict=True):
            for name, of_rates in of_panel.items():
                means = [estimate([x[:, None] for x in of_rate], RESAMPLES, seed=0)[0] for of_rate in of_rates]
                if means:
                    value, low, high = (
                        100 * np.array([getattr(m, end) for m in means]) for end in ("value", "low", "high")
                    )
                    style = STYLES[styles[name]]
                    axes.fill_between(rate.RATES, low, high, color=style["color"], alpha=0.2, linewidth=0)
                    axes.plot(rate.RATES, value, label=labels[name], **style)
            axes.set(title=title, xscale="log", ylim=(0, 80))
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
    "rate": {"rate": (draw_rate, "rates")},
    "peers": {"peers": (draw_peers, "rates")},
}

"""The figures of the study, from the records of its runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from evidence import rate
from evidence.tables import RESAMPLES, Record
from math_answers.evaluation.statistics import estimate

# Distinct without colours as well
STYLES: dict[str, dict[str, Any]] = {
    "troll": {"color": "C0", "marker": "o", "linestyle": "-", "linewidth": 2.2},
    "clip": {"color": "C3", "marker": "s", "linestyle": "-"},
    "clip-wider": {"color": "C1", "marker": "^", "linestyle": "--"},
    "kl": {"color": "C2", "marker": "v", "linestyle": "-."},
    "tv": {"color": "C4", "marker": "D", "linestyle": ":"},
}


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
    "rate": {"rate": (draw_rate, "rates")},
}

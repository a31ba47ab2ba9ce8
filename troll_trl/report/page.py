"""The page of a report: its table with intervals, its figures embedded, and all that was left out."""

import base64
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from troll_trl.evaluation.statistics import Estimate
from troll_trl.report import metrics
from troll_trl.report.figures import Plot
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import RUN_SETTINGS, Group

INTERVALS = (
    "[ … ]: 95 % interval of the mean, by Student's t over the seeds, cut to what is possible (a share cannot exceed "
    "100 %). With one seed (marked †) it is over the log lines of the last tenth of the updates: how sure that mean "
    "is, and nothing about other seeds. “At the end” is the mean over the last tenth of the updates; largest values "
    "are those of the whole run."
)
_BOUND_TOLERANCE = 1e-3  # relative: the projection promises no less
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1000px; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top;
         overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; } thead th { border-bottom: 2px solid #444; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption, .note { font-size: 14px; color: #444; }
.warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
</style>
"""

# -- The table --------------------------------------------------------------------------------------------------------


def make_table(groups: Sequence[Group], success: str | None) -> list[list[str]]:
    """
    The final table in plain text: a head, then one row per quantity and one column per group. It leaves out rows
    without any value. `success` is as for [`reward_metrics`].
    """
    rows = [
        ["seeds", *(str(len(group.runs)) for group in groups)],
        ["updates", *(_range([(run.last_update, str(run.last_update)) for run in group.runs]) for group in groups)],
        ["training time", *(_range(_durations(group)) for group in groups)],
    ]

    def add(*shown: Metric, when: str = "at the end", **how: Any) -> None:
        for one in shown:
            unit = f" ({one.unit})" if one.unit and not one.is_share else ""
            cells = [_cell(metrics.final(group, one, **how), one) for group in groups]
            rows.append([f"{one.title}{', ' * bool(when)}{when}{unit}", *cells])

    for reward in metrics.reward_metrics(groups, success):
        add(reward, when="held out, first", prefix=metrics.HELD_OUT, first=True)
        add(reward, when="held out, last", prefix=metrics.HELD_OUT)
        add(reward, when="training, at the end")
    add(metrics.ENTROPY, metrics.GRADIENT, metrics.LENGTH, metrics.TRUNCATED, metrics.CLIPPED, metrics.PROJECTED)
    add(metrics.MASKED)
    inferred = {True: " (inferred)", False: ""}
    bounds = [f"{group.kl_bound[0]:.4g}{inferred[group.kl_bound[1]]}" if group.kl_bound else "–" for group in groups]
    rows.append(["KL bound (nats)", *bounds])
    add(metrics.KL_MAX_BEFORE, metrics.KL_MAX_AFTER, when="")
    add(metrics.KL_MEAN_BEFORE, metrics.KL_MEAN_AFTER, metrics.REGRESSION, metrics.ETA, metrics.THROUGHPUT)
    add(metrics.MEMORY, when="")
    return [["", *(group.label for group in groups)], *(row for row in rows if set(row[1:]) != {"–"})]


def _cell(final: tuple[Estimate, int] | None, metric: Metric) -> str:
    """An estimate with its interval, in the digits and the unit of its metric."""
    if final is None:
        return "–"
    estimate, seeds = final
    size, scale, form = abs(estimate.value), 1, ".3g"
    if metric.is_share:
        form, scale = ".1f" if size >= 0.01 else ".2f", 100
    elif size == 0 or size >= 1e-3:  # four digits
        form = f".{max(0, 3 - math.floor(math.log10(size)) if size else 0)}f"
    text = f"{scale * estimate.value:{form}}"
    if not math.isnan(estimate.low):
        text += f" [{scale * estimate.low:{form}}, {scale * estimate.high:{form}}]" + "†" * (seeds == 1)
    return text + " %" * metric.is_share


def _range(values: Iterable[tuple[float, str]]) -> str:
    texts = [text for _, text in sorted(values)]
    return "–".join(dict.fromkeys((texts[0], texts[-1]))) if texts else "–"


def _durations(group: Group) -> Iterable[tuple[float, str]]:
    for x in (float(run.clock[1][-1]) for run in group.runs if run.clock is not None):
        yield x, f"{x:.0f} s" if x < 120 else f"{x / 60:.1f} min" if x < 7200 else f"{x / 3600:.2f} h"


# -- What a reader must know ------------------------------------------------------------------------------------------


def warnings_of(groups: Sequence[Group]) -> list[str]:
    """Warnings if runs are not what a reader would take them for: mixed settings, a bound that did not hold."""
    warnings = []
    for group in groups:
        shown = f"The runs of {group.label} are shown as seeds, but"
        if differing := group.differing_settings():
            warnings.append(f"{shown} differ in {', '.join(differing)}.")
        if len(methods := sorted({run.method for run in group.runs})) > 1 and "method" not in differing:
            warnings.append(f"{shown} are of methods {' and '.join(methods)}.")
        if len({run.last_update for run in group.runs}) > 1:
            text = "have different lengths: the mean and the band end with the shortest, thin lines go on"
            warnings.append(f"The runs of {group.label} {text}.")
        bound, inferred = group.kl_bound or (math.inf, True)
        for run in () if inferred else group.runs:
            steps, largest = run.points(metrics.KL_MAX_AFTER.key)
            exceeded = largest > bound * (1 + _BOUND_TOLERANCE)
            if exceeded.any():
                text = f"KL after the projection of {largest.max():.4g} exceeds the bound {bound:g}"
                warnings.append(f"{run.folder}: the {text}, first at update {steps[exceeded][0]:.0f}.")
    return warnings


def _differing_settings(groups: Sequence[Group]) -> list[list[str]]:
    """A table of the saved settings that are not the same in all groups; empty if there is none."""

    def cell(group: Group, name: str) -> str:
        values = dict.fromkeys(str(run.settings[name]) for run in group.runs if name in run.settings)
        return "; ".join(values) or "–"

    names = sorted({name for group in groups for run in group.runs for name in run.settings} - RUN_SETTINGS)
    rows = [[name, *(cell(group, name) for group in groups)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return [["", *(group.label for group in groups)], *rows] if rows else []


# -- The page ---------------------------------------------------------------------------------------------------------


def write_page(groups: Sequence[Group], plots: Sequence[Plot], table: Sequence[Sequence[str]], file: Path) -> None:
    """Write one self-contained HTML file, which requests nothing: the runs, their final table, their figures."""
    title = f"Training report: {', '.join(group.label for group in groups)}"
    parts = [f"{_HEAD}<title>{escape(title)}</title>\n</head>\n<body>\n<h1>Training report</h1>", *_top(groups)]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in warnings_of(groups)]
    parts += ["<h2>Result</h2>", _html_table(table), f'<p class="note">{escape(INTERVALS)}</p>']
    for plot in plots:
        parts += [f"<h2>{escape(plot.title)}</h2>"]
        if plot.file is not None:
            image = base64.b64encode(plot.file.read_bytes()).decode()
            text = escape(f"{plot.title}: " + "; ".join(panel.title for panel in plot.panels))
            parts += [f'<figure><img alt="{text}" src="data:image/png;base64,{image}">']
            parts += [f"<figcaption>{escape(plot.caption)}</figcaption></figure>"]
        parts += [f'<p class="note">{escape(note)}</p>' for note in plot.notes]
    if settings := _differing_settings(groups):
        parts += ["<h2>Settings that differ</h2>", _html_table(settings)]
    runs = [
        [group.label, str(run.state_file), str(run.last_update), " ".join(run.notes) or "–"]
        for group in groups
        for run in group.runs
    ]
    parts += ["<h2>Runs</h2>", _html_table([["", "read from", "updates", "notes"], *runs])]
    made = f"Made by `troll report` on {datetime.now():%Y-%m-%d %H:%M}. Curves of more than {metrics.MAX_POINTS} lines"
    parts += [f'<p class="note">{made} are averaged over whole rollout batches (of maxima, their maximum).</p>']
    file.write_text("\n".join(parts) + "\n</body>\n</html>\n", encoding="utf-8")


def _top(groups: Sequence[Group]) -> list[str]:
    """Which model was trained on what, and how: one line for what all groups share, and one item for each group."""
    settings = [group.key_settings for group in groups]
    shared = {name: value for name, value in settings[0].items() if all(other[name] == value for other in settings)}
    items = []
    for group, of_group in zip(groups, settings, strict=True):
        seeds = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs, shown as seeds of one configuration"
        methods = " and ".join(sorted({run.method for run in group.runs}))
        own = [f"{name} {value}" for name, value in of_group.items() if name not in shared]
        items.append("<li>" + escape("; ".join([f"{group.label}: {seeds}", f"method {methods}", *own])) + "</li>")
    line = "; ".join(f"{name} {value}" for name, value in shared.items())
    return [f"<p>{escape(line[:1].upper() + line[1:])}</p>" if line else "", "<ul>", *items, "</ul>"]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = [
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows[1:]
    ]
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"])

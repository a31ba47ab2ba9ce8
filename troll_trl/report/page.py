"""The page of a report: its table with intervals, its figures embedded, and all that was left out."""

import base64
import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from troll_trl.report import metrics
from troll_trl.report.figures import Drawn
from troll_trl.report.metrics import Estimate, Metric
from troll_trl.report.runs import RUN_SETTINGS, Group, Run

INTERVALS = (
    "[ … ]: 95 % interval of the mean, by Student's t over the seeds, cut to what is possible (a share cannot exceed "
    "100 %). With one seed (marked †) it is over the log lines of the last tenth of the updates: how sure that mean "
    "is, and nothing about other seeds. “At the end” is the mean over the last tenth of the updates; largest values "
    "are those of the whole run."
)
# On what a relative excess over the bound is more than rounding: what the projection promises
_BOUND_TOLERANCE = 1e-3
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1000px; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top;
         overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; } thead th { border-bottom: 2px solid #444; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption, .note { font-size: 14px; color: #444; }
.warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
"""


# -- The table --------------------------------------------------------------------------------------------------------


def make_table(groups: Sequence[Group], success: str | None) -> list[list[str]]:
    """
    The final table in plain text: a head, then one row per quantity and one column per group. Rows without any value
    are left out. `success` is as for [`reward_metrics`].
    """
    rows: list[tuple[str, list[str]]] = [
        ("seeds", [str(len(group.runs)) for group in groups]),
        (
            "updates",
            [_range([str(step) for step in sorted(run.last_update for run in group.runs)]) for group in groups],
        ),
        ("training time", [_range(_durations(group)) for group in groups]),
    ]

    def add(*rows_of: Metric, when: str = "at the end", **how: Any) -> None:
        for one in rows_of:
            unit = f" ({one.unit})" if one.unit and not one.is_share else ""
            cells = [show(metrics.final(group, one, **how), one) for group in groups]
            rows.append((f"{one.title}{', ' * bool(when)}{when}{unit}", cells))

    for reward in metrics.reward_metrics(groups, success):
        add(reward, when="held out, first", prefix=metrics.HELD_OUT, first=True)
        add(reward, when="held out, last", prefix=metrics.HELD_OUT)
        add(reward, when="training, at the end")
    add(metrics.ENTROPY, metrics.GRADIENT, metrics.LENGTH, metrics.TRUNCATED, metrics.CLIPPED, metrics.PROJECTED)
    rows.append(("KL bound (nats)", [_bound(group) for group in groups]))
    add(metrics.KL_MAX_BEFORE, metrics.KL_MAX_AFTER, when="")
    add(metrics.KL_MEAN_BEFORE, metrics.KL_MEAN_AFTER, metrics.REGRESSION, metrics.ETA, metrics.THROUGHPUT)
    add(metrics.MEMORY, when="")
    head = ["", *(group.label for group in groups)]
    return [head, *([name, *cells] for name, cells in rows if any(cell != "–" for cell in cells))]


def show(estimate: Estimate | None, metric: Metric) -> str:
    """An estimate with its interval, in the digits and the unit of its metric."""
    if estimate is None:
        return "–"

    size = abs(estimate.mean)
    if metric.is_share:
        form, scale = (".1f", 100) if size >= 0.01 else (".2f", 100)
    elif size == 0 or size >= 1e-3:  # four digits
        form, scale = f".{max(0, 3 - math.floor(math.log10(size)) if size else 0)}f", 1
    else:
        form, scale = ".3g", 1
    text = f"{scale * estimate.mean:{form}}"
    if estimate.interval is not None:
        low, high = estimate.interval
        text += f" [{scale * low:{form}}, {scale * high:{form}}]" + ("†" if estimate.seeds == 1 else "")
    return text + (" %" if metric.is_share else "")


def _range(values: Sequence[str]) -> str:
    return "–".join(dict.fromkeys((values[0], values[-1]))) if values else "–"


def _durations(group: Group) -> list[str]:
    """Training times, ascending."""
    seconds = sorted(float(run.clock[1][-1]) for run in group.runs if run.clock is not None)
    return [f"{x:.0f} s" if x < 120 else f"{x / 60:.1f} min" if x < 7200 else f"{x / 3600:.2f} h" for x in seconds]


def _bound(group: Group) -> str:
    if group.kl_bound is None:
        return "–"
    bound, inferred = group.kl_bound
    return f"{bound:.4g}" + (" (inferred)" if inferred else "")


def to_markdown(table: Sequence[Sequence[str]]) -> str:
    """The table in markdown, its columns aligned."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]) + "\n"


# -- What a reader must know ------------------------------------------------------------------------------------------


def warnings_of(groups: Sequence[Group]) -> list[str]:
    """Where the runs are not what a reader would take them for: mixed settings, a bound that did not hold."""
    warnings = []
    for group in groups:
        if differing := group.differing_settings():
            warnings.append(f"The runs of {group.label} are shown as seeds, but differ in {', '.join(differing)}.")
        if len(methods := sorted({run.method for run in group.runs})) > 1 and "method" not in differing:
            warnings.append(
                f"The runs of {group.label} are shown as seeds, but are of methods {' and '.join(methods)}."
            )
        if len({run.last_update for run in group.runs}) > 1:
            text = "have different lengths: the mean and the band end with the shortest, thin lines go on"
            warnings.append(f"The runs of {group.label} {text}.")
        if group.kl_bound is None or group.kl_bound[1]:
            continue
        for run in group.runs:
            steps, largest = run.points(metrics.KL_MAX_AFTER.key)
            exceeded = largest > group.kl_bound[0] * (1 + _BOUND_TOLERANCE)
            if exceeded.any():
                text = f"KL after the projection of {largest.max():.4g} exceeds the bound {group.kl_bound[0]:g}"
                warnings.append(f"{run.folder}: the {text}, first at update {steps[exceeded][0]:.0f}.")
    return warnings


def differing_settings(groups: Sequence[Group]) -> list[list[str]]:
    """A table of the saved settings that are not the same in all groups; empty where there is none."""
    names = sorted({name for group in groups for run in group.runs for name in run.settings} - RUN_SETTINGS)
    rows = [[name, *(_setting(group, name) for group in groups)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return [["", *(group.label for group in groups)], *rows] if rows else []


def _setting(group: Group, name: str) -> str:
    values = dict.fromkeys(str(run.settings[name]) for run in group.runs if name in run.settings)
    return "; ".join(values) or "–"


# -- The page ---------------------------------------------------------------------------------------------------------


def write_page(groups: Sequence[Group], drawn: Sequence[Drawn], table: Sequence[Sequence[str]], file: Path) -> None:
    """Write one self-contained HTML file, which requests nothing: the runs, their final table, their figures."""
    parts = ["<h1>Training report</h1>", *_top(groups)]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in warnings_of(groups)]
    parts += ["<h2>Result</h2>", _html_table(table), f'<p class="note">{escape(INTERVALS)}</p>']
    for figure in drawn:
        parts += [f"<h2>{escape(figure.plan.title)}</h2>"]
        if figure.file is not None:
            image = base64.b64encode(figure.file.read_bytes()).decode()
            text = f"{figure.plan.title}: " + "; ".join(panel.title for panel in figure.plan.panels)
            parts += [
                f'<figure><img alt="{escape(text)}" src="data:image/png;base64,{image}">',
                f"<figcaption>{escape(figure.plan.caption)}</figcaption></figure>",
            ]
        parts += [f'<p class="note">{escape(note)}</p>' for note in figure.notes]
    if settings := differing_settings(groups):
        parts += ["<h2>Settings that differ</h2>", _html_table(settings)]
    parts += ["<h2>Runs</h2>", _html_table([["", "read from", "updates", "notes"], *map(_run_row, _runs(groups))])]
    parts += [
        f'<p class="note">Made by scripts/report.py on {datetime.now():%Y-%m-%d %H:%M}. Curves of more than '
        f"{metrics.MAX_POINTS} lines are averaged over whole rollout batches (of maxima, their maximum).</p>"
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Training report: {escape(', '.join(group.label for group in groups))}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    file.write_text(head + "\n".join(parts) + "\n</body>\n</html>\n", encoding="utf-8")


def _top(groups: Sequence[Group]) -> list[str]:
    """Which model was trained on what, and how: what all groups share in one line, what they do not beside each."""
    settings = [group.key_settings for group in groups]
    shared = {name: value for name, value in settings[0].items() if all(other[name] == value for other in settings)}
    items = []
    for group, of_group in zip(groups, settings, strict=True):
        seeds = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs, shown as seeds of one configuration"
        methods = " and ".join(sorted({run.method for run in group.runs}))
        own = [f"{name} {value}" for name, value in of_group.items() if name not in shared]
        items.append("; ".join([f"{group.label}: {seeds}", f"method {methods}", *own]))
    line = "; ".join(f"{name} {value}" for name, value in shared.items())
    return [*([f"<p>{escape(line[:1].upper() + line[1:])}</p>"] if line else []), _html_list(items)]


def _runs(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def _run_row(pair: tuple[Group, Run]) -> list[str]:
    group, run = pair
    return [group.label, str(run.state_file), str(run.last_update), " ".join(run.notes) or "–"]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows[1:]
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _html_list(items: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"

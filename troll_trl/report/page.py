"""The page of a report: a table with intervals, the figures, and notes on what they leave out."""

import base64
import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from troll_trl.evaluation.statistics import Estimate
from troll_trl.report import metrics
from troll_trl.report.figures import CAPTIONS, Plot
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

INTERVALS = (
    "[ … ]: 95 % interval of the mean, by Student's t over the seeds, cut to what is possible (a share cannot exceed "
    "100 %). With one seed (marked †) it is over the log lines of the last tenth of the updates. It then says how "
    "certain that mean is, and nothing about other seeds. “At the end” is the mean over the last tenth of the updates; "
    "largest values are those of the whole run. In the figures the mean and the band end with the shortest run of a "
    "group; thin lines continue the longer ones."
)
_KEY_SETTINGS = ("method", "model_name_or_path", "dataset_name", "learning_rate")
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
        ["updates", *(_range([run.last_update for run in group.runs], "d") for group in groups)],
        ["training time", *map(_training_time, groups)],
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
    rows.append(["KL bound (nats)", *("–" if group.kl_bound is None else f"{group.kl_bound:.4g}" for group in groups)])
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


def _range(values: Sequence[float], form: str) -> str:
    return "–".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def _training_time(group: Group) -> str:
    seconds = [run.clock.iloc[-1] for run in group.runs if len(run.clock)]
    unit, scale = metrics.time_unit(max(seconds, default=0.0))
    return f"{_range([time / scale for time in seconds], '.1f')} {unit}" if seconds else "–"


# -- What a reader must know ------------------------------------------------------------------------------------------


def warnings_of(groups: Sequence[Group]) -> list[str]:
    """Warnings of runs that a reader would misunderstand: mixed settings, a KL above its bound."""
    warnings = []
    for group in groups:
        if len(differing := group.settings.columns[group.settings.nunique(dropna=False) > 1]):
            names = ", ".join(sorted(differing))
            warnings.append(f"The runs of {group.label} are shown as seeds, but differ in {names}.")
        bound = math.inf if group.kl_bound is None else group.kl_bound
        for run in group.runs:
            largest = run.values(metrics.KL_MAX_AFTER.key)
            exceeding = largest[largest > bound * (1 + _BOUND_TOLERANCE)]
            if len(exceeding):
                text = f"KL after the projection of {exceeding.max():.4g} exceeds the bound {bound:g}"
                warnings.append(f"{run.folder}: the {text}, first at update {exceeding.index[0]}.")
    return warnings


def _settings_table(groups: Sequence[Group]) -> list[list[str]]:
    """Method, model, dataset and learning rate of the groups, and the other settings that are not the same in all."""
    texts = [group.settings.apply(lambda values: " or ".join(values.dropna().unique())) for group in groups]
    table = pd.concat(texts, axis=1).fillna("–").sort_index()
    differing = [name for name in table.index[table.nunique(axis=1) > 1] if name not in _KEY_SETTINGS]
    shown = table.reindex([*_KEY_SETTINGS, *differing], fill_value="–")
    return [["", *(group.label for group in groups)], *([name, *row] for name, *row in shown.itertuples())]


# -- The page ---------------------------------------------------------------------------------------------------------


def write_page(groups: Sequence[Group], plots: Sequence[Plot], table: Sequence[Sequence[str]], file: Path) -> None:
    """Write one self-contained HTML file, which requests nothing: the runs, their final table, their figures."""
    title = f"Training report: {', '.join(group.label for group in groups)}"
    parts = [f"{_HEAD}<title>{escape(title)}</title>\n</head>\n<body>\n<h1>Training report</h1>"]
    parts += [_html_table(_settings_table(groups))]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in warnings_of(groups)]
    parts += ["<h2>Result</h2>", _html_table(table), f'<p class="note">{escape(INTERVALS)}</p>']
    for plot in plots:
        parts += [f"<h2>{escape(plot.title)}</h2>"]
        if plot.file is not None:
            image = base64.b64encode(plot.file.read_bytes()).decode()
            text = escape(f"{plot.title}: " + "; ".join(panel.title for panel in plot.panels))
            parts += [f'<figure><img alt="{text}" src="data:image/png;base64,{image}">']
            parts += [f"<figcaption>{escape(CAPTIONS[plot.name])}</figcaption></figure>"]
        parts += [f'<p class="note">{escape(note)}</p>' for note in plot.notes]
    runs = [
        [group.label, str(run.state_file), str(run.last_update), " ".join(run.notes) or "–"]
        for group in groups
        for run in group.runs
    ]
    parts += ["<h2>Runs</h2>", _html_table([["", "read from", "updates", "notes"], *runs])]
    made = f"Made by `troll report` on {datetime.now():%Y-%m-%d %H:%M}. Curves of more than {metrics.MAX_POINTS} lines"
    parts += [f'<p class="note">{made} are averaged over whole rollout batches (of maxima, their maximum).</p>']
    file.write_text("\n".join(parts) + "\n</body>\n</html>\n", encoding="utf-8")


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = [
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows[1:]
    ]
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"])

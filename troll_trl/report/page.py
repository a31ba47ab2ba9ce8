"""The page of a report: a table with intervals, the figures, and notes on what they leave out."""

import base64
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from math_answers.evaluation.samples import write_text
from math_answers.evaluation.statistics import Estimate
from troll_trl.report import metrics
from troll_trl.report.figures import CAPTIONS, Plot
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

INTERVALS = (
    "[ … ]: 95 % interval of the mean, by Student's t over the seeds, cut to what is possible. With one seed (marked "
    "†) it is over the log lines of the last tenth of the updates, and says nothing about other seeds. “At the end” is "
    "the mean over the last tenth of the updates; largest values are from the whole run. In the figures the mean and "
    "the band end with the shortest run of a group; thin lines continue the longer ones."
)
_KEY_SETTINGS = ("method", "model_name_or_path", "dataset_name", "learning_rate")
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
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


def make_table(groups: Sequence[Group], success: str | None) -> pd.DataFrame:
    """The final table as text: a row for each quantity that has a value, a column for each group. `success` is as for
    [`reward_metrics`]."""

    def row(metric: Metric, when: str = ", at the end", **how: Any) -> list[str]:
        unit = f" ({metric.unit})" if metric.unit and not metric.is_share else ""
        cells = [_cell(metrics.final(group, metric, **how), metric) for group in groups]
        return [metric.title + when * (not metric.largest) + unit, *cells]

    rows = [
        ["seeds", *(str(len(group.runs)) for group in groups)],
        ["updates", *(_range([run.last_update for run in group.runs], "d") for group in groups)],
        ["training time", *map(_training_time, groups)],
    ]
    for reward in metrics.reward_metrics(groups, success):
        rows.append(row(reward, ", held out, first", prefix=metrics.HELD_OUT, first=True))
        rows.append(row(reward, ", held out, last", prefix=metrics.HELD_OUT))
        rows.append(row(reward, ", training, at the end"))
    rows += map(row, (metrics.ENTROPY, metrics.GRADIENT, metrics.LENGTH, metrics.TRUNCATED))
    rows += map(row, (metrics.CLIPPED, metrics.PROJECTED, metrics.MASKED))
    rows.append(["KL bound (nats)", *("–" if group.kl_bound is None else f"{group.kl_bound:.4g}" for group in groups)])
    rows += map(row, (metrics.KL_MAX_BEFORE, metrics.KL_MAX_AFTER, metrics.KL_MEAN_BEFORE, metrics.KL_MEAN_AFTER))
    rows += map(row, (metrics.REGRESSION, metrics.ETA, metrics.THROUGHPUT, metrics.MEMORY))
    table = pd.DataFrame(rows, columns=["", *(group.label for group in groups)]).set_index("")
    return table[(table != "–").any(axis=1)]


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


def warnings_of(groups: Sequence[Group]) -> Iterator[str]:
    """Warnings of groups that a reader would misunderstand: mixed settings, a KL above its bound."""
    for group in groups:
        differing = group.settings.columns[group.settings.nunique(dropna=False) > 1]
        if len(differing):
            yield f"The runs of {group.label} are shown as seeds, but differ in {', '.join(sorted(differing))}."
        largest = pd.concat([run.values(metrics.KL_MAX_AFTER.key) for run in group.runs]).max()
        if largest > (group.kl_bound or math.inf) * 1.001:  # the projection promises no less
            yield f"{group.label}: a KL of {largest:.4g} after the projection exceeds the bound {group.kl_bound:g}."


def _settings_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Method, model, dataset and learning rate of the groups, and the other settings that are not the same in all."""
    texts = [group.settings.apply(lambda values: " or ".join(values.dropna().unique())) for group in groups]
    table = pd.concat(texts, axis=1).fillna("–").sort_index().set_axis([group.label for group in groups], axis=1)
    differing = [name for name in table.index[table.nunique(axis=1) > 1] if name not in _KEY_SETTINGS]
    return table.reindex([*_KEY_SETTINGS, *differing], fill_value="–")


def write_page(groups: Sequence[Group], plots: Sequence[Plot], table: pd.DataFrame, file: Path) -> None:
    """Write one self-contained HTML file, which requests nothing: the runs, their final table, their figures."""
    title = f"Training report: {', '.join(group.label for group in groups)}"
    parts = [f"{_HEAD}<title>{escape(title)}</title>\n</head>\n<body>\n<h1>Training report</h1>"]
    parts += [_html(_settings_table(groups)), *(f'<p class="warning">{escape(w)}</p>' for w in warnings_of(groups))]
    parts += ["<h2>Result</h2>", _html(table), f'<p class="note">{escape(INTERVALS)}</p>']
    for plot in plots:
        parts += [f"<h2>{escape(plot.title)}</h2>"]
        if plot.file is not None:
            image = base64.b64encode(plot.file.read_bytes()).decode()
            text = escape(f"{plot.title}: " + "; ".join(panel.title for panel in plot.panels))
            parts += [f'<figure><img alt="{text}" src="data:image/png;base64,{image}">']
            parts += [f"<figcaption>{escape(CAPTIONS.get(plot.name, ''))}</figcaption></figure>"]
        parts += [f'<p class="note">{escape(note)}</p>' for note in plot.notes]
    labels, runs = zip(*((group.label, run) for group in groups for run in group.runs), strict=True)
    rows = [(run.state_file, run.last_update, " ".join(run.notes) or "–") for run in runs]
    parts += ["<h2>Runs</h2>", _html(pd.DataFrame(rows, labels, ["read from", "updates", "notes"]))]
    made = f"Made by `troll report` on {datetime.now():%Y-%m-%d %H:%M}. Curves of more than {metrics.MAX_POINTS} lines"
    parts += [f'<p class="note">{made} are averaged over whole rollout batches (of maxima, their maximum).</p>']
    write_text(file, "\n".join(parts) + "\n</body>\n</html>\n")


def _html(table: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return table.rename_axis(None).to_html(border=0, justify="left")

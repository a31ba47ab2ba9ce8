"""The page of a report: a table with intervals, the figures, and notes on what they leave out."""

import base64
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader

from math_answers.evaluation.statistics import Estimate
from math_answers.printable import printable
from math_answers.whole_files import write_text
from troll_trl.report import metrics
from troll_trl.report.figures import Plot
from troll_trl.report.metrics import Metric
from troll_trl.report.runs import Group

_KEY_SETTINGS = ("method", "model_name_or_path", "dataset_name", "learning_rate")


def make_table(groups: Sequence[Group], success: str | None) -> pd.DataFrame:
    """The final table as text: a row for each quantity that has a value, a column for each group. `success` is as for
    [`reward_metrics`]."""

    def row(metric: Metric, when: str = ", at the end", **how: Any) -> list[str]:
        unit = f" ({metric.unit})" if metric.unit and not metric.is_share else ""
        cells = [_cell(metrics.final(group, metric, **how), metric) for group in groups]
        return [f"{metric.title}{'' if metric.largest else when}{unit}", *cells]

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
    rows += map(row, (metrics.CLIPPED, metrics.PROJECTED, metrics.PENALIZED, metrics.MASKED))
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
        text += f" [{scale * estimate.low:{form}}, {scale * estimate.high:{form}}]"
        if seeds == 1:
            text += "†"
    return f"{text} %" if metric.is_share else text


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
            names = printable(", ".join(sorted(map(str, differing))))
            yield f"The runs of {printable(group.label)} are shown as seeds, but differ in {names}."
        largest = pd.concat([run.values(metrics.KL_MAX_AFTER.key) for run in group.runs]).max()
        if largest > (group.kl_bound or math.inf) * 1.001:  # the projection promises no less
            exceeds = f"a KL of {largest:.4g} after the projection exceeds the bound {group.kl_bound:g}"
            yield f"{printable(group.label)}: {exceeds}."


def _settings_table(groups: Sequence[Group]) -> pd.DataFrame:
    """Method, model, dataset and learning rate of the groups, and the other settings that are not the same in all."""
    texts = [group.settings.apply(lambda values: " or ".join(values.dropna().unique())) for group in groups]
    table = pd.concat(texts, axis=1).fillna("–").sort_index().set_axis([group.label for group in groups], axis=1)
    differing = [name for name in table.index[table.nunique(axis=1) > 1] if name not in _KEY_SETTINGS]
    return table.reindex([*_KEY_SETTINGS, *differing], fill_value="–")


def write_page(groups: Sequence[Group], plots: Sequence[Plot], table: pd.DataFrame, file: Path) -> None:
    """Write one self-contained HTML file, which requests nothing: the runs, their final table, their figures."""
    environment = Environment(autoescape=True, trim_blocks=True, loader=PackageLoader("troll_trl.report", ""))
    environment.filters |= {"table": _html, "image": _data_url}
    labels, runs = zip(*((group.label, run) for group in groups for run in group.runs), strict=True)
    rows = [(run.state_file, run.last_update, " ".join(run.notes) or "–") for run in runs]
    page = environment.get_template("page.html.jinja").render(
        labels=[group.label for group in groups],
        settings=_settings_table(groups),
        warnings=warnings_of(groups),
        result=table,
        plots=plots,
        runs=pd.DataFrame(rows, labels, ["read from", "updates", "notes"]),
        now=datetime.now(),
        max_points=metrics.MAX_POINTS,
    )
    write_text(file, page + "\n")


def _html(table: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return table.rename_axis(None).to_html(border=0, justify="left")


def _data_url(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"

"""The tables of an evaluation and a comparison, for the terminal and in Markdown."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from math_answers.evaluation.statistics import smallest_p_value
from math_answers.printable import in_markdown, printable


def results_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what [`summarize`] returns, in percent."""
    results = summary["results"]
    # `mean` for `mean@4`, but `pass@4` as it is
    plain_name = lambda name: name if name.startswith("pass@") else name.partition("@")[0]
    metrics = [{plain_name(name): metric for name, metric in result["metrics"].items()} for result in results]
    # pass@1 is the mean
    ks = sorted({int(name[5:]) for row in metrics for name in row if name.startswith("pass@")} - {1})
    names = ["mean", *(f"pass@{k}" for k in ks), *(["maj"] if ks else []), "strict"]
    header = ["model", "benchmark", "problems", "n", *(f"{name}{'' if '@' in name else '@n'} %" for name in names)]
    header += ["truncated %", "no answer %", "unparsable %", "timed out %", "tokens"]
    rows = []
    for result, by_name in zip(results, metrics, strict=True):
        benchmark = result["benchmark"] + ("" if result.get("complete", True) else " (incomplete)")
        row = [result["model"], benchmark, str(result["problems"]), str(result["n"] or "")]
        row += [_interval(by_name.get(name)) for name in names]
        row += [_percent(result.get(name)) for name in ("truncated", "no_answer", "unparsable", "timed_out")]
        tokens = result.get("mean_tokens")
        rows.append([*row, "" if tokens is None else f"{tokens:.0f}"])
    return header, rows


def notes(summary: dict[str, Any]) -> list[str]:
    """Notes below the table of a summary, on intervals without width."""
    results = summary["results"]
    alike = [row["problems"] for row in results if any(one["low"] == one["high"] for one in row["metrics"].values())]
    if not alike:
        return []
    away = f"with {min(alike)} problems the truth may still be {min(300 / min(alike), 100):.1f} points away."
    return [f"An interval without width: all problems have the same score. By the rule of three, {away}"]


def comparison_table(comparison: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what [`compare`] returns, in percent and points of a percent."""
    smallest = smallest_p_value(comparison["bootstrap"]["samples"])
    header = ["benchmark", "problems", "metric", "A %", "B %", "B - A, points [95 %]", "p"]
    rows = [
        [
            result["benchmark"],
            str(result["problems"]),
            name,
            f"{100 * metric['a']:.1f}",
            f"{100 * metric['b']:.1f}",
            f"{100 * metric['value']:+.1f} [{100 * metric['low']:+.1f}, {100 * metric['high']:+.1f}]",
            # One that is counted over resamples may be below what their number can show
            f"< {smallest:.2g}" if metric["p_value"] <= smallest else f"{metric['p_value']:.2g}",
        ]
        for result in comparison["results"]
        for name, metric in result["metrics"].items()
        if name != "pass@1"
    ]
    return header, rows


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table in markdown, a line for each row, whatever its cells hold."""
    lines = [list(map(in_markdown, line)) for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(header: Sequence[str], rows: Iterable[Sequence[str]], keys: int = 2) -> str:
    """The table for a terminal. Columns that do not fit follow below, each time with the first `keys` columns."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    rows = [[printable(" ".join(cell.split())) for cell in row] for row in rows]
    return pd.DataFrame(rows, columns=header).set_index(list(header[:keys])).to_string(line_width=width)


def disagreements(summary: dict[str, Any]) -> Iterator[str]:
    """Lines on how often the verifier and the strict comparison disagree, with examples."""
    says = {1.0: "right", 0.0: "wrong"}
    for result in summary["results"]:
        if "disagreements" not in result:
            continue
        found = result["disagreements"]
        yield printable(
            f"{result['model']}, {result['benchmark']}: verifier and strict comparison disagree on {found['count']} of "
            f"{result['samples'] - result['unreadable_gold']} samples ({found['share']:.1%})."
        )
        for example in found["examples"]:
            yield printable(
                f"  problem {example['problem']}, sample {example['sample']}, gold {example['gold']}: verifier read "
                f"{example['answer']!r} ({says[example['reward']]}), strict read {example['strict_answer']!r} "
                f"({says[example['strict']]}); the end: …{example['end'][-100:]!r}"
            )


def _interval(metric: dict[str, float] | None) -> str:
    if metric is None:
        return ""
    return f"{100 * metric['value']:.1f} [{100 * metric['low']:.1f}, {100 * metric['high']:.1f}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"

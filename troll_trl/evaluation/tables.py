"""The tables of an evaluation and a comparison, for the terminal and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def results_table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Make header and rows of what [`summarize`] returns, in percent."""
    names = list(results[0]["metrics"])
    header = ["benchmark", "problems", "n", *(f"{name} %" for name in names)]
    header += ["truncated %", "no answer %", "timed out %", "tokens"]
    rows = []
    for result in results:
        n = "–".join(map(str, sorted(set(result.get("n", ())))))
        row = [result["benchmark"], str(result.get("problems", "")), n]
        row += [_interval(result["metrics"][name]) for name in names]
        row += [_percent(result.get(name)) for name in ("truncated", "no_answer", "timed_out")]
        tokens = result.get("tokens")
        rows.append([*row, "" if tokens is None else f"{tokens:.0f}"])
    return header, rows


def comparison_table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Make header and rows of what [`compare`] returns, in percent and percentage points."""
    header = ["benchmark", "problems", "metric", "A %", "B %", "B - A, points [95 %]"]
    rows = [
        [
            result["benchmark"],
            str(result["problems"]),
            name,
            _percent(metric["a"]),
            _percent(metric["b"]),
            f"{100 * metric['value']:+.1f} [{100 * metric['low']:+.1f}, {100 * metric['high']:+.1f}]",
        ]
        for result in results
        for name, metric in result["metrics"].items()
    ]
    return header, rows


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note on intervals of zero width, for a table of results or of a comparison."""
    alike = [
        # The share of problems that may be otherwise, and how far: a difference of 1 may be -1 elsewhere
        (min(3 / row["problems"], 1) * ((1 + abs(metric["value"])) if "a" in metric else 1), row["problems"])
        for row in results
        if "problems" in row
        for metric in row["metrics"].values()
        if metric["low"] == metric["high"]
    ]
    if not alike:
        return []
    away, problems = max(alike)
    return [
        "An interval of zero width: all problems have the same score or difference. By the rule of three, with "
        f"{problems} problems the truth may still be {100 * away:.1f} points away."
    ]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write the table in Markdown, a line for each row."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write the table for a terminal, in columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _interval(metric: dict[str, float]) -> str:
    return f"{100 * metric['value']:.1f} [{100 * metric['low']:.1f}, {100 * metric['high']:.1f}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"

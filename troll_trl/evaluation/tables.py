"""The tables of an evaluation and a comparison: for the terminal with rich, for a file in markdown."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troll_trl.evaluation.statistics import smallest_p_value

_NAMES = ("model", "benchmark", "metric")
_KEY_WIDTH = 24  # longer names are folded, if there is no room for them


def results_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what [`summarize`] returns, in percent."""
    results = summary["results"]
    # pass@1 is the mean
    ks = sorted({int(name[5:]) for result in results for name in result["metrics"] if name.startswith("pass@")} - {1})
    metrics = ["mean", *(f"pass@{k}" for k in ks), *(["maj"] if ks else []), "strict"]
    header = [
        "model",
        "benchmark",
        "problems",
        "n",
        *(f"{name} %" if "@" in name else f"{name}@n %" for name in metrics),
    ]
    header += ["truncated %", "no answer %", "unparsable %", "timed out %", "tokens"]
    rows = []
    for result in results:
        row = [result["model"], result["benchmark"], str(result["problems"]), str(result["n"] or "")]
        if not result.get("complete", True):
            row[1] += " (incomplete)"
        by_name = {
            (name if name.startswith("pass@") else name.partition("@")[0]): m for name, m in result["metrics"].items()
        }
        row += [_interval(by_name.get(name)) for name in metrics]
        row += [_percent(result.get(name)) for name in ("truncated", "no_answer", "unparsable", "timed_out")]
        tokens = result.get("mean_tokens")
        rows.append([*row, "" if tokens is None else f"{tokens:.0f}"])
    return header, rows


def notes(summary: dict[str, Any]) -> list[str]:
    """Sentences for below the table of a summary: what its numbers do not say by themselves."""
    found = []
    alike = [
        result["problems"]
        for result in summary["results"]
        if any(metric["low"] == metric["high"] for metric in result["metrics"].values())
    ]
    if alike:
        found.append(
            "An interval without width: all problems scored alike, and the bootstrap cannot say more. By the rule of "
            f"three, with {min(alike)} problems the truth may still be {min(300 / min(alike), 100):.1f} points away."
        )
    if any(not result.get("complete", True) for result in summary["results"]):
        found.append("Incomplete: not all samples are there yet.")
    return found


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
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 2):
    """
    Print a table. Columns that the console has no room for follow in further tables, for a number must not be cut; the
    first `keys` columns, which say what a row is, are in each of them.
    """
    for columns in _columns_that_fit(console.width, header, rows, keys):
        table = Table(title=escape(title), title_justify="left")
        for column in columns:
            justify: Literal["left", "right"] = "left" if header[column] in _NAMES else "right"
            table.add_column(escape(header[column]), justify=justify, overflow="fold", no_wrap=column >= keys)
        for row in rows:
            table.add_row(*(escape(row[column]) for column in columns))
        console.print(table)


def _columns_that_fit(width: int, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> list[list[int]]:
    # Of each column its longest cell, two blanks and a line
    widths = [3 + max(map(len, column)) for column in zip(header, *rows, strict=True)]
    first = list(range(keys))
    room = width - 1 - sum(min(widths[column], _KEY_WIDTH) for column in first)
    tables: list[list[int]] = []
    for column in range(keys, len(header)):
        if not tables or sum(widths[other] for other in tables[-1][keys:]) + widths[column] > room:
            tables.append(first.copy())
        tables[-1].append(column)
    return tables


def print_disagreements(console: Console, summary: dict[str, Any]):
    """Print how often the verifier and the strict comparison disagree, with examples."""
    for result in summary["results"]:
        disagreements = result.get("disagreements")
        if disagreements is None:
            continue
        print_text = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        print_text(
            f"{result['model']}, {result['benchmark']}: verifier and strict comparison disagree on "
            f"{disagreements['count']} of {result['samples'] - result['unreadable_gold']} samples "
            f"({disagreements['share']:.1%})."
        )
        for example in disagreements["examples"]:
            print_text(
                f"  problem {example['problem']}, sample {example['sample']}, gold {example['gold']}: verifier read "
                f"{example['answer']!r} ({_right(example['reward'])}), strict read {example['strict_answer']!r} "
                f"({_right(example['strict'])}); the end: …{example['end'][-100:]!r}"
            )


def _right(reward: float) -> str:
    return "right" if reward == 1 else "wrong"


def _interval(metric: dict[str, float] | None) -> str:
    if metric is None:
        return ""
    return f"{100 * metric['value']:.1f} [{100 * metric['low']:.1f}, {100 * metric['high']:.1f}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"

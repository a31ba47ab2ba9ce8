r"""Gold answers of a dataset as `\boxed{...}`."""

import math
from decimal import Decimal
from typing import Any

from troll_trl.rewards import extract_answer
from troll_trl.rewards.verifier.golds import bare_gold

_LARGEST_EXACT_FLOAT = 2.0**53


def solution_of(answer: Any, worked: bool) -> str:
    r"""
    Put a gold answer in a box: what follows `####`, the last balanced `\boxed{...}`, or the whole text, unless the
    column has a `worked` solution. Returns an empty text if there is no answer.
    """
    text = _text_of(answer)
    gold = extract_answer(text)
    if gold is None and not worked and "\n" not in text:
        inner = text.strip("$")
        gold = text if "$" in inner else inner.strip()  # "$2$, $-3$" has two formulas
    if not gold or bare_gold(gold) is None:
        return ""
    solution = f"\\boxed{{{gold}}}"
    # An unbalanced brace in the gold answer would end the box early, or never
    return solution if extract_answer(solution) == gold else ""


def _text_of(answer: Any) -> str:
    """Write out a cell of an answer column; empty if it is neither text, number nor a list of these."""
    match answer:
        case bool():
            return ""
        case str() | int():
            return str(answer).strip()
        case float() if abs(answer) <= _LARGEST_EXACT_FLOAT:  # `datasets` has rounded a larger one; NaN is not smaller
            return f"{Decimal(repr(answer)):f}".removesuffix(".0")
        case Decimal() if math.isfinite(answer):  # of Parquet
            return f"{answer:f}"
        case list():  # OlympiadBench has a list, mostly of one
            return ", ".join(map(_text_of, answer))
    return ""

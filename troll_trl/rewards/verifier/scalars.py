"""One value and what stands around it: a unit behind it, a rounding beside it, a ratio, a time of day."""

import re
from fractions import Fraction

from troll_trl.rewards.verifier.quantities import read_quantity, same_quantity
from troll_trl.rewards.verifier.units import canonical_unit, read_unit

RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+")
# Of which degrees are a part, not a unit that may be left out
OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT_BEHIND = re.compile(r"(?:(?:\s|/|\\cdot|-){0,2}\\text\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\{?-?\d\}?)?)+$")
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s?(?:([ap])\.?\s?(?:m\.?)?)?", re.IGNORECASE)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_FUNCTION_WORDS = frozenset(("sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "sqrt", "frac", "matrix", "pmatrix"))
_SKIPPED = re.compile(
    r"\\(?:(?:measured)?angle|triangle|parallel|perp|overrightarrow|widehat|[lcv]?dots|to|sim|simeq|[Rr]ightarrow|iff"
    r"|implies|mapsto)(?![A-Za-z])|\.\.\.|[^\x00-\x7f]"
)
_BASE = re.compile(r"(?<![\^\d])\d+_\{?\d|(?:(?<![A-Za-z\d])\d+|\))\^(?:\{[^{}]*\}|\w)_")


def is_plain_mathematics(text: str) -> bool:
    """Whether math-verify reads all of an expression; it would skip words, dots and arrows, and drop a base."""
    words = r"\text" in text or any(word not in _FUNCTION_WORDS for word in _BARE_WORD.findall(text))
    return not (words or _BASE.search(text) or _SKIPPED.search(text))


def letters(text: str) -> str:
    """An expression without spaces, case and text commands."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold().replace(" ", "")


def without_unit(text: str) -> tuple[str, str | None]:
    """An expression without the unit behind it, and its canonical name if that is known."""
    if text.endswith(r"^\circ") and not OF_AN_ANGLE.search(text):
        return text.removesuffix(r"^\circ"), "deg"
    match = _UNIT_BEHIND.search(text)
    if match is not None and match.start():
        unit = read_unit(match[0].strip())
        if unit is not None and unit[1:] == (1, False):
            return text[: match.start()].strip(), unit[0]
    head, space, tail = text.partition(" ")
    while space and not (tail and canonical_unit(tail, lone_letters=False)):
        more, space, tail = tail.partition(" ")
        head = f"{head} {more}"
    if space:
        return head, canonical_unit(tail)
    return text, None


def may_round_to(exact: str, rounded: str) -> bool:
    r"""`\sqrt{2} \approx 1.41` says sqrt(2); `12 \approx 13` lists two answers."""
    left, right = read_quantity(exact.strip()), read_quantity(rounded.strip())
    if right is None:
        return False
    slack = Fraction(1, 2 * 10**right.places)
    return left is None or abs(left.value - right.value) <= max(slack, abs(left.value) / 100)


def same_ratio(gold: str, answer: str) -> bool:
    """3:4 as such or as a fraction; not reduced, for 3:30 may be a time."""
    answer = re.sub(r"(?<=\d) ?(?:to|\\text\{ ?to ?\}) ?(?=\d)", ":", answer)
    parts = [gold.split(":"), answer.split(":")]
    if len(parts[0]) == 2 and len(parts[1]) == 1:
        parts[0] = [f"{parts[0][0]}/{parts[0][1]}"]
    numbers = [[read_quantity(part) for part in side] for side in parts]
    return len(numbers[0]) == len(numbers[1]) and all(
        g is not None and a is not None and same_quantity(g, a) for g, a in zip(*numbers, strict=True)
    )


def read_time(text: str) -> tuple[int, int, str] | None:
    """Hour, minute and `a`, `p` or nothing, of `4:30 p.m.`; `None` for what is no time of day."""
    match = _TIME.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1", text).strip().replace("  ", " ").rstrip("."))
    if match is None or not (match[2] or match[3]):
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or "").lower()


def same_time(gold: tuple[int, int, str], answer: tuple[int, int, str]) -> bool:
    """Whether two times are the same; the half of the day may be left out."""
    return gold[:2] == answer[:2] and (gold[2] == answer[2] or not answer[2] or not gold[2])

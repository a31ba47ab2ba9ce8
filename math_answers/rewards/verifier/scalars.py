"""One value and its surroundings: a unit after it, a rounding next to it, a ratio, a time of day."""

import re
from collections.abc import Callable
from fractions import Fraction

from math_answers.rewards.verifier.quantities import read_quantity, same_quantity
from math_answers.rewards.verifier.structure import is_name
from math_answers.rewards.verifier.units import Unit, canonical_unit, read_unit

RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+")
# Degrees are a part of these, not a unit that may be left out
OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT_BEHIND = re.compile(r"(?:(?:\s|/|\\cdot|-){0,2}\\text\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\{?-?\d\}?)?)+$")
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s?(?:([ap])\.?\s?(?:m\.?)?)?", re.IGNORECASE)
_MONTH = r"(?i:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*"
_DATE = re.compile(
    rf"(?:(?P<month>{_MONTH})\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?"
    rf"|(?P<day2>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?(?P<month2>{_MONTH})\.?)(?: (?P<year>\d{{4}}))?"
)
_PART = re.compile(r"(\d+(?:\.\d+)?)(\s?(?:\^\\circ|'{1,2}|[A-Za-z]+)\s?)")
_PARTS = {
    "day^1": 86400, "h^1": 3600, "min^1": 60, "s^1": 1, "^\\circ": 3600, "deg^1": 3600, "'": 60, "''": 1,
    "ft^1": 12, "in^1": 1,
}  # fmt: skip
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_FUNCTION_WORDS = frozenset(("sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "sqrt", "frac", "matrix", "pmatrix"))
_SKIPPED = re.compile(
    r"\\(?:(?:measured)?angle|triangle|parallel|perp|overrightarrow|widehat|[lcv]?dots|to|sim|simeq|[Rr]ightarrow|iff"
    r"|implies|mapsto|cap|cup|equiv|mid)(?![A-Za-z])|\.\.\.|[^\x00-\x7f]|\?"
)
# Operators that neither commute nor multiply: A^T B, a\times b, AB^{-1}
_OPERATORS = re.compile(
    r"\\begin\{|\\(?:oplus|otimes|ast|star|dagger|top|intercal|setminus|bmod|mod|nabla|vec)(?![A-Za-z])"
    r"|[A-Z]\}?\^\{?(?:T|H|\\ast|\*)\}?(?![A-Za-z])|[A-Z]\s?[A-Z]\^\{?-1|[A-Z]\^\{?-1\}?\s?[A-Z]"
    r"|(?<![\\A-Za-z])[A-Za-z]\}?\s?\\times\s?\{?[A-Za-z](?![A-Za-z])"
)
_ORDINAL = re.compile(r"\A(\d+)\^\{(?:st|nd|rd)\}\Z")
_BASE = re.compile(r"(?<![\^\d])\d+_\{?\d|(?:(?<![A-Za-z\d])\d+|\))\^(?:\{[^{}]*\}|\w)_")


def is_plain_mathematics(text: str) -> bool:
    """Whether math-verify reads all of an expression; it would skip words, dots and arrows, and drop a base."""
    return not (_has_words(text) or _BASE.search(text) or _SKIPPED.search(text) or _OPERATORS.search(text))


def is_formula(text: str) -> bool:
    """Whether an expression is compared as text for its operators."""
    return _OPERATORS.search(text) is not None and not _SKIPPED.search(text) and not _has_words(text)


def _has_words(text: str) -> bool:
    text = re.sub(r"\\(?:begin|end)\{[a-z]+\}(?:\{[lcr|]*\})?", "", text)
    return r"\text" in text or any(word not in _FUNCTION_WORDS for word in _BARE_WORD.findall(text))


def letters(text: str) -> str:
    """An expression without spaces, case, text commands and the braces of one letter."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold().replace(" ", ""))


def without_unit(text: str, lone_letters: bool = False) -> tuple[str, Unit]:
    """An expression without the unit after it, and the unit; `lone_letters`: whether `m` is a metre."""
    text = _ORDINAL.sub(r"\1", text) if lone_letters else text
    if text.endswith(r"^\circ") and not OF_AN_ANGLE.search(text):
        return text.removesuffix(r"^\circ"), Unit("deg^1")
    match = _UNIT_BEHIND.search(text)
    if match is not None and match.start():
        unit = read_unit(match[0].strip())
        if unit is not None and unit == Unit(unit.name, words=unit.words):
            return text[: match.start()].strip(), unit
    head, space, tail = text.partition(" ")
    while space and not (tail and canonical_unit(tail, lone_letters)):
        more, space, tail = tail.partition(" ")
        head = f"{head} {more}"
    return (head, Unit(canonical_unit(tail))) if space else (text, Unit())


def rounds_to(exact: str, rounded: str, value: Callable[[str], Fraction | None]) -> bool:
    r"""`\sqrt{2} \approx 1.41` is one answer; `12 \approx 13` lists two. `value` evaluates an expression."""
    left, right = read_quantity(exact), read_quantity(rounded)
    if right is None:
        return False
    number = value(exact) if left is None else left.value
    # A little more than half of the last place, for 8.335 may be rounded down
    return number is not None and abs(number - right.value) <= Fraction(6, 10 ** (right.places + 1))


def same_ratio(gold: str, answer: str) -> bool:
    """3:4 as such or as a fraction; not reduced, for 3:30 may be a time."""
    answer = re.sub(r"(?<=\d) ?(?:to|\\text\{ ?to ?\}) ?(?=\d)", ":", answer)
    name, equals, value = answer.partition("=")  # V_1:V_2=3:4
    answer = value.strip() if equals and is_name(name) else answer
    parts = [gold.split(":"), answer.split(":")]
    if len(parts[0]) == 2 and len(parts[1]) == 1:
        parts[0] = [f"{parts[0][0]}/{parts[0][1]}"]
    numbers = [[read_quantity(part) for part in side] for side in parts]
    return len(numbers[0]) == len(numbers[1]) and all(
        g is not None and a is not None and same_quantity(g, a) for g, a in zip(*numbers, strict=True)
    )


def read_time(text: str) -> tuple[int, int, str] | None:
    """Hour, minute and `a`, `p` or nothing, of `4:30 p.m.`; `None` for anything but a time of day."""
    match = _TIME.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1", text).strip().replace("  ", " ").rstrip("."))
    if match is None or not (match[2] or match[3]):
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or "").lower()


def same_time(gold: tuple[int, int, str], answer: tuple[int, int, str]) -> bool:
    """Whether two times are the same; the half of the day may be left out, or be counted on to 24."""
    if gold[2] and answer[2]:
        return gold == answer
    half = gold[2] or answer[2]
    return len({(hour + 12 * (half == "p" and hour < 12), minute) for hour, minute, _ in (gold, answer)}) == 1


def same_parts(gold: str, answer: str) -> bool | None:
    """Whether `2 h 30 min` is 150 min, or `May 3` the 3rd of May; `None` if both are something else."""
    left, right = _read_parts(gold), _read_parts(answer)
    return None if left is None or right is None or left[0] == right[0] == 1 else left[1:] == right[1:]


def _read_parts(text: str) -> tuple | None:
    """How many parts a date, a time or an angle has, and what it is in the smallest unit."""
    plain = " ".join(re.sub(r"\\text\{([^{}]*)\}|,|\band\b", r" \1 ", text).split())
    date = _DATE.fullmatch(plain)
    if date:
        name = (date["month"] or date["month2"])[:3].casefold()
        return 2, name, int(date["day"] or date["day2"]), date["year"] or ""
    parts = _PART.findall(plain)
    if not parts or "".join(map("".join, parts)).replace(" ", "") != plain.replace(" ", ""):
        return None
    units = [_PARTS.get(unit.strip()) or _PARTS.get(canonical_unit(unit.strip()) or "") for _, unit in parts]
    if None in units or sorted(units, key=lambda unit: unit or 0, reverse=True) != units:
        return None
    return len(parts), sum(Fraction(number) * (unit or 0) for (number, _), unit in zip(parts, units, strict=True))

r"""
equal(): whether an answer is the gold answer, structure by structure. Only an expression that has none (`2\sqrt{3}`)
goes to `leaf`, which raises [`Undecided`] in the training process and is computer algebra in a worker.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from math_answers.rewards.verifier import scalars
from math_answers.rewards.verifier.choices import gold_choice, read_choice, several_options
from math_answers.rewards.verifier.conditions import split_condition, with_letter_of
from math_answers.rewards.verifier.operations import is_worked_out
from math_answers.rewards.verifier.quantities import Quantity, read_quantity, same_quantity
from math_answers.rewards.verifier.structure import (
    LETTER,
    NAME,
    Compound,
    is_balanced,
    is_name,
    is_ratio,
    read_chain,
    read_compound,
    split,
)
from math_answers.rewards.verifier.wording import is_judgement, is_word, unwrap, words

# Compound of a list or a set. The time to compare sets grows with the square
MAX_MEMBERS = 64
MAX_DEPTH = 12

_CHOICE_LABEL = re.compile(r"(?:\\text\{\s?\(?[A-J]\)?[.:]?\s?\}|\([A-J]\)|[A-J][.):])\s?[.:]?\s?(?=[^\s=<>^_])")
_QUANTIFIED = re.compile(
    r"(?P<body>\S.*?),?\s?(?:\\text\{\s?|\b)(?P<condition>for (?:all|any|every|each)\b.*)", re.DOTALL
)
_GROUPED = re.compile(r",0\d\d(?!\d)")  # 1,000 is no list
_FUNCTION = re.compile(r"y|[fgh](?:\(x\))?")
_SEQUENCE = re.compile(r"\d+(?:\s?-\s?\d+)+")  # a range, an order
_PRODUCT = re.compile(r"[a-z]{2,3}")
_NUMERAL = re.compile(r"\d+")
_DECIMAL_COMMA = re.compile(r"\A(-?(?:0(?=,)|\d+(?=,(?:\d{1,2}|\d{4,})(?!\d)))),(\d+)(?!,)")
_BARE = {"list", "or"}  # kinds of members that no bracket holds


class Undecided(Exception):
    """Only computer algebra can tell."""


def undecided(gold: str, answer: str = "") -> Any:
    """The comparison of the fast path."""
    raise Undecided


@dataclass(frozen=True)
class Leaf:
    """Compares two expressions, and gives the number that one is. If `strict`, an answer must be worked out."""

    compare: Callable[[str, str], bool]
    strict: bool = True
    value: Callable[[str], Fraction | None] = undecided

    def __call__(self, gold: str, answer: str) -> bool:
        return (not self.strict or is_worked_out(gold, answer)) and self.compare(gold, answer)


def equal(gold: str, answer: str, leaf: Leaf, depth: int = 0) -> bool:
    """
    Whether a normalised answer is the normalised gold answer, which can be read. The order of the arguments matters: an
    answer may leave out what the gold answer says around its value ("x =", a unit), not the other way round. Raises
    [`Undecided`] if `leaf` would be needed and raises it.
    """
    gold, answer = unwrap(gold), unwrap(answer)
    if not gold or not answer or depth > MAX_DEPTH:
        return False
    if "mod" not in gold and r"\pmod" in answer:  # N \equiv 34 \pmod{1000}
        answer = re.sub(r"\\pmod\s?\{?\d+\}?", "", answer).replace(r"\equiv", "=").strip()
    if depth == 0:
        answer = with_letter_of(gold, answer)
    if gold == answer:
        return True
    verdicts = (rule(gold, answer, leaf, depth) for rule in _RULES)
    return next(verdict for verdict in verdicts if verdict is not None)


def _same_approximation(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    r"""A value and its rounding, `x = \sqrt{2} \approx 1.41`: either may be the gold answer's, if they agree."""
    if r"\approx" not in gold and r"\approx" not in answer:
        return None
    golds, answers = (
        [side for side in split(text, ("=", r"\approx")) if side and not is_name(side)] for text in (gold, answer)
    )
    if not golds or not answers or not all(scalars.rounds_to(side, answers[-1], leaf.value) for side in answers[:-1]):
        return False
    return any(equal(side, value, leaf, depth + 1) for side in golds for value in {answers[0], answers[-1]})


def _same_named_number(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    (gold_name, gold_number), (answer_name, answer_number) = _named_quantity(gold), _named_quantity(answer)
    if gold_number is None or answer_number is None or (gold_name and answer_name not in ("", gold_name)):
        return None
    return _same_number(gold_number, answer_number, leaf)


def _same_choice(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    gold_options, answer_options = several_options(gold), several_options(answer)
    if gold_options is not None and answer_options is not None:
        return gold_options == answer_options
    option, chosen = gold_choice(gold), read_choice(answer)
    if option is None:
        return None
    if chosen is not None:
        return chosen.letter == option.letter
    return bool(option.text) and equal(option.text, answer, leaf, depth + 1)


def _same_words(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    if _PRODUCT.fullmatch(answer) and _PRODUCT.fullmatch(gold) and not is_word(gold):
        return None
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is None and answer_words is None:
        return None
    return gold_words == answer_words or answer == rf"\text{{{gold}}}"


def _same_sequence(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """`2-1-3`, which is no arithmetic."""
    if not _SEQUENCE.fullmatch(gold):
        return None
    return _SEQUENCE.fullmatch(answer) is not None and _NUMERAL.findall(gold) == _NUMERAL.findall(answer)


def _same_after_label(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """The text of an option, after its letter."""
    label = _CHOICE_LABEL.match(answer)
    if label is None or _CHOICE_LABEL.match(gold):
        return None
    text = answer[label.end() :]
    return not _CHOICE_LABEL.match(text) and equal(gold, text, leaf, depth + 1)


def _same_time(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """A duration, a date or an angle of several parts, or a time of day."""
    gold_time, answer_time = scalars.read_time(gold), scalars.read_time(answer)
    if gold_time is not None and answer_time is not None:
        return scalars.same_time(gold_time, answer_time)
    return scalars.same_parts(gold, answer)


def _same_ratio(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    ratio = gold.rpartition("=")[2].strip() if is_ratio(gold.partition("=")[0]) else gold
    return scalars.same_ratio(ratio, answer) if scalars.RATIO.fullmatch(ratio) else None


def _same_decimal_comma(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """`3.14` for a gold answer `3,14`."""
    dotted = _DECIMAL_COMMA.sub(r"\1.\2", gold)
    if dotted == gold or read_quantity(dotted) is None or _named_quantity(answer)[1] is None:
        return None
    return equal(dotted, answer, leaf, depth + 1)


def _same_number(gold: Quantity, answer: Quantity, leaf: Leaf) -> bool:
    return (not leaf.strict or answer.worked_out or not gold.worked_out) and same_quantity(gold, answer)


def _same_condition(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """An answer may leave out a condition, and may add the range of a variable, but no other condition."""
    (gold_value, gold_range), (answer_value, answer_range) = split_condition(gold), split_condition(answer)
    own, theirs = _QUANTIFIED.fullmatch(gold), _QUANTIFIED.fullmatch(answer)
    if gold_range or answer_range:
        if answer_range and (gold_range or own) and answer_range != gold_range:
            return False
        return equal(gold_value, answer_value, leaf, depth + 1)
    if own is None and theirs is None:
        return None
    conditions = [scalars.letters(side["condition"]).strip("{}.") for side in (own, theirs) if side]
    if theirs is not None and (own is None or conditions[0] != conditions[1]):
        return False
    assert own is not None
    return equal(own["body"], theirs["body"] if theirs else answer, leaf, depth + 1)


def _named_quantity(text: str):
    """Name and quantity of `x = 1,000`, which as a list would have two members. `1,000` has no name."""
    name, equals, value = text.partition("=")
    if equals and NAME.fullmatch(name.strip()):
        return name.strip(), read_quantity(value.strip())
    return "", read_quantity(text)


def is_readable(gold: str, leaf: Callable[[str], bool], depth: int = 0) -> bool:
    """Whether answers can be compared with this normalised gold answer. `leaf` reads expressions."""
    gold = unwrap(gold)
    if not gold or depth > MAX_DEPTH or not is_balanced(gold):
        return False
    if (
        any(read(gold) is not None for read in (read_quantity, words, gold_choice, scalars.read_time))
        or scalars.RATIO.fullmatch(gold)
        or scalars.same_parts(gold, gold)
        or scalars.is_formula(gold)
    ):
        return True
    condition = _QUANTIFIED.fullmatch(gold)
    value = condition["body"] if condition else split_condition(gold)[0]
    if value != gold:
        return is_readable(value, leaf, depth + 1)
    compound = read_compound(gold)
    if compound is not None:
        in_cells = compound.kind in ("matrix", "cases")
        rows = (split(part, ("&",)) for part in compound.parts) if in_cells else [compound.parts, compound.without]
        parts = [part for row in rows for part in row]
        return bool(parts) and all(is_readable(part, leaf, depth + 1) for part in parts)
    sides = split(gold, ("=",))
    if len(sides) > 1:
        return all(is_ratio(side) or is_readable(side, leaf, depth + 1) for side in sides)
    return leaf(scalars.without_unit(gold)[0])


def _same_compound(gold: str, answer: str, leaf: Leaf, depth: int) -> bool | None:
    """Lists, sets, tuples, intervals, matrices, systems."""
    is_grouped = _named_quantity(gold)[1] is not None and _GROUPED.search(gold)
    left, right = None if is_grouped else read_compound(gold), read_compound(answer)
    if left is None and right is not None and right.kind != "or":
        left = read_chain(gold, len(right.parts))
    elif right is None and left is not None:
        right = read_chain(answer, len(left.parts))
    if left is None:
        if right is None:
            return None
        # One answer in several spellings, such as "1/2 or 0.5", but not in none, as "and"
        several = (right.kind in _BARE and 0 < len(right.parts) <= MAX_MEMBERS) or len(right.parts) == 1
        return several and all(equal(gold, part, leaf, depth + 1) for part in right.parts)
    if right is None:
        return len(left.parts) == 1 and equal(left.parts[0], answer, leaf, depth + 1)
    if left.name is not None and right.name is not None and left.name != right.name:
        return False
    if left.kind == "matrix" or right.kind == "matrix":
        return _same_matrix(left, right, leaf, depth)
    if len(left.parts) != len(right.parts) or len(left.parts) > MAX_MEMBERS:
        return False
    if len(left.without) != len(right.without) or not _same_set(left.without, right.without, leaf, depth):
        return False
    if left.kind == right.kind == "cases":
        return _same_set(left.parts, right.parts, leaf, depth)
    plain = {*_BARE, "set", "union"}
    judged = {left.kind, right.kind} <= _BARE and any(map(is_judgement, left.parts))  # True, False
    named = len({part.partition("=")[0] for part in left.parts if "=" in part}) > 1  # x=1, y=2
    if named and (left.kind == "or") != (right.kind == "or"):
        return False
    ordered = (left.kind == right.kind and left.kind not in plain) or {left.kind, right.kind} == {"()", "list"}
    if ordered or judged or (named and not any("=" in part for part in right.parts)):
        return all(equal(g, a, leaf, depth + 1) for g, a in zip(left.parts, right.parts, strict=True))
    if {left.kind, right.kind} == {"set", "union"}:
        return False
    if left.kind in plain and right.kind in plain:
        return _same_set(left.parts, right.parts, leaf, depth)
    return False


def _same_set(gold: list[str], answer: list[str], leaf, depth: int) -> bool:
    """Whether the members can be paired. Equality is transitive, so any partner will do."""
    left = list(answer)
    for member in gold:
        cells = split(member, ("&",))  # a value and its condition, in a function of several cases
        for candidate in left:
            others = split(candidate, ("&",))
            if len(cells) == len(others) and all(map(lambda g, a: equal(g, a, leaf, depth + 1), cells, others)):
                left.remove(candidate)
                break
        else:
            return False
    return True


def _same_matrix(left: Compound, right: Compound, leaf, depth: int) -> bool:
    """Cell by cell; a point may stand for a column vector."""
    if not {left.kind, right.kind} <= {"matrix", "()"}:
        return False
    cells = [[split(row, ("&",)) for row in members.parts] for members in (left, right)]
    if [len(row) for row in cells[0]] != [len(row) for row in cells[1]]:
        return False
    pairs = [pair for rows in zip(*cells, strict=True) for pair in zip(*rows, strict=True)]
    return all(equal(g, a, leaf, depth + 1) for g, a in pairs)


def _same_scalar(gold: str, answer: str, leaf: Leaf, depth: int) -> bool:
    gold_sides, answer_sides = split(gold, ("=",)), split(answer, ("=",))
    if len(gold_sides) == 1 and len(answer_sides) == 1:
        return _same_expression(gold, answer, leaf)
    if len(gold_sides) == 1:
        return _has_value(gold, answer_sides, leaf, depth)
    gold_sides = _name_first(gold_sides)
    if len(gold_sides) == 2 and gold_sides == answer_sides[::-1] and all(map(NAME.fullmatch, gold_sides)):
        return True
    name, value = gold_sides[0], gold_sides[-1]
    named = is_ratio(name)
    if named and len(gold_sides) == len(answer_sides) == 2 and name != "y" and "(" not in name and LETTER.search(value):
        # Solved for its name, not the equation of the problem
        return any(
            _same_name(name, answer_sides[side]) and equal(value, answer_sides[1 - side], leaf, depth + 1)
            for side in (0, 1)
        )
    if len(answer_sides) == 1:
        return named and equal(value, answer, leaf, depth + 1)
    if named and (any(_same_name(name, side) for side in answer_sides) or not LETTER.search(value)):
        known = all(_same_name(name, side) or side == value for side in answer_sides if NAME.fullmatch(side))
        return known and _has_value(value, answer_sides, leaf, depth)
    if not LETTER.search(gold):  # 539 = 7^2 * 11: a true statement, like any other
        orders = (answer_sides, answer_sides[::-1]) if len(answer_sides) == len(gold_sides) else ()
        return any(
            all(
                equal(g, a, leaf, depth + 1) and equal(a, g, leaf, depth + 1)
                for g, a in zip(gold_sides, sides, strict=True)
            )
            for sides in orders
        )
    if len(gold_sides) == 2 and len(answer_sides) == 2:
        return _same_expression(gold, answer, leaf)
    return False


def _name_first(sides: list[str]) -> list[str]:
    """`3 = x` as `x = 3`."""
    return sides[::-1] if len(sides) == 2 and NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]) else sides


def _same_name(gold: str, answer: str) -> bool:
    """Whether two names are the same; y means f(x), and a function may leave out its variable."""
    if gold == answer:
        return True
    return {_FUNCTION.sub("y", gold), _FUNCTION.sub("y", answer)} == {"y"}


def _has_value(gold: str, sides: list[str], leaf: Leaf, depth: int) -> bool:
    """Whether an equation says the gold value: `x = 3`, `3 = x`, `1 + 2 = 3`, but not `3 = 4` nor `a - b = 3`."""
    sides = _name_first(sides)
    if len(set(sides)) < len(sides):  # 2=2 says nothing
        return False
    if not equal(gold, sides[-1], leaf, depth + 1):
        return False
    on_the_way = replace(leaf, strict=False)
    is_side = NAME.fullmatch if LETTER.search(gold) else is_name
    return all(
        is_side(side) or ((LETTER.search(gold) or not LETTER.search(side)) and equal(gold, side, on_the_way, depth + 1))
        for side in sides[:-1]
    )


def _same_expression(gold: str, answer: str, leaf: Leaf) -> bool:
    gold, gold_unit = scalars.without_unit(gold)
    answer, answer_unit = scalars.without_unit(answer, lone_letters=not LETTER.search(gold))
    names = {gold_unit.name, answer_unit.name}
    if answer_unit.contradicts(gold_unit) and names != {"deg^1", "rad^1"}:
        return False
    if "deg^1" in names and r"\pi" in gold + answer:  # and the other in radians
        gold, answer = (
            rf"\frac{{({side})\pi}}{{180}}" if unit.name == "deg^1" else side
            for side, unit in ((gold, gold_unit), (answer, answer_unit))
        )
        return leaf.compare(gold, answer)
    if gold == answer:
        return True
    if not gold or not answer or not is_balanced(answer):
        return False
    numbers = read_quantity(gold), read_quantity(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return _same_number(numbers[0], numbers[1], leaf)
    if "\\infty" in (gold.lstrip("+-"), answer.lstrip("+-")):
        return gold.lstrip("+") == answer.lstrip("+")
    if not scalars.is_plain_mathematics(gold) or not scalars.is_plain_mathematics(answer):
        return scalars.letters(gold) == scalars.letters(answer)
    if gold.count("'") != answer.count("'"):  # math-verify would skip a prime
        return False
    return leaf(gold, answer)


# Each rule decides, or gives `None` and leaves the pair to the next. The last one always decides.
_RULES = (
    _same_condition,  # 2^{n-1}, n \ge 2
    _same_approximation,  # \frac{25}{3} \approx 8.33
    _same_named_number,  # x = 1,000
    _same_choice,  # (C) 12; A, B, D
    _same_words,  # east
    _same_sequence,  # 2-1-3
    _same_after_label,  # (C) 12, for 12
    _same_time,  # 2 h 30 min; 4:30 p.m.
    _same_ratio,  # 3:4
    _same_decimal_comma,  # 3,14
    _same_compound,  # (1,2]
    _same_scalar,  # y = 2\sqrt{3}x
)

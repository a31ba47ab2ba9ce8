r"""
equal(): whether an answer is the gold answer, structure by structure.

Numbers, words, lists, sets, tuples, intervals, matrices, inequalities and equations are taken apart here; only an
expression that is none of them (`2\sqrt{3}`) is handed to `leaf`. In the training process `leaf` raises [`Undecided`],
in a worker process it is computer algebra: so the rules stand once.
"""

import re
from collections.abc import Callable

from troll_trl.rewards.verifier.structure import LETTER, NAME, Members, closing, is_balanced, read_members, split
from troll_trl.rewards.verifier.values import canonical_unit, read_quantity, read_unit, same_quantity

# Of a list or a set. Comparing sets takes the square of it
MAX_MEMBERS = 64
MAX_DEPTH = 12

_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z'-]+)*")
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_FUNCTION_WORDS = frozenset(("sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "sqrt", "frac", "matrix", "pmatrix"))
_CHOICE = re.compile(r"(?:\\text\{)?\s?\(?([A-Ja-j])\)?[.:]?\s?\}?")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+")
# 2x, x+5: who writes 2x = 12 says that x is 6
_LINEAR = re.compile(r"(?:[0-9+\-./{} ]|\\frac|\\cdot)*(?:[A-Za-z]|\\[a-z]+)(?:[0-9+\-./{} ]|\\cdot)*")
_CHOICE_LABEL = re.compile(r"(?:\\text\{\s?\(?([A-J])\)?[.:]?\s?\}|\(([A-J])\)|([A-J])[.):])\s?[.:]?\s?(?=[^\s=<>^_])")
_UNIT_BEHIND = re.compile(r"\s?\\text\{((?:[^{}]|\{[^{}]*\})*)\}(?:\^\{?\d\}?)?$")
_SKIPPED = re.compile(r"\\(?:[lcv]?dots|to|sim|simeq|[Rr]ightarrow|iff|implies|mapsto)(?![A-Za-z])|\.\.\.")
# Of which degrees are a part, not a unit that may be left out
OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_BASE = re.compile(r"\d_\{?\d")
_SYNONYMS = {
    "dne": "does not exist", "no solutions": "no solution", "no real solutions": "no solution",
    "no real solution": "no solution", "empty set": "no solution", "none": "no solution",
}  # fmt: skip


class Undecided(Exception):
    """Only computer algebra can tell."""


def undecided(gold: str, answer: str = "") -> bool:
    """The `leaf` of the fast path."""
    raise Undecided


def equal(gold: str, answer: str, leaf: Callable[[str, str], bool], depth: int = 0) -> bool:
    """
    Whether an answer is the gold answer. The order matters: an answer may leave out what the gold answer says around
    its value ("x =", a unit), and not the other way round.

    Args:
        gold (`str`):
            Normalised gold answer, which can be read ([`is_readable`]).
        answer (`str`):
            Normalised answer.
        leaf (`Callable[[str, str], bool]`):
            Compares two expressions.
        depth (`int`, *optional*, defaults to 0):
            Of the structure around them.

    Returns:
        `bool`: whether it is.

    Raises:
        Undecided: `leaf` was [`undecided`] and would be needed.
    """
    gold, answer = unwrap(gold), unwrap(answer)
    if not gold or not answer or depth > MAX_DEPTH:
        return False
    if gold == answer:
        return True
    if r"\approx" in answer and r"\approx" not in gold:
        exact, _, rounded = answer.partition(r"\approx")
        return _may_round_to(exact, rounded) and equal(gold, exact, leaf, depth + 1)
    (gold_name, gold_number), (answer_name, answer_number) = _named_quantity(gold), _named_quantity(answer)
    if gold_number is not None and answer_number is not None and (answer_name in ("", gold_name) or not gold_name):
        return same_quantity(gold_number, answer_number)
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None:
        return gold_words == answer_words or _same_choice(gold, answer)
    if _same_choice(gold, answer):
        return True
    if answer_words is not None:
        return False
    label = _CHOICE_LABEL.match(answer)
    if label is not None and not _CHOICE_LABEL.match(gold):
        return equal(gold, answer[label.end() :], leaf, depth + 1)
    if _RATIO.fullmatch(gold):
        return _same_ratio(gold, answer)
    gold_members, answer_members = read_members(gold), read_members(answer)
    if gold_members is None and answer_members is None:
        return _same_scalar(gold, answer, leaf, depth)
    return _same_members(gold, gold_members, answer, answer_members, leaf, depth)


def _named_quantity(text: str):
    """Name and quantity of `x = 1,000`, which as a list would have two members; without a name of `1,000`."""
    name, equals, value = text.partition("=")
    if equals and NAME.fullmatch(name.strip()):
        return name.strip(), read_quantity(value.strip())
    return "", read_quantity(text)


def is_readable(gold: str, leaf: Callable[[str], bool], depth: int = 0) -> bool:
    """
    Whether answers can be compared with this gold answer.

    Args:
        gold (`str`):
            Normalised gold answer.
        leaf (`Callable[[str], bool]`):
            Whether an expression can be read.
        depth (`int`, *optional*, defaults to 0):
            Of the structure around it.

    Returns:
        `bool`: `False` for what is no number, no words and no mathematics.
    """
    gold = unwrap(gold)
    if not gold or depth > MAX_DEPTH or not is_balanced(gold):
        return False
    if read_quantity(gold) is not None or words(gold) is not None or _CHOICE.fullmatch(gold):
        return True
    if _RATIO.fullmatch(gold):
        return True
    members = read_members(gold)
    if members is not None:
        rows = (split(part, ("&",)) for part in members.parts) if members.kind == "matrix" else [members.parts]
        parts = [part for row in rows for part in row]
        return bool(parts) and all(is_readable(part, leaf, depth + 1) for part in parts)
    sides = split(gold, ("=",))
    if len(sides) > 1:
        return all(NAME.fullmatch(side) or is_readable(side, leaf, depth + 1) for side in sides)
    return leaf(_without_unit(gold)[0])


def _same_members(gold: str, left: Members | None, answer: str, right: Members | None, leaf, depth: int) -> bool:
    if left is None:
        # One answer in several spellings, such as "1/2 or 0.5"
        assert right is not None
        # Of none, as in "and", all members would be equal to anything
        several = (right.kind == "list" and 0 < len(right.parts) <= MAX_MEMBERS) or len(right.parts) == 1
        return several and all(equal(gold, part, leaf, depth + 1) for part in right.parts)
    if right is None:
        sides = split(answer, ("=",))  # a = b = c = 1
        if len(sides) == len(left.parts) + 1 > 2 and all(map(NAME.fullmatch, sides[:-1])):
            return all(equal(part, sides[-1], leaf, depth + 1) for part in left.parts)
        return len(left.parts) == 1 and equal(left.parts[0], answer, leaf, depth + 1)
    if left.name is not None and right.name is not None and left.name != right.name:
        return False
    if left.kind == "matrix" or right.kind == "matrix":
        return _same_matrix(left, right, leaf, depth)
    if len(left.parts) != len(right.parts) or len(left.parts) > MAX_MEMBERS:
        return False
    plain = {"list", "set", "union"}
    named = len({part.partition("=")[0] for part in left.parts if "=" in part}) > 1  # x=1, y=2
    ordered = (left.kind == right.kind and left.kind not in plain) or (left.kind, right.kind) == ("()", "list")
    if ordered or (named and not any("=" in part for part in right.parts)):
        return all(equal(g, a, leaf, depth + 1) for g, a in zip(left.parts, right.parts, strict=True))
    if {left.kind, right.kind} == {"set", "union"}:
        return False
    if (left.kind in plain and right.kind in plain) or (left.kind, right.kind) == ("list", "()"):
        return _same_set(left.parts, right.parts, leaf, depth)
    return False


def _same_set(gold: list[str], answer: list[str], leaf, depth: int) -> bool:
    """Whether the members can be paired. Equality being transitive, any partner will do."""
    left = list(answer)
    for member in gold:
        for candidate in left:
            if equal(member, candidate, leaf, depth + 1):
                left.remove(candidate)
                break
        else:
            return False
    return True


def _same_matrix(left: Members, right: Members, leaf, depth: int) -> bool:
    cells = []
    for members in (left, right):
        if members.kind == "matrix":
            cells.append([split(row, ("&",)) for row in members.parts])
        elif members.kind == "()":  # a point for a column vector
            cells.append([[part] for part in members.parts])
        else:
            return False
    if [len(row) for row in cells[0]] != [len(row) for row in cells[1]]:
        return False
    pairs = [pair for rows in zip(*cells, strict=True) for pair in zip(*rows, strict=True)]
    return all(equal(g, a, leaf, depth + 1) for g, a in pairs)


def _same_scalar(gold: str, answer: str, leaf, depth: int) -> bool:
    gold_sides, answer_sides = split(gold, ("=",)), split(answer, ("=",))
    if len(gold_sides) == 1 and len(answer_sides) == 1:
        return _same_expression(gold, answer, leaf)
    if len(gold_sides) == 1:
        return _has_value(gold, answer_sides, leaf, depth)
    gold_named = NAME.fullmatch(gold_sides[0]) is not None
    if len(answer_sides) == 1:
        return gold_named and equal(gold_sides[-1], answer, leaf, depth + 1)
    if gold_named and gold_sides[0] == answer_sides[0]:
        return _has_value(gold_sides[-1], answer_sides, leaf, depth)
    if len(gold_sides) == 2 and len(answer_sides) == 2:
        return _same_expression(gold, answer, leaf)
    return False


def _has_value(gold: str, sides: list[str], leaf, depth: int) -> bool:
    """Whether an equation says the gold value: `x = 3`, `3 = x`, `1 + 2 = 3`, but not `3 = 4`."""
    if len(sides) == 2 and NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
        sides = sides[::-1]
    if not equal(gold, sides[-1], leaf, depth + 1):
        return False
    return all(
        NAME.fullmatch(side)
        or (LETTER.search(side) and not _LINEAR.fullmatch(side))
        or equal(gold, side, leaf, depth + 1)
        for side in sides[:-1]
    )


def _same_expression(gold: str, answer: str, leaf) -> bool:
    gold, gold_unit = _without_unit(gold)
    answer, answer_unit = _without_unit(answer)
    if gold_unit is not None and answer_unit is not None and gold_unit != answer_unit:
        return False
    if gold == answer:
        return True
    if not gold or not answer or not is_balanced(answer):
        return False
    numbers = read_quantity(gold), read_quantity(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return same_quantity(numbers[0], numbers[1])
    if "\\infty" in (gold.lstrip("+-"), answer.lstrip("+-")):
        return gold.lstrip("+") == answer.lstrip("+")
    # math-verify would skip words, dots and arrows, and drop a base
    if any(_has_words(side) or _BASE.search(side) or _SKIPPED.search(side) for side in (gold, answer)):
        return _letters(gold) == _letters(answer)
    if gold.count("'") != answer.count("'"):  # and a prime
        return False
    return leaf(gold, answer)


def _letters(text: str) -> str:
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold().replace(" ", "")


def _has_words(text: str) -> bool:
    return r"\text" in text or any(word not in _FUNCTION_WORDS for word in _BARE_WORD.findall(text))


def _without_unit(text: str) -> tuple[str, str | None]:
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


def words(text: str) -> str | None:
    """
    Words in lower case, such as a name or a direction; `None` for anything else, a short product of letters included.
    """
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    content = (wrapped[1] if wrapped else text).strip(" ().,;:'\"")
    if not _WORDS.fullmatch(content):
        return None
    if not wrapped and len(content) < 4 and content.casefold() not in ("yes", "no", "dne", "odd"):
        return None
    if not wrapped and "-" in content and all(len(part) < 3 for part in content.split("-")):  # ad-bc
        return None
    content = re.sub(r"\A(?:an?|the) (?=\w\w)", "", content.casefold())
    return _SYNONYMS.get(content, content)


def _same_choice(gold: str, answer: str) -> bool:
    choice = _CHOICE.fullmatch(gold)
    if choice is None or choice[1].islower():
        return False
    letter = choice[1]
    own = _CHOICE.fullmatch(answer)
    if own is not None:
        return own[1].upper() == letter
    labels = [next(filter(None, label)) for label in _CHOICE_LABEL.findall(answer)]
    return labels == [letter] and _CHOICE_LABEL.match(answer) is not None


def _may_round_to(exact: str, rounded: str) -> bool:
    r"""`\sqrt{2} \approx 1.41` says sqrt(2); `12 \approx 13` lists two answers."""
    left, right = read_quantity(exact.strip()), read_quantity(rounded.strip())
    if right is None:
        return False
    return left is None or abs(left.value - right.value) <= abs(left.value) / 100


def _same_ratio(gold: str, answer: str) -> bool:
    """3:4 as such or as a fraction; not reduced, for 3:30 may be a time."""
    answer = re.sub(r"(?<=\d) ?(?:to|\\text\{ ?to ?\}) ?(?=\d)", ":", answer)
    parts = [gold.split(":"), answer.split(":")]
    if len(parts[0]) == 2 and len(parts[1]) == 1:
        parts[0] = [f"{parts[0][0]}/{parts[0][1]}"]
    numbers = [[read_quantity(part) for part in side] for side in parts]
    return len(numbers[0]) == len(numbers[1]) and all(
        g is not None and a is not None and same_quantity(g, a) for g, a in zip(*numbers, strict=True)
    )


def unwrap(text: str) -> str:
    """Without the braces, parentheses or text command around the whole of one value."""
    for _ in range(MAX_DEPTH):
        text = text.strip(" ").rstrip(".,;:")
        wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
        if wrapped and (any(map(str.isdigit, wrapped[1])) or "\\" in wrapped[1]):
            text = wrapped[1]
            continue
        if text[:1] in ("(", "{") and closing(text) == len(text) - 1:
            inner = text[1:-1]
            if text[0] == "{" or (len(split(inner, (",", ";"))) == 1 and not re.fullmatch("[A-J]", inner)):
                text = inner
                continue
        break
    if text.startswith((r"\approx", r"\therefore", r"\Rightarrow", r"\implies")):
        return text.partition(" ")[2] if " " in text else re.sub(r"\\[A-Za-z]+", "", text, count=1)
    return re.sub(r"\A(?:approximately|about|exactly) (?=\S)", "", text)

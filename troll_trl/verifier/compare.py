r"""
equal(): whether an answer is the gold answer, structure by structure.

Numbers, words, lists, sets, tuples, intervals, matrices, inequalities and equations are taken apart here; only an
expression that is none of them (`2\sqrt{3}`) is handed to `leaf`. In the training process `leaf` raises [`Undecided`],
in a worker process it is computer algebra: so the rules stand once.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from troll_trl.verifier.values import canonical_unit, read_quantity, same_quantity

# Of a list or a set. Comparing sets takes the square of it
MAX_MEMBERS = 64
MAX_DEPTH = 12

_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|\b(?:and|or)\b|.", re.DOTALL)
_BRACKETS = {r"\{": r"\}", "(": ")", "[": "]", r"\langle": r"\rangle"}
_CLOSERS = frozenset((")", "]", "}", r"\}", r"\rangle"))
_OPENERS = frozenset(("(", "[", "{", r"\{", r"\langle"))
_LIST_SEPARATORS = frozenset((",", ";", "and", "or"))
_TEXT_SEPARATOR = re.compile(r"\\text\{[\s,]*(and|or)[\s,]*\}")
_RELATIONS = {"<": False, r"\le": True, ">": False, r"\ge": True}
_MATRIX = re.compile(r"\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{(?:[a-zB]+)\}", re.DOTALL)
_OUTWARD = re.compile(r"(?!\[.*\]\Z)([\[\]])([^\[\](),;]*[,;][^\[\](),;]*)([\[\]])")  # ]1,2[
_MEMBER_OF = re.compile(r"(?P<name>[^=<>,]{1,20}?)\\in\s?(?=[\[(\]\\])(?P<set>.*)", re.DOTALL)
_SET_BUILDER = re.compile(
    r"\\\{(?P<name>\\?[A-Za-z]+)(?:\\in\s?\\mathbb\{R\})?\s?(?:\\mid|\||:)\s?(?P<condition>.*)\\\}", re.DOTALL
)
# A single letter, f(x), |AB|, \angle ABC, (x,y): what an equation may give a value to
_NAME = re.compile(
    r"(?:\\(?:angle|overline|triangle|vec|hat|bar|mathbf|text|mathcal)\s?)?\{?(?:[A-Za-z]|[A-Z]{2,4}|\\(?:[a-zA-Z]{2,8}))"
    r"\}?'{0,3}(?:_\{?\w{1,4}\}?)?(?:\((?:[A-Za-z],?){1,3}\))?|\|[A-Z]{2}\||\((?:[a-z],?\s?)+\)|\\text\{[^{}]*\}"
)
_LETTER = re.compile(r"\\(?!pi\b|frac|sqrt|times|cdot|text|ln|log|sin|cos|tan|le|ge)[A-Za-z]+|(?<![\\A-Za-z])(?![ei]\b)[A-Za-z]")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z'-]+)*")
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_FUNCTION_WORDS = frozenset(("sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "sqrt", "frac", "matrix", "pmatrix"))
_CHOICE = re.compile(r"(?:\\text\{)?\s?\(?([A-Ja-j])\)?[.:]?\s?\}?")
_CHOICE_LABEL = re.compile(r"(?:\\text\{\s?\(?([A-J])\)?[.:]?\s?\}|\(([A-J])\)|([A-J])[.):])\s?[.:]?\s?(?=[^\s=<>^_])")
_UNIT_BEHIND = re.compile(r"(?:\s?\\text\{([^{}]*)\}(?:\^\{?\d\}?)?|\^\\circ)$")
_BASE = re.compile(r"\d_\{?\d")
_SYNONYMS = {
    "dne": "does not exist", "no solutions": "no solution", "no real solutions": "no solution",
    "no real solution": "no solution", "empty set": "no solution", "none": "no solution", "t": "true", "f": "false",
    "y": "yes", "n": "no",
}  # fmt: skip


class Undecided(Exception):
    """Only computer algebra can tell."""


def undecided(gold: str, answer: str = "") -> bool:
    """The `leaf` of the fast path."""
    raise Undecided


@dataclass(frozen=True)
class Members:
    """
    An answer of several parts.

    Args:
        kind (`str`):
            `"list"` (bare), `"set"`, `"union"`, `"matrix"`, or the two brackets of a tuple or an interval: `"(]"`.
        parts (`list[str]`):
            The parts; rows of a matrix, with `&` between the cells, included.
    """

    kind: str
    parts: list[str]


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
    gold_number, answer_number = read_quantity(gold), read_quantity(answer)
    if gold_number is not None and answer_number is not None:
        if same_quantity(gold_number, answer_number):
            return True
        # 100,200 may be two numbers, if one side says so
        return False
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
    gold_members, answer_members = read_members(gold), read_members(answer)
    if gold_members is None and answer_members is None:
        return _same_scalar(gold, answer, leaf, depth)
    return _same_members(gold, gold_members, answer, answer_members, leaf, depth)


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
    members = read_members(gold)
    if members is not None:
        rows = (split(part, ("&",)) for part in members.parts) if members.kind == "matrix" else [members.parts]
        parts = [part for row in rows for part in row]
        return bool(parts) and all(is_readable(part, leaf, depth + 1) for part in parts)
    sides = split(gold, ("=",))
    if len(sides) > 1:
        return all(_NAME.fullmatch(side) or is_readable(side, leaf, depth + 1) for side in sides)
    return leaf(_without_unit(gold)[0])


def _same_members(gold: str, left: Members | None, answer: str, right: Members | None, leaf, depth: int) -> bool:
    if left is None:
        # One answer in several spellings, such as "1/2 or 0.5"
        assert right is not None
        several = right.kind == "list" and len(right.parts) <= MAX_MEMBERS or len(right.parts) == 1
        return several and all(equal(gold, part, leaf, depth + 1) for part in right.parts)
    if right is None:
        sides = split(answer, ("=",))
        if len(sides) == 2 and _NAME.fullmatch(sides[0]):
            return equal(gold, sides[1], leaf, depth + 1)
        return len(left.parts) == 1 and equal(left.parts[0], answer, leaf, depth + 1)
    if left.kind == "matrix" or right.kind == "matrix":
        return _same_matrix(left, right, leaf, depth)
    if len(left.parts) != len(right.parts) or len(left.parts) > MAX_MEMBERS:
        return False
    plain = {"list", "set", "union"}
    if left.kind == right.kind and left.kind not in plain or (left.kind, right.kind) == ("()", "list"):
        return all(equal(g, a, leaf, depth + 1) for g, a in zip(left.parts, right.parts, strict=True))
    if {left.kind, right.kind} == {"set", "union"}:
        return False
    if left.kind in plain and right.kind in plain or (left.kind, right.kind) == ("list", "()"):
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
    gold_named = _NAME.fullmatch(gold_sides[0]) is not None
    if len(answer_sides) == 1:
        return gold_named and equal(gold_sides[-1], answer, leaf, depth + 1)
    if gold_named and gold_sides[0] == answer_sides[0]:
        return _has_value(gold_sides[-1], answer_sides, leaf, depth)
    if len(gold_sides) == 2 and len(answer_sides) == 2:
        return _same_expression(gold, answer, leaf)
    return False


def _has_value(gold: str, sides: list[str], leaf, depth: int) -> bool:
    """Whether an equation says the gold value: `x = 3`, `3 = x`, `1 + 2 = 3`, but not `3 = 4`."""
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]
    if not equal(gold, sides[-1], leaf, depth + 1):
        return False
    return all(_LETTER.search(side) or equal(gold, side, leaf, depth + 1) for side in sides[:-1])


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
    # math-verify would skip words, and drop a base
    if any(_has_words(side) or _BASE.search(side) for side in (gold, answer)):
        return gold.casefold().replace(" ", "") == answer.casefold().replace(" ", "")
    if gold.count("'") != answer.count("'"):  # and a prime
        return False
    return leaf(gold, answer)


def _has_words(text: str) -> bool:
    return r"\text" in text or any(word not in _FUNCTION_WORDS for word in _BARE_WORD.findall(text))


def _without_unit(text: str) -> tuple[str, str | None]:
    """An expression without the unit behind it, and its canonical name if that is known."""
    if text.endswith(r"^\circ"):
        return text.removesuffix(r"^\circ"), "deg"
    match = _UNIT_BEHIND.search(text)
    if match is not None and match.start():
        unit = match[0].replace(r"\text", " ").replace("{", " ").replace("}", " ")
        return text[: match.start()].strip(), canonical_unit(unit)
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
    content = re.sub(r"\A(?:an?|the) ", "", content.casefold())
    return _SYNONYMS.get(content, content)


def _same_choice(gold: str, answer: str) -> bool:
    choice = _CHOICE.fullmatch(gold)
    if choice is None:
        return False
    letter = choice[1].upper()
    if letter == choice[1] or gold != choice[1]:
        own = _CHOICE.fullmatch(answer)
        if own is not None and (own[1] != own[1].lower() or own[0] != own[1] or r"\text" in gold):
            return own[1].upper() == letter
    labels = [next(filter(None, label)) for label in _CHOICE_LABEL.findall(answer)]
    return labels == [letter] and _CHOICE_LABEL.match(answer) is not None


def unwrap(text: str) -> str:
    """Without the braces, parentheses or text command around the whole of one value."""
    for _ in range(MAX_DEPTH):
        text = text.strip(" ").rstrip(".,;:")
        wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
        if wrapped and (any(map(str.isdigit, wrapped[1])) or "\\" in wrapped[1]):
            text = wrapped[1]
            continue
        if text[:1] in ("(", "{") and _closing(text) == len(text) - 1:
            inner = text[1:-1]
            if text[0] == "{" or (len(split(inner, (",", ";"))) == 1 and not re.fullmatch("[A-J]", inner)):
                text = inner
                continue
        break
    if text.startswith((r"\approx", r"\therefore", r"\Rightarrow", r"\implies")):
        return text.partition(" ")[2] if " " in text else re.sub(r"\\[A-Za-z]+", "", text, count=1)
    return re.sub(r"\A(?:approximately|about|exactly) (?=\S)", "", text)


def read_members(text: str) -> Members | None:
    r"""
    Take an answer of several parts apart. `\pm` stands for two answers, `x \in S` for `S`, and an inequality of one
    variable for its interval.
    """
    outward = _OUTWARD.fullmatch(text)
    if outward:
        kind = {"[": "[", "]": "("}[outward[1]] + {"]": "]", "[": ")"}[outward[3]]
        return Members(kind, split(outward[2], (",", ";")))
    builder = _SET_BUILDER.fullmatch(text)
    if builder:
        return read_members(builder["condition"])
    parts = split(_TEXT_SEPARATOR.sub(r" \1 ", text), _LIST_SEPARATORS)
    if len(parts) > 1:
        parts = [part for part in parts if part]
        return Members("list", [choice for part in parts for choice in _signs(part)])
    member = _MEMBER_OF.fullmatch(text)
    if member and _NAME.fullmatch(member["name"]):
        return read_members(unwrap(member["set"])) or Members("list", [unwrap(member["set"])])
    if text == r"\mathbb{R}":
        return Members("()", [r"-\infty", r"\infty"])
    if r"\cup" in text:
        parts = split(text, (r"\cup",))
        if len(parts) > 1:
            return Members("union", parts)
    choices = _signs(text)
    if len(choices) > 1:
        return Members("list", choices)
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return Members("matrix", [row for row in split(matrix[1], (r"\\",)) if row])
    return _bracketed(text) or _interval(text)


def _bracketed(text: str) -> Members | None:
    for opener in _BRACKETS:
        if not text.startswith(opener):
            continue
        end = _closing(text)
        closer = next((closer for closer in _BRACKETS.values() if text.endswith(closer)), "")
        if end < 0 or end + len(closer) != len(text):
            return None
        inner = text[len(opener) : end]
        parts = split(inner, (",", ";"))
        if opener == r"\{":
            return Members("set", [choice for part in parts if part for choice in _signs(part)])
        if opener == r"\langle":
            opener, closer = "(", ")"
        return Members(opener + closer, parts) if len(parts) > 1 or opener == "[" else None
    return None


def _interval(text: str) -> Members | None:
    """An inequality of one variable, as an interval."""
    tokens = [(token, position) for token, position in _top_level(text) if token in _RELATIONS]
    if not 1 <= len(tokens) <= 2:
        return None
    parts = split(text, tuple(_RELATIONS))
    relations = [token for token, _ in tokens]
    upwards = [token in ("<", r"\le") for token in relations]
    if len(set(upwards)) > 1 or any(not part for part in parts):
        return None
    if not upwards[0]:
        parts, relations = parts[::-1], relations[::-1]
    closed = [_RELATIONS[token] for token in relations]
    if len(parts) == 3 and _NAME.fullmatch(parts[1]):
        return Members("[("[not closed[0]] + "])"[not closed[1]], [parts[0], parts[2]])
    if len(parts) == 2 and _NAME.fullmatch(parts[0]) and not _LETTER.search(parts[1]):
        return Members("(" + "])"[not closed[0]], [r"-\infty", parts[1]])
    if len(parts) == 2 and _NAME.fullmatch(parts[1]) and not _LETTER.search(parts[0]):
        return Members("[("[not closed[0]] + ")", [parts[0], r"\infty"])
    return None


def _signs(text: str) -> list[str]:
    r"""The two values of an expression with `\pm`."""
    if sum(token == r"\pm" for token, _ in _top_level(text)) != 1:
        return [text]
    sides = split(text, ("=",))
    value = sides[-1]
    if r"\pm" not in value:
        return [text]
    both = (value.replace(r"\pm", "+").replace(r"\mp", "-"), value.replace(r"\pm", "-").replace(r"\mp", "+"))
    return [re.sub(r"(?<=[+-])\s|^\+", "", choice.strip()) for choice in both]


def split(text: str, separators) -> list[str]:
    """Split at separators that stand in no bracket."""
    parts, start = [], 0
    for token, position in _top_level(text):
        if token in separators:
            parts.append(text[start:position].strip())
            start = position + len(token)
    return [*parts, text[start:].strip()]


def _top_level(text: str) -> Iterator[tuple[str, int]]:
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _CLOSERS or token.startswith(r"\end{"):
            depth -= 1
        elif token in _OPENERS or token.startswith(r"\begin{"):
            depth += 1
        elif depth <= 0:
            yield token, match.start()


def _closing(text: str) -> int:
    """Position of the bracket that closes the first one, of whatever kind; -1 if none does."""
    depth = 0
    for match in _TOKEN.finditer(text):
        if match[0] in _OPENERS:
            depth += 1
        elif match[0] in _CLOSERS:
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def is_balanced(text: str) -> bool:
    """Whether braces come in pairs; math-verify reads much of what does not."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] == "{") - (match[0] == "}") + match[0].startswith(("\\begin{", "\\end{")) * 0
        if depth < 0:
            return False
    return depth == 0

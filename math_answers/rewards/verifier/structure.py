r"""The structure of an answer: the parts of lists, sets, tuples, intervals, matrices, inequalities and equations."""

import itertools
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from math_answers.rewards.verifier.quantities import read_quantity

_TOKEN = re.compile(
    r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|\b(?:and|or)\b|.", re.DOTALL
)
_BRACKETS = {r"\{": r"\}", "(": ")", "[": "]", r"\langle": r"\rangle"}
_CLOSERS = frozenset((")", "]", "}", r"\}", r"\rangle"))
_OPENERS = frozenset(("(", "[", "{", r"\{", r"\langle"))
_LIST_SEPARATORS = frozenset((",", ";", "and", "or", r"\\"))
_TEXT_SEPARATOR = re.compile(r"\\text\{[\s,]*(and|or)[\s,]*\}")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_RELATIONS = {"<": False, r"\le": True, ">": False, r"\ge": True}
_MATRIX = re.compile(
    r"(?P<factor>[^&=]*?)(?:\\cdot)?\s?[\[(]?\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(?P<rows>"
    r"(?:(?!\\(?:begin|end)\{).)*)\\end\{(?:[a-zB]+)\}[\])]?",
    re.DOTALL,
)
_SYSTEM = re.compile(
    r"(?:\\\{)?\\begin\{(?:cases|aligned|align\*?|gathered|array)\}(?:\{[lcr|]*\})?(.*)\\end\{[a-z]+\*?\}", re.DOTALL
)
# Unit vectors, marked as such, or i and j of one expression
_UNIT_VECTOR = re.compile(
    r"\\(?:mathbf|text|hat|vec|widehat|boldsymbol)\s?\{?\s?(?:\\text\{)?\\?([ijk])(?:math)?\}{0,2}"
)
_COMPONENT = re.compile(r"(?P<factor>.*?)(?:\\cdot)?\s?(?P<unit>[ijk])", re.DOTALL)
_MEMBER_OF = re.compile(r"(?P<name>[^=<>]{1,20}?)\\in\s?(?=[\[(\]\\])(?P<set>.*)", re.DOTALL)
_EXCLUDED = re.compile(r"(?P<name>[^=<>]{1,20}?)\\neq\s?(?P<value>[^=<>]+)")
_RANGE = re.compile(r"[<>]|\\(?:le|ge|in|neq)(?![A-Za-z])")
MAX_PIECES = 16  # of a union of intervals
_SET_BUILDER = re.compile(
    r"\\\{(?P<name>\\?[A-Za-z]+)(?:\\in\s?\\mathbb\{R\})?\s?(?:\\mid|\||:)\s?(?P<condition>.*)\\\}", re.DOTALL
)
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|(?:var)?rho|sigma|tau|(?:var)?phi|chi"
    r"|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|hbar)(?![A-Za-z])"
)
_INDEX = r"_(?:\{(?:[^{}]|\{[^{}]*\}){1,30}\}|\\[A-Za-z]+|\w)"
SYMBOL = rf"(?:[A-Za-z]|{_GREEK})(?:{_INDEX})?"
_SYMBOL = re.compile(SYMBOL)
_ITEM = rf"\s?(?:-?(?:\d+(?:\.\d+)?|\\frac\{{\d+\}}\{{\d+\}}|{SYMBOL}|\\pi)|[fgh]\(-?\w+\))\s?"
_EVENT = r"(?:[A-Za-z0-9,|=<>_ ]|\\(?:cap|cup|mid|text|ge|le|bar|overline|ldots)(?![a-z])|\{|\}){1,40}"
# Words that make "twice the answer" another value
CHANGING = (
    r"(?i:\b(?:not|no|never|isn|wrong|incorrect|twice|thrice|double|triple|half(?!-)|minus|plus|than|negative|opposite|inverse"
    r"|reciprocal|squared|cubed|(?:square|cube) (?:of|root))\b)"
)
# What an equation may give a value to: a letter, perhaps with an index, f(x), P(A|B), |AB|, \angle ABC, (x,y), dy/dx,
# or words
NAME = re.compile(
    r"(?:m?\\(?:angle|measuredangle|overline|triangle|vec|hat|bar|tilde|overrightarrow|widehat|mathbf|mathcal|mathbb)\s?)?"
    rf"\{{?(?:{SYMBOL}|[A-Z]{{2,4}})\}}?'{{0,3}}(?:{_INDEX})?(?:\^(?:\{{-1\}}|\*|\{{\(\d\)\}}))?"
    rf"(?:\({_ITEM}(?:,{_ITEM}){{0,3}}\))?"
    rf"|\\(?:det|deg|dim|rank|tr|ord)\s?\(?{SYMBOL}\)?"
    rf"|[PEnN]\({_EVENT}\)|E\[{_EVENT}\]|\\(?:text|Pr|Var)\{{?(?:Var|Cov|Pr|P)?\}}?\({_EVENT}\)"
    rf"|\|[A-Z](?:[A-Za-z_0-9]|\\c[au]p ?){{0,9}}\||\\\|{SYMBOL}\\\||\|(?:z|\\vec\{{?\s?\w\}}?)\|"
    rf"|\\frac\{{d{SYMBOL}\}}\{{d{SYMBOL}\}}"
    rf"|\((?:\s?{SYMBOL},?)+\s?\)"
    rf"|(?!.*{CHANGING})(?:\\text\{{[^{{}}0-9]*\}}\s?)+(?:\\triangle\s?)?[A-Z]{{0,4}}"
    rf"|(?!.*{CHANGING})(?:[A-Za-z]{{5,}}|[Aa]rea)(?: [A-Za-z]+){{0,5}}"
)
LETTER = re.compile(
    r"\\(?!pi\b|frac|sqrt|times|cdot|text|ln|log|sin|cos|tan|le|ge|infty|circ|binom|pm|cup)[A-Za-z]+|(?<![\\A-Za-z])(?![ei]\b)[A-Za-z]"
)


_FRACTION_OF_NAMES = re.compile(r"\\frac\{([A-Z][^{}^]*)\}\{([A-Z][^{}^]*)\}")
# A sum of names, which competitions ask for: m+n, 100a+b
_COEFFICIENT = re.compile(r"\A10+(?:\\cdot)?\s?(?=[A-Za-z\\])")


def is_ratio(text: str) -> bool:
    """Whether a gold answer may give a value to one side: a name, or a ratio of names."""
    fraction = _FRACTION_OF_NAMES.fullmatch(text.strip())
    return all(map(NAME.fullmatch, fraction.groups() if fraction else split(text, (":",))))


def is_name(text: str) -> bool:
    """Whether an equation may give a value to one side: a name, a sum or a ratio of names, a remainder of one."""
    text = re.sub(r"\s?\\b?mod\s?\d+\Z|\A\\(?:max|min)(?![A-Za-z])\s?(?=.)", "", text.strip())
    if text in (r"\max", r"\min") or (r"\frac" in text and is_ratio(text)):
        return True
    parts = split(text, ("+",)) if "+" in text else split(text, (":",))
    return all(NAME.fullmatch(_COEFFICIENT.sub("", part) if len(parts) > 1 else part) for part in parts)


@dataclass(frozen=True)
class Compound:
    """
    An answer of several parts. Its kind is `"list"` (bare), `"or"` (alternatives), `"set"`, `"union"`, `"matrix"` or
    `"cases"` (rows with `&` between the cells), or the two brackets of a tuple or an interval: `"(]"`. Its name is the
    variable of an inequality, or the left side of an equation such as `(x,y)=(3,5)`. A union may lack some points.
    """

    kind: str
    parts: list[str]
    name: str | None = None
    without: list[str] = field(default_factory=list)


def read_compound(text: str) -> Compound | None:
    r"""An answer of several parts. `\pm` is two answers, an inequality of one variable its interval."""
    builder = _SET_BUILDER.fullmatch(text)
    if builder and closing(text) == len(text) - len(r"\}"):
        compound = read_compound(builder["condition"])
        return compound and replace(compound, name=None)
    plain = _TEXT_SEPARATOR.sub(r" \1 ", text)
    groups = split(plain, (";",))  # p=5,q=2; p=7,q=2
    parts = groups if len(groups) > 1 and all(len(split(group, (",",))) > 1 for group in groups) else []
    parts = parts or split(plain, _LIST_SEPARATORS)
    if len(parts) > 1:
        parts = [part for part in parts if part]
        kind = "or" if len(split(plain, ("or",))) > 1 else "list"
        joined = _both(parts) if kind == "list" and len(split(plain, ("and",))) == 2 else None
        joined = joined or (_restricted(parts) if kind == "list" else None)
        if joined is None and "=" not in text and all(map(_RANGE.search, parts)):
            joined = _union(parts)
        return joined or Compound(kind, [choice for part in parts for choice in _signs(part)])
    member = _MEMBER_OF.fullmatch(text)
    if member and NAME.fullmatch(member["name"]):
        compound = read_compound(member["set"]) or Compound("list", [member["set"]])
        return replace(compound, name=compound.name or member["name"].strip())
    if text == r"\mathbb{R}":
        return Compound("()", [r"-\infty", r"\infty"])
    sides = split(text, (r"\setminus",))
    if len(sides) == 2:
        return _difference(*sides)
    parts = split(text, (r"\cup",))
    if len(parts) > 1:
        return _union(parts) or Compound("union", parts)
    restricted = _restricted([text])
    if restricted:
        return restricted
    choices = _signs(text)
    if len(choices) > 1:
        sides = split(text, ("=",))
        named = len(sides) > 1 and all(map(NAME.fullmatch, sides[:-1]))
        return Compound("list", choices, sides[0] if named else None)
    system = None if r"\begin{array}" in text and not text.startswith(r"\{") else _SYSTEM.fullmatch(text)
    if system:
        return _system([row for row in split(system[1], (r"\\",)) if row])
    matrix = _MATRIX.fullmatch(text) if r"\begin{" in text else None
    if matrix:
        rows = [row for row in split(matrix["rows"], (r"\\",)) if row]
        factor = matrix["factor"].strip()
        return Compound("matrix", [_times(factor, row) for row in rows] if factor else rows)
    vector = _vector(text)
    if vector:
        return vector
    sides = split(text, ("=",))
    if len(sides) == 2 and NAME.fullmatch(sides[0]):
        compound = read_compound(sides[1])
        return compound and replace(compound, name=sides[0].replace(" ", ""))
    return _bracketed(text) or _interval(text)


def read_chain(text: str, count: int) -> Compound | None:
    """`x=y=1` as `x=1, y=1`: so many different names with the same value."""
    *names, value = split(text, ("=",))
    if not len(set(names)) == len(names) == count > 1 or LETTER.search(value) or not all(map(_SYMBOL.fullmatch, names)):
        return None
    return Compound("list", [f"{name}={value}" for name in names])


def _system(rows: list[str]) -> Compound:
    """Equations, one on each line, or the cases of a function: a value and a condition each."""
    rows = [row.strip(" ,.;") for row in rows]
    if any(re.search(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])|\\text", row.partition("&")[2]) for row in rows):
        cells = [re.sub(r"\\text\{\s?(?:if|for|when)\s?\}|&?\s?\b(?:if|for|when)\b", "", row) for row in rows]
        return Compound("cases", [re.sub(r"[,\s]*&[&\s]*", "&", cell, count=1) for cell in cells])
    return Compound("list", [row.replace("&", "") for row in rows])


def _vector(text: str) -> Compound | None:
    r"""The components of `2\mathbf{i}+3\mathbf{j}`."""
    plain = _UNIT_VECTOR.sub(r"\1", text)
    if plain == text and not re.search(r"(?<![A-Za-z\\])j\Z|(?<![A-Za-z\\])j\s?[+-].*k\Z", text):
        return None
    components: dict[str, str] = {}
    for term in split(re.sub(r"(?<=[^+\s(\\{-])\s?([+-])", r";\1", plain), (";",)):
        found = _COMPONENT.fullmatch(term.removeprefix("+").strip())
        if found is None or found["unit"] in components:
            return None
        factor = found["factor"].strip()
        components[found["unit"]] = factor + "1" if factor in ("", "-") else factor
    return Compound("()", [components.get(unit, "0") for unit in ("ijk" if "k" in components else "ij")])


def _times(factor: str, row: str) -> str:
    """A row of a matrix with a factor in front of the matrix."""
    times, cells = read_quantity("1" if factor in ("", "-") else factor.strip("()")), []
    for cell in split(row, ("&",)):
        number = read_quantity(cell)
        if number is not None and times is not None:
            product = number.value * times.value * (-1 if factor == "-" else 1)
            cells.append(f"\\frac{{{product.numerator}}}{{{product.denominator}}}")
        else:
            cells.append({"0": "0", "1": factor, "-1": f"-({factor})"}.get(cell, f"{factor}\\cdot({cell})"))
    return "&".join(cells)


def _bracketed(text: str) -> Compound | None:
    for opener in _BRACKETS:
        if not text.startswith(opener):
            continue
        end = closing(text)
        closer = next((closer for closer in _BRACKETS.values() if text.endswith(closer)), "")
        if end < 0 or end + len(closer) != len(text):
            return None
        inner = text[len(opener) : end]
        parts = split(inner, (",", ";"))
        if opener == r"\{":
            return Compound("set", [choice for part in parts if part for choice in _signs(part)])
        if opener == r"\langle":
            opener, closer = "(", ")"
        return Compound(opener + closer, parts) if len(parts) > 1 or opener == "[" else None
    return None


def _interval(text: str) -> Compound | None:
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
    if len(parts) == 2 and NAME.fullmatch(parts[0]) and not LETTER.search(parts[1]):
        parts, closed = [r"-\infty", *parts], [False, *closed]
    elif len(parts) == 2 and not LETTER.search(parts[0]):
        parts, closed = [*parts, r"\infty"], [*closed, False]
    if len(parts) == 2 or not NAME.fullmatch(parts[1]):
        return None
    return Compound("(["[closed[0]] + ")]"[closed[1]], [parts[0], parts[2]], parts[1])


def _both(parts: list[str]) -> Compound | None:
    r"""The interval that `x > 2` and `x \le 5` say together."""
    sides = [side for side in map(_interval, parts) if side is not None]
    if not len(sides) == len(parts) == 2 or sides[0].name != sides[1].name:
        return None
    low, high = sorted(sides, key=lambda side: side.parts[0] == r"-\infty")
    return Compound(low.kind[0] + high.kind[1], [low.parts[0], high.parts[1]], low.name)


def _intervals(whole: Compound | None) -> list[Compound]:
    """The intervals of a set of real numbers; empty for anything else."""
    found = [_bracketed(part) for part in whole.parts] if whole and whole.kind == "union" else [whole]
    return [part for part in found if part] if all(p and p.kind[0] in "([" and len(p.parts) == 2 for p in found) else []


def _union(parts: list[str]) -> Compound | None:
    """Sets of real numbers as one set, `x < 4 or x > 4`; `None` if one of them is something else."""
    bare = [part[1:-1] if r"\setminus" in part and closing(part) == len(part) - 1 else part for part in parts]
    sets = [read_compound(part) for part in bare]
    if len(parts) > MAX_PIECES or not all(map(_intervals, sets)):
        return None
    return _joined([found for found in sets if found], [])


def _joined(sets: list[Compound], points: list[str]) -> Compound | None:
    r"""
    The union of sets without some points. Two intervals that a point parts are joined, `(0,4)\cup(4,25)` as `(0,25)`
    without 4, so that every spelling of a set has the same parts.
    """
    names = {found.name for found in sets if found.name is not None}
    without = [*points, *(point for found in sets for point in found.without)]
    pieces = [(*piece.kind, *piece.parts) for found in sets for piece in _intervals(found)]  # left, right, low, high
    pieces = [
        ("(" if low in without else left, ")" if high in without else right, low, high)
        for left, right, low, high in pieces
    ]
    without = [point for point in without if all(point not in piece for piece in pieces)]
    while meeting := next((p for p in itertools.permutations(pieces, 2) if _meet(*p)), None):
        (left, _, low, point), (_, right, _, high) = meeting
        pieces = [(left, right, low, high), *(piece for piece in pieces if piece not in meeting)]
        without.append(point)
    if len(names) > 1:
        return None
    name = names.pop() if names else None
    if len(pieces) == 1 and not without:
        left, right, low, high = pieces[0]
        return Compound(left + right, [low, high], name)
    return Compound("union", [f"{left}{low},{high}{right}" for left, right, low, high in pieces], name, without)


def _meet(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether one open interval ends at the point where another one begins."""
    return first[1] == ")" and second[0] == "(" and first[3] == second[2]


def _difference(whole: str, removed: str) -> Compound | None:
    r"""`(0,25)\setminus\{4\}`, or a set of real numbers without an interval."""
    found, hole = read_compound(whole), read_compound(removed)
    if not _intervals(found) or found is None or hole is None:
        return None
    if hole.kind == "set":
        return _joined([found], hole.parts)
    ends = [_number(end) for side in (found, hole) for end in side.parts]
    if found.kind == "union" or not _intervals(hole) or hole.kind == "union" or None in ends:
        return None
    low, high, start, end = (number or 0 for number in ends)
    if not low <= start < end <= high:
        return None
    pieces = []
    if low < start:
        pieces.append(Compound(found.kind[0] + ")]"[hole.kind[0] == "("], [found.parts[0], hole.parts[0]]))
    if end < high:
        pieces.append(Compound("(["[hole.kind[1] == ")"] + found.kind[1], [hole.parts[1], found.parts[1]]))
    return _joined(pieces, []) if pieces else None


def _number(end: str) -> Fraction | float | None:
    if end.lstrip("+-") == r"\infty":
        return -math.inf if end.startswith("-") else math.inf
    quantity = read_quantity(end)
    return quantity.value if quantity else None


def _restricted(parts: list[str]) -> Compound | None:
    r"""The set that `0 < x < 25, x \neq 4` give together, or `x \neq \pm 1` alone; `None` without such an exception."""
    ranges, points, names = [], [], set()
    for part in parts:
        excluded = _EXCLUDED.fullmatch(part)
        if excluded and NAME.fullmatch(excluded["name"]) and not LETTER.search(excluded["value"]):
            names.add(excluded["name"])
            points += [sign for value in split(excluded["value"], (",",)) for sign in _signs(value)]
        elif points and not LETTER.search(part) and not _RANGE.search(part):  # x \neq -1, 1
            points += _signs(part)
        else:
            ranges.append(part)
    if not points or len(ranges) > 2 or len(names) > 1:
        return None
    whole = Compound("()", [r"-\infty", r"\infty"])
    if ranges:
        found = _both(ranges) if len(ranges) == 2 else read_compound(ranges[0])
        if found is None or found.name not in names or not _intervals(found):
            return None
        whole = found
    return _joined([replace(whole, name=names.pop())], points)


def _signs(text: str) -> list[str]:
    r"""The two values of an expression with `\pm`."""
    if len(_PLUS_MINUS.findall(text)) != 1:
        return [text]
    sides = split(text, ("=",))
    value = sides[-1] if all(map(NAME.fullmatch, sides[:-1])) else text
    if value.startswith((r"\{", "[")):
        return [text]
    both = value.replace(r"\pm", "+"), value.replace(r"\pm", "-")
    return [re.sub(r"(?<=[+-])\s|(?:^|(?<=[{(,=]))\+", "", choice.strip()) for choice in both]


def split(text: str, separators: Collection[str]) -> list[str]:
    """Split at separators outside of brackets."""
    if not any(map(text.__contains__, separators)):
        return [text.strip()]
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


def closing(text: str) -> int:
    """Position of the bracket that closes the first one, of any kind; -1 if none does."""
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
    """Whether braces come in pairs; math-verify reads much that has unpaired ones."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth < 0:
            return False
    return depth == 0

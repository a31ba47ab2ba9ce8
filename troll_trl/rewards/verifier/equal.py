r"""
equal(): whether an answer is the gold answer. The first rule of `RULES` that decides counts. Only equations and
expressions without structure, such as `2\sqrt{3}`, go to computer algebra.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property

from troll_trl.rewards.verifier.numbers import read_number, same_number
from troll_trl.rewards.verifier.parts import MAX_DEPTH, Parts, parts, unwrap
from troll_trl.rewards.verifier.units import agree, read_unit
from troll_trl.rewards.verifier.words import NAME, choice, is_words, plain, without_introduction

MAX_PARTS = 32
LISTS = ("list", "alternatives")
Algebra = Callable[[str, str], bool]

# A blank that separates nothing: "1 2" is not 12
_BLANK = re.compile(r"(?<!\d)\s|\s(?!\d)")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|neq|in|to|equiv|setminus)(?![A-Za-z])")
_TRUTH = re.compile(
    r"\s*(?:\\text\{\s*)?(?:[TF]|(?i:true|false|yes|no|right|wrong|(?:in)?correct|always|sometimes|never))\s*\}?\s*"
)
_UNIT = re.compile(r"(?<=[\w})])\s?\\text\{[A-Za-z. ]+\}(?:\^\{?\d\}?)?\Z")
# What is left to be worked out. A function that the gold answer has may occur more often in the answer
_FUNCTION = (
    r"\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]+|log|ln|lg|pi|max|min|sum|prod|int|lim|det|[lr]floor|[lr]ceil)"
    r"(?![A-Za-z])|\^"
)
_OPERATION = re.compile(rf"({_FUNCTION})|\\(?:sqrt|binom)|!|(?<=[\w}})!])\s*[+-]|\d\s*\\(?:cdot|times)\s*\d|\)\s?\(")
# Other spellings of a root and of a fraction
_ROOT, _INVERSE = re.compile(r"(?:\d+|[A-Za-z)])\^\{\(?(?:1/\d|\\frac\{1\}\{\d\})\)?\}"), re.compile(r"\^\{-1\}")
# math-verify skips words and dots, takes gcd(m,n) for 1, A^T B for B A^T, f' for f, f^{-1} for 1/f, and adds up 1-3-2
_MISREAD = re.compile(
    r"\\text|dots|\.\.\.|\\(?:gcd|lcm|vec|angle)|[vV]matrix|'|\^\{?T|[A-Za-df-z]\^\{-1\}|[A-Z]\s?\\times|\d-\d+-\d|\d:\d"
    r"|[^\x00-\x7f]|[?#]|(?<![\\A-Za-z])[A-Za-z]{4}"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\}")


class Pair:
    """A normalised gold answer and answer, `depth` lists deep."""

    def __init__(self, gold: str, answer: str, algebra: Algebra, depth: int):
        self.gold, self.answer = unwrap(gold), unwrap(answer)
        self.algebra, self.depth = algebra, depth

    @cached_property
    def value(self) -> str:
        return without_introduction(self.answer)

    @cached_property
    def numbers(self):
        return read_number(self.gold), read_number(self.value)

    @cached_property
    def parts(self) -> tuple[Parts | None, Parts | None]:
        gold, answer = self.numbers
        return None if gold else parts(self.gold), None if answer else parts(self.value)

    def again(self, gold: str, answer: str) -> bool:
        return equal(gold, answer, self.algebra, self.depth + 1)


def equal(gold: str, answer: str, algebra: Algebra, depth: int = 0) -> bool:
    """Tell whether a normalised answer is the normalised gold answer; `algebra` decides on two expressions."""
    pair = Pair(gold, answer, algebra, depth)
    if not pair.gold or not pair.answer or depth > MAX_DEPTH:
        return False
    return next(decision for rule in RULES if (decision := rule(pair)) is not None)


def same_text(pair: Pair) -> bool | None:
    return _BLANK.sub("", pair.gold) == _BLANK.sub("", pair.answer) or None


def same_choice(pair: Pair) -> bool | None:
    """Compare letters: a choice needs its letter, whatever text of the option follows it."""
    letter = choice(pair.gold) if pair.depth == 0 else None
    return choice(pair.answer) == letter if letter else None


def same_numbers(pair: Pair) -> bool | None:
    gold, answer = pair.numbers
    return same_number(gold, answer) if gold and answer else None


def same_parts(pair: Pair) -> bool | None:
    """Compare part by part. An answer needs as many parts as the gold answer; a list of guesses earns nothing."""
    gold, answer = pair.parts
    if gold is None or answer is None:
        return None
    if len(gold.members) != len(answer.members) or len(gold.members) > MAX_PARTS:
        return False
    kinds = {gold.kind, answer.kind}
    if _is_unordered(gold, answer):
        left = list(answer.members)
        for member in gold.members:
            found = next((one for one in left if pair.again(member, one)), None)
            if found is None:
                return False
            left.remove(found)
        return True
    column = f"matrix {[1] * len(gold.members)}"
    may_agree = len(kinds) == 1 or kinds in ({"list", "()"}, {column, "()"})
    return may_agree and all(map(pair.again, gold.members, answer.members))


def _is_unordered(gold: Parts, answer: Parts) -> bool:
    names = {_bare(member.partition("=")[0]) for member in gold.members if "=" in member}
    if len(names) > 1 and not any("=" in member for member in answer.members):
        return False  # without the names of x=1, y=2, order matters
    if all(map(_TRUTH.fullmatch, gold.members)):
        return False  # each answers one question
    kinds = {gold.kind, answer.kind}
    return kinds <= {"list", "alternatives", "set"} or ("union" in kinds and kinds <= {"union", "list", "alternatives"})


def same_value_twice(pair: Pair) -> bool | None:
    r"""Take two spellings of one value, `15\frac{39}{40}, \frac{639}{40}`, for that value; 1, 1 are two."""
    gold, answer = pair.parts
    divided = gold or answer
    if (gold and answer) or divided is None or divided.kind not in LISTS:
        return None
    spellings = {member.strip() for member in divided.members}
    is_same = (pair.again(one, pair.answer) if gold else pair.again(pair.gold, one) for one in spellings)
    return (len(spellings) == len(divided.members) and all(is_same)) or None


def same_words(pair: Pair) -> bool | None:
    """Compare words as text: math-verify would multiply their letters."""
    return plain(pair.gold) == plain(pair.value) if is_words(pair.gold) or is_words(pair.value) else None


def same_equation(pair: Pair) -> bool | None:
    """Accept 5 for a gold answer `x = 5`; for any other equation, accept only an equation."""
    if "=" not in pair.gold or _is_list(pair):
        return None
    name, _, value = pair.gold.partition("=")
    left, equals, right = pair.value.partition("=")
    if "=" not in value and "+" not in name and NAME.fullmatch(name):
        if not equals or _bare(left) == _bare(name):
            return pair.again(value, right or left)
        if name.strip() != "y" or read_number(value):  # "ab = c" of the problem is not "b = c/a"
            return right.strip() == name.strip() and pair.again(value, left)
    # math-verify accepts any true statement without letters
    is_readable = equals and _LETTER.search(pair.gold) and not _MISREAD.search(pair.gold + pair.value)
    return bool(is_readable) and pair.algebra(pair.gold, pair.value)


def named_value(pair: Pair) -> bool | None:
    """Ignore a name before "="; any other left side must be equal, too: `2x = 5` is not 5."""
    if "=" not in pair.value or _is_list(pair) or _RELATION.search(pair.value):
        return None
    *sides, value = pair.value.split("=")
    for side in sides:
        is_worked = re.search(r"\d", side) and _bare(side) != _bare(value)  # 7 = 7 says nothing
        if not NAME.fullmatch(side) and not (is_worked and pair.algebra(pair.gold, side)):
            return False
    return pair.again(pair.gold, value)


def rounded_value(pair: Pair) -> bool | None:
    r"""Ignore what follows \approx, or one could guess twice."""
    if r"\approx" not in pair.gold + pair.value:
        return None
    return pair.again(*map(_exact, (pair.gold, pair.value)))


def other_structure(pair: Pair) -> bool | None:
    """Refuse a list for a value. An interval may match a solved inequality (not the problem's), a point a column."""
    gold, answer = pair.parts
    if is_solved(pair.gold) and not (is_solved(pair.value) or answer):
        return False
    divided = gold or answer
    if divided is None:
        return None
    other = pair.value if gold else pair.gold
    may_agree = divided.kind.startswith("matrix") or is_solved(other)
    return None if may_agree and divided.kind not in (*LISTS, "set") else False


def number_needs_number(pair: Pair) -> bool | None:
    """Refuse the expression of the problem for a number (95^2 for 9025), and a rounding for an expression."""
    gold, answer = pair.numbers
    return False if gold or (answer and "." in pair.value) else None


def same_expression(pair: Pair) -> bool:
    (gold, gold_unit), (answer, unit) = _split_unit(pair.gold), _split_unit(pair.value)
    if gold == answer or not agree(gold_unit, unit):
        return agree(gold_unit, unit)
    is_readable = not _MISREAD.search(_ENVIRONMENT.sub("", gold + answer))
    return is_readable and is_worked_out(gold, answer) and pair.algebra(gold, answer)


RULES = (
    same_text, same_choice, same_numbers, same_parts, same_value_twice, same_words, same_equation, named_value,
    rounded_value, other_structure, number_needs_number, same_expression,
)  # fmt: skip


def is_solved(text: str) -> bool:
    r"""Tell whether a text is an inequality that says where a lone letter is: `2 < x \le \sqrt{5}`."""
    sides = _RELATION.split(text)
    unknown = [side for side in sides if re.search("[A-Za-z]", _COMMAND.sub("", side))]
    return len(sides) > 1 and len(unknown) == 1 and len(unknown[0].strip()) == 1


def is_worked_out(gold: str, answer: str) -> bool:
    """Tell whether an answer has only the kinds of operations of a gold answer without letters, and no more sums,
    products and roots than the gold answer."""
    if re.search("[A-Za-df-hj-z]", _COMMAND.sub("", gold)) or _RELATION.search(gold + answer):
        return True
    made, asked = (
        Counter(
            found[1] or re.sub(r"[\s\d+-]", "", found[0]) or "+"
            for found in _OPERATION.finditer(_ROOT.sub(r"\\sqrt", _INVERSE.sub("", side)))
        )
        for side in (answer, gold)
    )
    return made.keys() <= asked.keys() and all(re.fullmatch(_FUNCTION, kind) for kind in made - asked)


def _is_list(pair: Pair) -> bool:
    divided = pair.parts[0] or pair.parts[1]
    return divided is not None and divided.kind in LISTS


def _bare(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def _exact(text: str) -> str:
    first, *others = text.split(r"\approx")
    return others[-1] if others and NAME.fullmatch(first) else first


def _split_unit(text: str) -> tuple[str, frozenset[str]]:
    found = _UNIT.search(text)
    unit = read_unit(found[0]) if found else None
    return (text, frozenset()) if found is None or unit is None else (text[: found.start()], unit)

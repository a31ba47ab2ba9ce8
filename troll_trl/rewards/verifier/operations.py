r"""
What an expression writes out: its operations, and the products that stand without a sign.

The policy could box an expression of the problem (`95^2`, `\sin 60^\circ`) and let the verifier work it out. So an
answer to a gold answer without variables may only contain the kinds of operation that the gold answer contains, and
leave no arithmetic to do: no two numbers to add or to multiply, no fraction in a fraction.
"""

import itertools
import math
import re
from collections import Counter
from fractions import Fraction

from troll_trl.rewards.verifier.quantities import read_quantity
from troll_trl.rewards.verifier.structure import LETTER

_TOKEN = re.compile(r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\[A-Za-z]+\*?|\\.|\d+(?:\.\d+)?|\.\d+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_KINDS = {
    r"\cdot": "product", r"\times": "product", r"\div": "quotient", "/": "quotient", ":": "quotient",
    "!": "factorial", r"\binom": "factorial", r"\choose": "factorial", r"\sqrt": "root", r"\frac": "quotient",
    "+": "sum", "-": "sum", r"\pm": "sum", r"\mp": "sum", r"\exp": "power",
}  # fmt: skip
_BINARY = frozenset((r"\cdot", r"\times", r"\div", "/", ":", r"\pm", r"\mp", "+", "-", "=", "<", ">", ",", ";", "&"))
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, r"\overline": 1, r"\text": 1, "^": 1, "_": 1}
_CONSTANTS = frozenset((r"\pi", r"\infty", r"\circ", r"\mathbb", r"\emptyset"))
_NEUTRAL = frozenset(("%", "'"))
_ADDING = frozenset(("+", "-", r"\pm", r"\mp"))
_DIVIDING = frozenset(("/", ":", r"\div"))
_OPENERS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])i(?![A-Za-z])")
_CONSTANT = re.compile(r"\\pi(?![A-Za-z])|(?<![\\A-Za-z])[ei](?![A-Za-z])")
# \frac{3\cdot(4\sqrt{2})}{3}
_CANCELS = re.compile(r"\{(\d+)(?:\\(?:cdot|times|sqrt|pi)|\()(?:[^+()-]|\([^()]*\))*\}\{\1\}")
_BRACKETED = re.compile(r"[)\]]\s?(?:\^|\()|[\dA-Za-z}]\s?(?:\\cdot)?\s?\(")
_INTEGER_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)(?![\d.])")


class Malformed(ValueError):
    """Numbers side by side, `40 2`, which are neither a product nor a number; or brackets nested too deep."""


def _left_to_do(items: list[str]) -> int:
    """How many sums, products and fractions of plain numbers stand among the items of an expression."""
    undone = items.count("^1")
    for sum_ in _split(items, ";"):
        terms = [term for term in _split(sum_, "+") if term]
        undone += sum(map(_is_number, terms)) > 1
        for term in terms:
            undone += "0" in term and len(terms) + len(term) > 2
            divided = [slash == "/" for slash in ["", *term]]
            factors = [item for item, is_divisor in zip(term, divided, strict=False) if not is_divisor and item != "/"]
            undone += sum(_is_number([item]) for item in factors) > 1 or term.count("/") > 1
            undone += "1" in factors and "g" in factors
    return undone


def _is_number(term: list[str]) -> bool:
    return all(item in ("r", "/") or item[0] in ".0123456789" for item in term)


def _split(items: list[str], separator: str) -> list[list[str]]:
    return [list(group) for is_separator, group in itertools.groupby(items, separator.__eq__) if not is_separator]


class _Walk:
    """Reads an expression from left to right, once."""

    def __init__(self, text: str):
        self.text = text
        self.kinds: Counter[str] = Counter()
        self.tokens = [(match[0], match.start()) for match in _TOKEN.finditer(text)]
        self.next = 0
        self.item = "g"
        self.written: list[str] = []  # the text, with a sign for every product with a number or a bracket

    def expression(self, closer: str | None = None) -> str:
        """Read up to a bracket. Returns the number that stands there, `"r"` for a fraction of numbers, else `"g"`."""
        operand = ""  # what stands directly before: "" (nothing, or an operator), "letter", "number" or "group"
        apart = bars = False
        items: list[str] = []  # of the terms: numbers, "r", letters ("l"), functions ("f"), others ("g"), operators
        while self.next < len(self.tokens):
            token, position = self.tokens[self.next]
            if token == closer:
                break
            if token.isspace() or token in _NEUTRAL:
                apart = apart or token.isspace()
                self._take()
                continue
            if token in ("^", "_"):
                script = self._script(operand)
                if items and token == "^":
                    items[-1] = "g" if script not in ("0", "1") else "^1"
            elif token == "!":
                self._operator(token)
            elif token == "|":
                self.kinds["function"] += 1
                operand, bars = ("group" if bars else ""), not bars
                self._take()
            elif token in _BINARY:
                self._operator(token, unary=not operand)
                items += ["+"] if token in _ADDING else ["/"] if token in _DIVIDING else []
                items += [";"] if token not in _KINDS else []
                operand = ""
            else:
                self.item = "g"
                operand = self._operand(token, position, operand, apart)
                if items[-1:] == ["f"]:
                    items[-1] = "g"
                else:
                    items.append(self.item)
            apart = False
        self.kinds["arithmetic"] += _left_to_do(items)
        values = [item for item in items if item != "+"]
        return values[0] if len(values) == 1 and (values[0] == "r" or values[0][0] in ".0123456789") else "g"

    def _operand(self, token: str, position: int, before: str, apart: bool) -> str:
        number = _NUMBER.fullmatch(token) is not None
        mixed = _INTEGER_FRACTION.match(self.text, position) if before == "number" else None
        if mixed and (token == r"\frac" or apart) and self._is_mixed(mixed):
            return self._mixed(mixed)
        if number and apart and before == "number":
            raise Malformed(f"numbers side by side: {self.text}")
        if before:
            self.kinds["product"] += 1
            if (number and before == "group") or (before != "letter" and (token in _OPENERS or token == r"\frac")):
                self.written.append(r"\cdot ")
        if token in _OPENERS:
            signed = self.written[-1:] in (["+"], ["-"])
            self.item = self._group(_OPENERS[token], signed)
            return "group"
        self._take()
        if number:
            self.item = token
            return "number"
        if len(token) == 1 or token in _CONSTANTS:
            if token == r"\mathbb":
                self._argument()
            self.item = "l"
            return "letter"
        kind = _KINDS.get(token)
        if kind is None and not token.startswith((r"\text", r"\overline", r"\begin", r"\end")) and token[1:].isalpha():
            kind = "variable" if LETTER.match(token) and token[1:] not in _FUNCTIONS else "function"
        if kind == "variable":
            self.item = "l"
            return "letter"
        if kind:
            self.kinds[kind] += 1
        if token == r"\frac":
            self.item = self._fraction()
            return "group"
        square_root = token == r"\sqrt" and self._peek() != "["
        if token == r"\sqrt" and not square_root:
            self._group("]")
        arguments = _ARGUMENTS.get(token, 0)
        for _ in range(arguments):
            argument = self._argument()
            if square_root and argument.isdigit() and math.isqrt(int(argument)) ** 2 == int(argument):
                self.kinds["arithmetic"] += 1
        self.item = "g" if arguments else "f"
        return "group" if arguments else ""  # a function takes what follows

    def _fraction(self) -> str:
        parts, whole = [], len(self.written)
        for divides in (False, True):
            outside, self.kinds, start = self.kinds, Counter(), len(self.written)
            parts.append(self._argument())
            inside, self.kinds = self.kinds, outside
            text = "".join(self.written[start:])
            if inside["quotient"] or "." in text or (divides and (inside["sum"] or _IMAGINARY.search(text))):
                inside["division"] += 1
            self.kinds += inside
        self.kinds["division"] += _CANCELS.fullmatch("".join(self.written[whole:])) is not None
        return "g" if "g" in parts else "r"

    def _is_mixed(self, fraction: re.Match) -> bool:
        whole = self._before(fraction.start())
        top, bottom = (int(part) for part in fraction.groups() if part)
        return whole is not None and bottom != 0 and Fraction(top, bottom) < 1

    def _before(self, position: int) -> str | None:
        """The integer before a position, if nothing but space stands between."""
        match = re.search(r"(?<![\d.^_])(\d+)\s*\Z", self.text[:position])
        return match[1] if match else None

    def _mixed(self, fraction: re.Match) -> str:
        self.item = ";"  # one number with the one before
        while not self.written[-1][-1:].isdigit():
            self.written.pop()
        self.written[-1] = f"({self.written[-1]}+{fraction[0]})"
        while self.next < len(self.tokens) and self.tokens[self.next][1] < fraction.end():
            self.next += 1
        return "group"

    def _script(self, operand: str) -> str:
        """A power or an index, which is returned."""
        token = self._take()
        start = len(self.written)
        inner = self.kinds
        self.kinds = Counter()
        self._argument()
        inside, self.kinds = self.kinds, inner
        script = "".join(self.written[start:]).strip("{}() ")
        if token == "_" or script in (r"\circ", "") or not operand:
            return script
        base = "".join(self.written[:start]).rstrip("^").strip("{ ")
        if inside["quotient"] or re.fullmatch(r"-?\d*\.\d+", script):
            self.kinds["root"] += 1
            inside.pop("quotient", None)
        elif script == "-1":
            self.kinds["quotient"] += 1
        elif not (re.search(r"(?<![\d.])10\Z", base) and re.fullmatch(r"-?\d+", script)):  # a power of ten is a numeral
            self.kinds["power"] += 1
        self.kinds += inside
        return script

    def _operator(self, token: str, unary: bool = False) -> None:
        after_sign = unary and self.written[-1:] in (["+"], ["-"])  # --7
        self._take()
        if token in _KINDS and (not unary or after_sign):
            self.kinds[_KINDS[token]] += 1

    def _argument(self) -> str:
        while (self._peek() or "x").isspace():
            self._take()
        token = self._peek()
        if token is None:
            return "g"
        if token == "{":
            return self._group("}")
        if token in _ARGUMENTS:
            self._operand(token, self.tokens[self.next][1], "", False)
            return "g"
        sign = token in "+-"
        self._take()
        if sign and self._peek() is not None:
            self._take()
        return self.written[-1] if _NUMBER.fullmatch(self.written[-1]) else "g"

    def _group(self, closer: str, signed: bool = False) -> str:
        self._take()
        if signed and self._peek() in ("+", "-"):  # -(-7)
            self.kinds["sum"] += 1
        value = self.expression(closer)
        if self.next < len(self.tokens):
            self._take()
        return value

    def _peek(self) -> str | None:
        return self.tokens[self.next][0] if self.next < len(self.tokens) else None

    def _take(self) -> str:
        token = self.tokens[self.next][0]
        self.next += 1
        self.written.append(token)
        return token


_FUNCTION_NAMES = """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg max min gcd lcm det deg dim sum prod int lim
    lfloor rfloor lceil rceil Gamma bmod pmod mod operatorname sgn
    """
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())


def explicit_products(text: str) -> str:
    r"""
    An expression in which products with a number or a bracket have a sign, and mixed numbers a bracket: `(2)(5)` as
    `(2)\cdot (5)`, `3\frac{1}{2}` as `(3+\frac{1}{2})`.

    Args:
        text (`str`):
            Normalised expression.

    Returns:
        `str`: the expression; what is no mathematics comes back as it is.

    Raises:
        Malformed: two numbers side by side, or hundreds of brackets in each other.
    """
    return "".join(_walk(text).written)


def operations(text: str) -> Counter[str]:
    """
    How often each kind of operation stands in a normalised expression: `sum`, `product`, `quotient`, `power`, `root`,
    `function`, `factorial`. A sign is no sum, a numeral such as `2.5` or `10^3` no operation.
    """
    return _walk(text).kinds


def _walk(text: str) -> _Walk:
    walk = _Walk(text)
    try:
        while walk.next < len(walk.tokens):
            walk.expression()
    except RecursionError:
        raise Malformed("brackets in hundreds of brackets") from None
    return walk


def is_worked_out(gold: str, answer: str) -> bool:
    r"""
    Whether an answer leaves no more to work out than the gold answer does. A gold answer with variables allows
    anything. Otherwise the answer may contain the kinds of operation of the gold answer, not more of them, one
    fraction, and, beside a root, a power, a function or a constant, products and fractions (`3\sqrt{2}` for
    `\sqrt{18}`).

    Args:
        gold (`str`):
            Normalised gold answer, one expression.
        answer (`str`):
            Normalised answer.

    Returns:
        `bool`: whether it does.
    """
    is_number = read_quantity(gold) is not None
    if (LETTER.search(gold) and not is_number) or read_quantity(answer) is not None:
        return True
    if LETTER.search(answer):
        return False
    try:
        found = operations(answer)
        wanted = Counter(quotient="/" in gold or r"\frac" in gold) if is_number else operations(gold)
    except Malformed:
        return False
    extra = {kind for kind in found if found[kind] and not wanted[kind]}
    if any(wanted[kind] for kind in wanted if kind != "quotient") or (_CONSTANT.search(gold) and not is_number):
        extra -= {"product", "quotient"}
    elif found["quotient"] == 1:
        extra -= {"quotient"}
    if extra or (":" in answer and not wanted["quotient"]):  # 6:2 is a ratio, perhaps 3/1, but no 3
        return False
    most = wanted.copy()
    most["product"] += wanted["sum"] + 1
    most["root"] += found["quotient"]  # \frac{\sqrt2}{\sqrt3} for \sqrt{\frac23}
    most["function"] += max(0, found["quotient"] - wanted["quotient"])  # \frac{\ln 3}{\ln 2} for \log_2 3
    counted = ("sum", "product", "power", "root", "function", "factorial")
    return bool(_BRACKETED.search(gold)) or all(found[kind] <= most[kind] for kind in counted)

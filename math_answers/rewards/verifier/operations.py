r"""
The operations that an expression writes out, and its products without a sign. A policy could box an expression of the
problem (`95^2`, `\sin 60^\circ`) and let the verifier work it out, so an answer must leave no arithmetic to do.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from math_answers.rewards.verifier.quantities import read_quantity
from math_answers.rewards.verifier.structure import LETTER

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


@dataclass
class _Term:
    """A product: what it multiplies and what it divides by, a plain number by its text, anything else by its kind."""

    factors: list[str] = field(default_factory=list)
    divisors: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        return self.factors + self.divisors


def _left_to_do(terms: list[_Term]) -> int:
    r"""How much of this a sum contains: sums, products and fractions of plain numbers, `1\sqrt{2}`, and terms of 0."""
    terms = [term for term in terms if term.parts]
    left = int(sum(all(map(_is_number, term.parts)) for term in terms) > 1)
    for term in terms:
        left += sum(map(_is_number, term.factors)) > 1 or len(term.divisors) > 1
        left += "1" in term.factors and "other" in term.factors
        left += "0" in term.parts and (len(terms) > 1 or len(term.parts) > 1)
    return left


def _is_number(part: str) -> bool:
    return part == "fraction" or part[0] in ".0123456789"


class _Walk:
    """Reads an expression from left to right, once."""

    def __init__(self, text: str):
        self.text = text
        self.kinds: Counter[str] = Counter()
        self.tokens = [(match[0], match.start()) for match in _TOKEN.finditer(text)]
        self.next = 0
        self.part = "other"  # the part of a term that was read last, as `_Term` keeps it
        self.written: list[str] = []  # the text, with a sign for every product with a number or a bracket

    def expression(self, closer: str | None = None) -> str:
        """Read up to a bracket. Returns it as one part of a term."""
        operand = ""  # what directly precedes: "" (nothing, or an operator), "letter", "number" or "group"
        apart = bars = divides = False
        sums = [[_Term()]]
        latest: list[str] = []  # the list that holds the last part
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
                if latest and token == "^":
                    latest[-1] = "other"
                    self.kinds["arithmetic"] += script in ("0", "1")
            elif token == "!":
                self._operator(token)
            elif token == "|":
                self.kinds["function"] += 1
                operand, bars = ("group" if bars else ""), not bars
                self._take()
            elif token in _BINARY:
                self._operator(token, unary=not operand)
                operand, latest, divides = "", [], token in _DIVIDING
                if token in _ADDING:
                    sums[-1].append(_Term())
                elif token not in _KINDS:
                    sums.append([_Term()])
            else:
                self.part, start = "other", len(self.written)
                operand = self._operand(token, position, operand, apart)
                self.kinds["division"] += divides and _IMAGINARY.search("".join(self.written[start:])) is not None
                if latest[-1:] == ["function"] or self.part == "mixed":
                    latest[-1] = "other"
                else:
                    latest = sums[-1][-1].divisors if divides else sums[-1][-1].factors
                    latest.append(self.part)
                    divides = False
            apart = False
        self.kinds["arithmetic"] += sum(map(_left_to_do, sums))
        parts = [part for terms in sums for term in terms for part in term.parts]
        return parts[0] if len(parts) == 1 and _is_number(parts[0]) else "other"

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
            self.part = self._group(_OPENERS[token], signed)
            return "group"
        self._take()
        if number:
            self.part = token
            return "number"
        kind = _KINDS.get(token)
        if kind is None and not token.startswith((r"\text", r"\overline", r"\begin", r"\end")) and token[1:].isalpha():
            kind = "variable" if LETTER.match(token) and token[1:] not in _FUNCTIONS else "function"
        if len(token) == 1 or token in _CONSTANTS or kind == "variable":
            if token == r"\mathbb":
                self._argument()
            self.part = "letter"
            return "letter"
        if kind:
            self.kinds[kind] += 1
        if token == r"\frac":
            self.part = self._fraction()
            return "group"
        square_root = token == r"\sqrt" and self._peek() != "["
        if token == r"\sqrt" and not square_root:
            self._group("]")
        arguments = _ARGUMENTS.get(token, 0)
        for _ in range(arguments):
            argument = self._argument()
            if square_root and argument.isdigit() and math.isqrt(int(argument)) ** 2 == int(argument):
                self.kinds["arithmetic"] += 1
        self.part = "other" if arguments else "function"
        return "group" if arguments else ""  # a function takes what follows

    def _fraction(self) -> str:
        parts, whole = [], len(self.written)
        for divides in (False, True):
            outside, self.kinds, start = self.kinds, Counter(), len(self.written)
            parts.append(self._argument())
            inside, self.kinds = self.kinds, outside
            text = "".join(self.written[start:])
            # Over a sum only with a root: \frac{1}{1+\sqrt{2}} is as good a spelling as \sqrt{2}-1
            over_sum = divides and inside["sum"] and not inside["root"]
            if inside["quotient"] or "." in text or over_sum or (divides and _IMAGINARY.search(text)):
                inside["division"] += 1
            self.kinds += inside
        self.kinds["division"] += _CANCELS.fullmatch("".join(self.written[whole:])) is not None
        return "other" if "other" in parts else "fraction"

    def _is_mixed(self, fraction: re.Match) -> bool:
        """Whether a fraction is less than 1, with an integer before it."""
        top, bottom = (int(part) for part in fraction.groups() if part)
        return top < bottom and re.search(r"(?<![\d.^_])\d+\s*\Z", self.text[: fraction.start()]) is not None

    def _mixed(self, fraction: re.Match) -> str:
        self.part = "mixed"  # one number with the one before
        while not self.written[-1][-1:].isdigit():
            self.written.pop()
        self.written[-1] = f"({self.written[-1]}+{fraction[0]})"
        while self.next < len(self.tokens) and self.tokens[self.next][1] < fraction.end():
            self.next += 1
        return "group"

    def _script(self, operand: str) -> str:
        """A power or an index, which is returned."""
        token, start = self._take(), len(self.written)
        outside, self.kinds = self.kinds, Counter()
        self._argument()
        inside, self.kinds = self.kinds, outside
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
            return "other"
        if token == "{":
            return self._group("}")
        if token in _ARGUMENTS:
            self._operand(token, self.tokens[self.next][1], "", False)
            return "other"
        sign = token in "+-"
        self._take()
        if sign and self._peek() is not None:
            self._take()
        return self.written[-1] if _NUMBER.fullmatch(self.written[-1]) else "other"

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


_FUNCTION_NAMES = """sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg max min gcd lcm det deg dim
    sum prod int lim lfloor rfloor lceil rceil Gamma bmod pmod mod operatorname sgn"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())


def explicit_products(text: str) -> str:
    r"""
    A normalised expression in which products with a number or a bracket have a sign, and mixed numbers a bracket:
    `(2)(5)` as `(2)\cdot (5)`. Raises [`Malformed`].
    """
    return "".join(_walk(text).written)


def _walk(text: str) -> _Walk:
    walk = _Walk(text)
    try:
        while walk.next < len(walk.tokens):
            walk.expression()
    except RecursionError:
        raise Malformed("brackets in hundreds of brackets") from None
    return walk


# Whatever its form, a value of logarithms, pi and e is worked out if no two of its terms can be added: `5\pi-3\pi`
_TRANSCENDENTAL = re.compile(r"\\(?:pi|ln|log)(?![A-Za-z])|(?<![\\A-Za-z])e(?![A-Za-z])")
_NUMBERS_LEFT = re.compile(r"[\d)}]\}?\^|(?<!\\ln)(?<!\\ln\()(?<!\\ln\{)\\sqrt|[()]|[a-z]\{?\(")
_FRACTION = re.compile(r"-?\\frac\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_COEFFICIENT = re.compile(r"(?<![\^_\d])(?<!\^\{)(?<!\\ln)(?<!\\ln )\d+(?:\.\d+)?|\\frac|\\cdot|[{}/ ]")


def _is_closed_form(gold: str, answer: str) -> bool:
    if not _TRANSCENDENTAL.search(gold) or not _TRANSCENDENTAL.search(answer):
        return False
    if _NUMBERS_LEFT.search(answer) and not _NUMBERS_LEFT.search(gold):
        return False
    fraction = _FRACTION.fullmatch(answer)
    top = fraction[1] if fraction else answer
    terms = [_COEFFICIENT.sub("", term) for term in re.split(r"(?<![\^{])[+-]", top.lstrip("+-"))]
    return len(set(terms)) == len(terms)


def is_worked_out(gold: str, answer: str) -> bool:
    r"""
    Whether an answer leaves no more to work out than the gold answer. A gold answer with variables allows anything.
    Otherwise the answer may contain the gold answer's kinds of operation, no more of each, and one fraction. Next to a
    root, a power, a function or a constant it may contain products and fractions (`3\sqrt{2}` for `\sqrt{18}`).
    """
    is_number = read_quantity(gold) is not None
    if (LETTER.search(gold) and not is_number) or read_quantity(answer) is not None:
        return True
    if LETTER.search(answer):
        return False
    try:
        found = _walk(answer).kinds
        wanted = Counter(quotient="/" in gold or r"\frac" in gold) if is_number else _walk(gold).kinds
    except Malformed:
        return False
    extra = {kind for kind in found if found[kind] and not wanted[kind]}
    if any(wanted[kind] for kind in wanted if kind != "quotient") or (_CONSTANT.search(gold) and not is_number):
        extra -= {"product", "quotient"}
        if _is_closed_form(gold, answer) and not found["arithmetic"] > wanted["arithmetic"]:
            return not extra - {"sum", "power", "root"} and found["function"] <= wanted["function"] + 1
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

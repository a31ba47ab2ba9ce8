"""
What only computer algebra can decide: whether two LaTeX expressions are equal. Runs in the worker processes.

Expressions are compared at points (points.py), exactly or to forty digits or more. Only what cannot be evaluated is
left to math-verify's own comparison, which takes differences below 1e-15 for zero.
"""

import itertools
import re
from fractions import Fraction

import sympy
from math_verify.grader import verify
from sympy.core.relational import Relational

from math_answers.rewards.verifier.compare import Leaf, equal, is_readable
from math_answers.rewards.verifier.points import is_rational, points
from math_answers.rewards.verifier.quantities import APPROXIMATION_DIGITS
from math_answers.rewards.verifier.reading import Gcd, Lcm, read

# Enough to see the -1 of 2^{1009}\sqrt{3}-1. Fewer for functions: the gamma function would take seconds
DIGITS, DIGITS_OF_FUNCTIONS = 1000, 40
SLACK = 15  # digits that may be lost
# Numbers of points to compare at; quotients of polynomials need fewer
ENOUGH, ENOUGH_OF_RATIONAL, ENOUGH_OF_WHOLE = 10, 5, 24

# Read once before the first question: the grammar is ten times slower the first time that it meets a construct
WARM_UP = (r"2\sqrt{3}", r"\frac{\pi}{2}-1", "x^2+3x-6", r"\sin(2x)", "e^{-x}", "y=2x+1", "6-5i", r"\log_{2}{3}", "5!")

# Names of constants of integration, and what they may be replaced by
_GOLD_CONSTANT, _CONSTANT = re.compile(r"C|[Cc]_?\{?\d\}?"), re.compile(r"[A-DKck](?:_?\{?\d\}?)?")
_DECIMAL = re.compile(r"-?\d*\.(\d+)")


def answer_question(question: dict) -> dict:
    """
    Decide what the fast path left open: a `gold` answer and an `answer`, both normalised, and whether to be `strict`.
    The `result` says whether they are equal; without an answer, whether the gold answer can be read. Or there is an
    `error`.
    """
    try:
        if "answer" in question:
            leaf = Leaf(expressions_equal, question.get("strict", True), number)
            return {"result": bool(equal(question["gold"], question["answer"], leaf))}
        return {"result": is_readable(question["gold"], lambda text: read(text) is not None)}
    except MemoryError:
        raise
    except Exception as error:  # sympy raises anything on odd input. It is counted as a crash
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def warm_up() -> None:
    """Make the first questions as fast as the later ones."""
    for expression in WARM_UP:
        expressions_equal(expression, expression + "+0")


def number(text: str) -> Fraction | None:
    """The number that an expression is; `None` if it is none."""
    found = read(text)
    value = _value(found, {}, DIGITS_OF_FUNCTIONS) if isinstance(found, sympy.Expr) else None
    if value is None or not value.is_number or not value.is_real:
        return None
    return Fraction(str(sympy.Rational(value)))


def expressions_equal(gold_text: str, answer_text: str) -> bool:
    """Whether two expressions, equations or inequalities are equal; `False` too if one of them cannot be read."""
    gold, answer = read(gold_text), read(answer_text)
    if gold is None or answer is None:
        return False
    renamed = _renamings(gold, answer) or [{}]
    return any(_same(gold, answer.xreplace(names), gold_text, answer_text) for names in renamed)


def _renamings(gold, answer) -> list[dict]:
    """How the constants of an integral or a differential equation may be named: `+K` for `+C`."""
    constants, others = (
        sorted(here.free_symbols - there.free_symbols, key=str) for here, there in ((gold, answer), (answer, gold))
    )
    if not 0 < len(constants) == len(others) <= 3 or len(gold.free_symbols) == len(constants):
        return []
    matches = [*map(_GOLD_CONSTANT.fullmatch, map(str, constants)), *map(_CONSTANT.fullmatch, map(str, others))]
    if not all(matches):
        return []
    return [dict(zip(others, order, strict=True)) for order in itertools.permutations(constants)]


def _same(gold, answer, gold_text: str, answer_text: str) -> bool:
    if isinstance(gold, Relational) or isinstance(answer, Relational):
        return _same_relation(gold, answer)
    same = None
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        same = _agree(gold, answer)
        if same is False and not (gold.free_symbols or answer.free_symbols):
            same = _approximates(gold_text, answer) or _approximates(answer_text, gold)
    return bool(verify(gold, answer, timeout_seconds=None)) if same is None else same


def _digits(*expressions: sympy.Expr) -> int:
    r"""The digits to compare: few for functions, unless a large power or number in them may hide a tiny difference, as
    in `\sin x+10^{-30}`."""
    if not any(expression.has(sympy.Function) for expression in expressions):
        return DIGITS
    if any(expression.has(sympy.gamma, sympy.factorial, sympy.binomial) for expression in expressions):
        return DIGITS_OF_FUNCTIONS
    hidden = any(
        max(abs(found.p), found.q) > 10**8 if found.is_Rational else found.exp.is_number and abs(found.exp) > 8
        for expression in expressions
        for found in expression.atoms(sympy.Rational, sympy.Pow, sympy.exp)
    )
    return DIGITS if hidden else DIGITS_OF_FUNCTIONS


def _value(expression: sympy.Expr, point: dict, digits: int):
    """The value of a number, exact if it is rational; `sympy.nan` if it has none; `None` if sympy cannot evaluate
    it."""
    try:
        value = expression.xreplace(point).doit()
        if not value.is_Rational:
            value = sympy.N(value, digits)
        if not value.is_number:
            return sympy.nan if value.has(sympy.nan, sympy.zoo) else None
        return value if value.is_finite else sympy.nan
    except ZeroDivisionError:
        return sympy.nan
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _close(left, right, digits: int, scale=0) -> bool:
    if left.is_Rational and right.is_Rational:
        return left == right
    return bool(abs(left - right) <= sympy.Float(10, digits) ** (SLACK - digits) * max(abs(left), abs(right), scale))


def _is_real(value, digits: int) -> bool:
    return value is not sympy.nan and _close(value, sympy.re(value), digits)


def _agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions have the same values wherever the gold answer is real; `None` if they have none."""
    digits = _digits(gold, answer)
    has_symbols = bool(gold.free_symbols or answer.free_symbols)
    whole = (sympy.floor, sympy.ceiling, Gcd, Lcm)
    enough = ENOUGH_OF_RATIONAL
    if not is_rational(gold, answer):
        enough = ENOUGH_OF_WHOLE if gold.has(*whole) or answer.has(*whole) else ENOUGH
    for everywhere in dict.fromkeys((gold.has(sympy.I) or not has_symbols, True)):
        compared = 0
        for point, needed in points(gold, answer):
            if compared >= enough and not needed:
                break
            left = _value(gold, point, digits)
            if left is None:
                return None
            if left is sympy.nan or not (everywhere or _is_real(left, digits)):
                continue
            right = _value(answer, point, digits)
            if right is None:
                return None
            if right is sympy.nan or not _close(left, right, digits, scale=int(has_symbols)):
                return False
            compared += 1
        if compared:
            return True
    return None


def _same_relation(gold, answer) -> bool:
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _same_equation(gold, answer)
    kinds, differences = [], []
    for side in (gold, answer):
        if not isinstance(side, Relational) or isinstance(side, sympy.Eq):
            return False
        kinds.append((isinstance(side, sympy.Ne), isinstance(side, (sympy.GreaterThan, sympy.LessThan))))
        differences.append(side.lhs - side.rhs if isinstance(side, sympy.Ne) else side.gts - side.lts)
    ratio = _ratio(*differences)
    return kinds[0] == kinds[1] and ratio is not None and (kinds[0][0] or bool(sympy.re(ratio) > 0))


def _same_equation(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Whether one equation is a multiple of the other. If everything or nothing solves them, their sides must be the
    same."""
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if gold.free_symbols != answer.free_symbols:
        return False
    if not _is_constant(left) and not _is_constant(right):
        return _ratio(left, right) is not None
    return any(
        bool(_agree(gold.lhs, one)) and bool(_agree(gold.rhs, other))
        for one, other in ((answer.lhs, answer.rhs), (answer.rhs, answer.lhs))
    )


def _is_constant(difference: sympy.Expr) -> bool:
    """Whether an equation, brought to one side, does not depend on its symbols: it is an identity or never holds."""
    return bool(_agree(difference, difference.xreplace(dict.fromkeys(difference.free_symbols, sympy.Rational(3, 7)))))


def _ratio(gold: sympy.Expr, answer: sympy.Expr):
    """The constant by which two expressions differ, as in 2x - 4 and x - 2; `None` if there is none."""
    digits = _digits(gold, answer)
    ratios: list = []
    for point, _ in itertools.islice(points(gold, answer), ENOUGH):
        left, right = _value(gold, point, digits), _value(answer, point, digits)
        if left is None or right is None:
            return None
        if left is sympy.nan or not _is_real(left, digits):
            continue
        zeros = [right is not sympy.nan and _close(1 + side, sympy.Integer(1), digits) for side in (left, right)]
        if all(zeros):  # the point solves both
            continue
        if right is sympy.nan or any(zeros):
            return None
        ratios.append(left / right)
    if len(ratios) < 2 or not all(_close(ratio, ratios[0], digits) for ratio in ratios):
        return None
    return ratios[0]


def _approximates(text: str, value: sympy.Expr) -> bool:
    """Whether a decimal is a value, rounded to the decimal's own places, of which enough are significant."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or len(text.replace("-", "").replace(".", "").lstrip("0")) < APPROXIMATION_DIGITS:
        return False
    number = _value(value, {}, DIGITS_OF_FUNCTIONS)
    if number is None or not number.is_real or value.is_rational:
        return False
    return abs(number - sympy.Rational(text)) <= sympy.Rational(1, 2 * 10 ** len(decimal[1]))

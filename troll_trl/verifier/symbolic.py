"""
What only computer algebra can decide: whether two LaTeX expressions are equal. Runs in the worker processes.

math-verify reads the expressions. Two expressions are then compared at a few points to 40 digits, which decides nearly
all pairs in both directions; only what cannot be evaluated is left to math-verify's comparison, which is lenient: it
takes differences below 1e-15 for zero, whatever the size of the numbers.
"""

import logging
import re
from functools import lru_cache

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from troll_trl.verifier.compare import equal, is_readable

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of each timeout that it is not given

DIGITS = 40
TOLERANCE = sympy.Float(10, DIGITS) ** -25
# Decimals that round an irrational or periodic value count as equal to it from this many significant digits on
APPROXIMATION_DIGITS = 6

# Read once before the first question: the grammar is ten times slower the first time that it meets a construct
WARM_UP = (r"2\sqrt{3}", r"\frac{\pi}{2}-1", "x^2+3x-6", r"\sin(2x)", "e^{-x}", "y=2x+1", "6-5i", r"\log_{2}{3}", "5!")

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_DECIMAL = re.compile(r"-?\d*\.(\d+)")


def answer_question(question: dict) -> dict:
    """
    Decide what the fast path left open.

    Args:
        question (`dict`):
            `gold`, and `answer` if it is to be compared; both normalised.

    Returns:
        `dict`: `result`, whether the answer is equal, or, without one, whether the gold answer can be read; `error` if
        sympy failed on them.
    """
    try:
        if "answer" in question:
            return {"result": bool(equal(question["gold"], question["answer"], expressions_equal))}
        return {"result": is_readable(question["gold"], expression_is_readable)}
    except MemoryError:
        raise
    except Exception as error:  # sympy raises anything on odd input. It is counted as a crash
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def warm_up() -> None:
    """Make the first questions as fast as the later ones."""
    for expression in WARM_UP:
        expressions_equal(expression, expression + "+0")


def expression_is_readable(text: str) -> bool:
    """Whether math-verify reads this LaTeX as mathematics."""
    return read(text) is not None


@lru_cache(maxsize=1024)
def read(text: str):
    """The sympy object of a LaTeX expression; `None` if math-verify has none."""
    # Without the box math-verify would look for the mathematics in it and read a part: 2\\sqrt{3} as 2.
    found = parse(f"\\boxed{{{text}}}", extraction_config=_CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or isinstance(found[0], str):
        return None
    # math-verify takes "i" for the imaginary unit in some spellings only ("2 i", not "2i"), and a decimal for the
    # binary number next to it
    exact = {
        symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name, real=True)
        for symbol in found[0].atoms(sympy.Symbol)
    }
    exact |= {number: sympy.Rational(str(number)) for number in found[0].atoms(sympy.Float)}
    return found[0].xreplace(exact)


def expressions_equal(gold_text: str, answer_text: str) -> bool:
    """
    Whether two expressions, equations or inequalities are equal.

    Args:
        gold_text (`str`):
            LaTeX of the gold answer.
        answer_text (`str`):
            LaTeX of the answer.

    Returns:
        `bool`: `False` too if one of them cannot be read.
    """
    gold, answer = read(gold_text), read(answer_text)
    if gold is None or answer is None:
        return False
    if isinstance(gold, Relational) != isinstance(answer, Relational):
        return False
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        same = _proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    elif isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        same = _agree(gold, answer)
        if same is False and not (gold.free_symbols or answer.free_symbols):
            same = _approximates(gold_text, answer) or _approximates(answer_text, gold)
    else:
        same = None
    if same is None:
        return bool(verify(gold, answer, timeout_seconds=None))
    return same


def _points(symbols: list) -> list[dict]:
    """Values for the symbols, positive and negative, without relations among them; one point if there are none."""
    if not symbols:
        return [{}]
    primes = [sympy.prime(index + 3) for index in range(len(symbols))]
    signs = (1, 1, -1, 1)
    return [
        {
            symbol: sign ** (index + 1) * sympy.Rational(prime * (step + 2) + index, 7 + 4 * step)
            for index, (symbol, prime) in enumerate(zip(symbols, primes, strict=True))
        }
        for step, sign in enumerate(signs)
    ]


def _symbols(*expressions: sympy.Expr) -> list:
    return sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)


def _value(expression: sympy.Expr, point: dict):
    """A finite complex number; `None` if there is none at this point, or sympy finds none."""
    try:
        value = sympy.N(expression.xreplace(point).doit(), DIGITS)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return value if value.is_number and value.is_finite else None


def _agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions have the same values; `None` if too few of them can be evaluated."""
    compared = 0
    for point in _points(_symbols(gold, answer)):
        left, right = _value(gold, point), _value(answer, point)
        if left is None and right is None:
            continue
        if left is None or right is None:
            return None
        if abs(left - right) > TOLERANCE * max(abs(left), abs(right)):
            return False
        compared += 1
    return True if compared else None


def _proportional(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two equations, each brought to one side, are the same up to a constant factor."""
    ratios = []
    for point in _points(_symbols(gold, answer)):
        left, right = _value(gold, point), _value(answer, point)
        if left is None or right is None or abs(left) < TOLERANCE or abs(right) < TOLERANCE:
            return None
        ratios.append(left / right)
    if len(ratios) > 1 and all(abs(ratio - ratios[0]) <= TOLERANCE * abs(ratios[0]) for ratio in ratios):
        return True
    return None


def _approximates(text: str, value: sympy.Expr) -> bool:
    """Whether a decimal is a value, rounded to the decimal's own places, of which enough are significant."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or len(text.replace("-", "").replace(".", "").lstrip("0")) < APPROXIMATION_DIGITS:
        return False
    number = _value(value, {})
    if number is None or not number.is_real or value.is_rational:
        return False
    return abs(number - sympy.Rational(text)) <= sympy.Rational(1, 2 * 10 ** len(decimal[1]))

"""
What only computer algebra can decide: whether two LaTeX expressions are equal. Runs in the worker processes.

math-verify's parser reads the expressions. They are then compared at a few points, exactly or to forty digits or more,
which decides nearly all pairs in both directions; only what cannot be evaluated is left to math-verify's comparison,
which is lenient: it takes differences below 1e-15 for zero, whatever the size of the numbers.
"""

import logging
import re
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.relational import Relational

from troll_trl.rewards.verifier.compare import OF_AN_ANGLE, equal, is_readable

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of each timeout that it is not given

# So many that the -1 of 2^{1009}\sqrt{3}-1 is seen. Fewer for functions: the gamma function would take seconds
DIGITS, DIGITS_OF_FUNCTIONS = 1000, 40
SLACK = 15  # digits that may be lost
# Decimals that round an irrational or periodic value count as equal to it from this many significant digits on
APPROXIMATION_DIGITS = 6

# Read once before the first question: the grammar is ten times slower the first time that it meets a construct
WARM_UP = (r"2\sqrt{3}", r"\frac{\pi}{2}-1", "x^2+3x-6", r"\sin(2x)", "e^{-x}", "y=2x+1", "6-5i", r"\log_{2}{3}", "5!")

# math-verify's own parser, without two of its settings: it would take the letters of `2ab` and `\pi r h` for units and
# drop them, and read `R` as `r`.
_NORMALIZATION = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
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
    latex = normalize_latex(text, _NORMALIZATION)
    try:
        found = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=OF_AN_ANGLE.search(latex) is not None,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # the grammar raises anything on what it does not know
        return None
    # math-verify takes "i" for the imaginary unit in some spellings only ("2 i", not "2i"), and a decimal for the
    # binary number next to it
    exact = {
        symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name, real=True)
        for symbol in found.atoms(sympy.Symbol)
    }
    exact |= {number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)}
    return found.xreplace(exact)


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


def _digits(*expressions: sympy.Expr) -> int:
    return DIGITS_OF_FUNCTIONS if any(expression.has(sympy.Function) for expression in expressions) else DIGITS


def _value(expression: sympy.Expr, point: dict, digits: int):
    """A finite complex number, exact if it is rational; `None` if there is none at this point, or sympy finds none."""
    try:
        value = expression.xreplace(point).doit()
        if not value.is_Rational:
            value = sympy.N(value, digits)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return value if value.is_number and value.is_finite else None


def _close(left, right, digits: int) -> bool:
    if left.is_Rational and right.is_Rational:
        return left == right
    return bool(abs(left - right) <= sympy.Float(10, digits) ** (SLACK - digits) * max(abs(left), abs(right)))


def _agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions have the same values; `None` if too few of them can be evaluated."""
    compared, digits = 0, _digits(gold, answer)
    for point in _points(_symbols(gold, answer)):
        left, right = _value(gold, point, digits), _value(answer, point, digits)
        if left is None and right is None:
            continue
        if left is None or right is None:
            return None
        if not _close(left, right, digits):
            return False
        compared += 1
    return True if compared else None


def _proportional(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two equations, each brought to one side, are the same up to a constant factor."""
    ratios, digits = [], _digits(gold, answer)
    for point in _points(_symbols(gold, answer)):
        left, right = _value(gold, point, digits), _value(answer, point, digits)
        if left is None or right is None or any(_close(1 + side, sympy.Integer(1), digits) for side in (left, right)):
            return None
        ratios.append(left / right)
    return True if len(ratios) > 1 and all(_close(ratio, ratios[0], digits) for ratio in ratios) else None


def _approximates(text: str, value: sympy.Expr) -> bool:
    """Whether a decimal is a value, rounded to the decimal's own places, of which enough are significant."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or len(text.replace("-", "").replace(".", "").lstrip("0")) < APPROXIMATION_DIGITS:
        return False
    number = _value(value, {}, DIGITS_OF_FUNCTIONS)
    if number is None or not number.is_real or value.is_rational:
        return False
    return abs(number - sympy.Rational(text)) <= sympy.Rational(1, 2 * 10 ** len(decimal[1]))

"""The points at which two expressions are compared: different expressions differ there."""

import itertools
import random
from collections.abc import Iterator

import sympy
from mpmath.libmp import NoConvergence

from math_answers.rewards.verifier.reading import Gcd, Lcm

# Small, about one, large
_MAGNITUDES = ((1, 20), (20, 60), (60, 600), (2_000, 90_000))  # in 41sts
_INTEGERS = (17, -13, 4, -29, 8, 37, -6, 11)
# A switching point has two sides, near and far
_SIDES = (sympy.Rational(-1, 16), 0, sympy.Rational(1, 16), -7, 9)
MAX_SWITCHES = 6
MAX_TRIES = 60
# A polynomial of a higher degree is left to the other points
MAX_DEGREE = 6

_WHOLE = "ijklmnpqrKMN"  # letters that mean a whole number if it is rounded: n does, x does not
_SWITCHING = (sympy.Abs, sympy.sign)
_FAILURES = (
    ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError, sympy.PolynomialError, NoConvergence,
)  # fmt: skip


def is_rational(*expressions: sympy.Basic) -> bool:
    """Whether expressions are quotients of polynomials, which a few points tell apart."""
    return all(
        (node.is_Add or node.is_Mul or node.is_Symbol or node.is_Rational or (node.is_Pow and node.exp.is_Integer))
        for expression in expressions
        for node in sympy.preorder_traversal(expression)
    )


def points(*expressions: sympy.Basic) -> Iterator[tuple[dict, bool]]:
    """
    Values for the symbols of expressions, the same at every call: signs, magnitudes, both sides of switching points,
    irrational and whole ones. Each comes with whether it is needed, or only follows if too few of the others could be
    used.
    """
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if not symbols:
        yield {}, True
        return
    # What counts something is not negative, and the bound of a sum is whole
    bounds = _free_symbols_of((sympy.Sum, sympy.Product, Gcd, Lcm), expressions)
    rounded = _free_symbols_of((sympy.floor, sympy.ceiling), expressions)
    bounds |= {symbol for symbol in rounded if symbol.name[0] in _WHOLE}
    counts = _free_symbols_of((sympy.factorial, sympy.binomial, sympy.gamma), expressions)
    ordinary = _ordinary(symbols, counts, bounds)
    first = list(itertools.islice(ordinary, 4))
    yield from ((point, True) for point in first)
    for switch in _switches(expressions):
        yield from ((point, True) for point in _around(switch, first))
    yield from ((point, False) for point in itertools.islice(ordinary, MAX_TRIES))


def _free_symbols_of(kinds: tuple, expressions) -> set:
    return set().union(*(node.free_symbols for expression in expressions for node in expression.atoms(*kinds)))


def _ordinary(symbols: list, counts: set, bounds: set) -> Iterator[dict]:
    """
    Points without end, in cycles of eight steps. Within a step, the symbols have values of different sizes, which every
    fourth step pairs anew. A cycle gives the first three symbols every combination of signs.
    """
    generator = random.Random(len(symbols))
    for step in itertools.count():
        cycle, place = divmod(step, 8)
        point = {}
        for index, symbol in enumerate(symbols):
            low, high = _MAGNITUDES[(step + index + step // 4) % len(_MAGNITUDES)]
            value = sympy.Rational(generator.randrange(low, high), 41 + 2 * index)
            if symbol in bounds:  # every remainder, and common factors
                value = sympy.Integer(2 + (step * (1 + 4 * index) + index) % 23)
            elif place == 7:
                value = sympy.Integer(_INTEGERS[(cycle + 3 * index) % len(_INTEGERS)])
            else:
                value *= sympy.sqrt(2) if step % 6 == 4 else 1
                value *= -1 if (place >> index & 1 if index < 3 else generator.random() < 0.5) else 1
            point[symbol] = abs(value) if symbol in counts else value
        yield point


def _switches(expressions) -> list:
    """What changes its sign where an expression changes its form."""
    found: dict = {}
    for expression in expressions:
        for node in sympy.preorder_traversal(expression):
            if isinstance(node, (sympy.Max, sympy.Min)):
                found |= {left - right: None for left, right in itertools.combinations(node.args, 2)}
            elif isinstance(node, (sympy.floor, sympy.ceiling)):
                found |= {node.args[0] - whole: None for whole in (0, 1)}
            elif isinstance(node, _SWITCHING):
                found[node.args[0]] = None
            elif node.is_Pow and not node.exp.is_Integer and node.base.free_symbols:
                found[node.base] = None
    return [switch for switch in found if switch.free_symbols][:MAX_SWITCHES]


def _around(switch, bases: list[dict]) -> Iterator[dict]:
    """Points on both sides of the real zeros of a polynomial, one symbol at a time."""
    symbols = [
        symbol for symbol in sorted(switch.free_symbols, key=str) if not all(base[symbol].is_Integer for base in bases)
    ]
    for symbol, base in itertools.product(symbols[:2], bases):
        others = {other: value for other, value in base.items() if other != symbol}
        for zero in (real_roots(switch, symbol, others) or [])[:3]:
            for side in _SIDES:
                yield base | {symbol: zero + side * (1 if abs(side) < 1 else 1 + abs(zero) / 9)}


def real_roots(expression, symbol, others: dict) -> list | None:
    """Real zeros in one symbol, as rationals close to them; `None` if it is not a quotient of low polynomials in it."""
    try:
        top, bottom = sympy.fraction(sympy.together(expression.xreplace(others)))
        polynomial = sympy.Poly(top, symbol).sqf_part()  # numerical methods fail on zeros of a high order
        if polynomial.degree() < 1:
            return []
        if polynomial.degree() > MAX_DEGREE or bottom.has(sympy.Function):
            return None
        roots = [root for root in polynomial.nroots(n=30, maxsteps=200) if abs(sympy.im(root)) < 1e-9]
    except _FAILURES:
        return None
    values = sorted({sympy.Rational(str(sympy.re(root))) for root in roots})
    return [value for value in values if abs(sympy.N(bottom.subs(symbol, value))) > 1e-9]

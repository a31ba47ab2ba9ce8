r"""read(): a LaTeX expression as a sympy object, by math-verify's parser with the places mended where it misreads."""

import logging
import re
from functools import lru_cache

import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, _Latex2Sympy, normalize_latex
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

from math_answers.rewards.verifier.operations import Malformed, explicit_products
from math_answers.rewards.verifier.scalars import OF_AN_ANGLE

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of each timeout that it is not given

# math-verify's own parser, without two of its settings: it would take the letters of `2ab` and `\pi r h` for units and
# drop them, and read `R` as `r`.
_NORMALIZATION = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
# If they have an index, these letters are variables, not Euler's number or the imaginary unit
_INDEXED = re.compile(r"(?<![\\A-Za-z])([eEiI])(?=_)")
_STAND_INS = {"e": r"\Upsilon", "E": r"\Xi", "i": r"\Phi", "I": r"\Psi"}
_LOG_OF_TEN = re.compile(r"\\lg(?![A-Za-z])")
_LOG_OF_E = re.compile(r"\\log_(?:\{e\}|e(?![A-Za-z]))")


class Gcd(sympy.Function):
    """The gcd of whole numbers; sympy's own would take letters for polynomials without a common factor."""

    def doit(self, **hints):
        numbers = [number.doit(**hints) for number in self.args]
        return sympy.Integer(self.of(*numbers)) if all(number.is_Integer for number in numbers) else self.func(*numbers)

    of = staticmethod(sympy.igcd)


class Lcm(Gcd):
    """The lcm of whole numbers."""

    of = staticmethod(sympy.ilcm)


class _Parser(_Latex2Sympy):
    def handle_gcd_lcm(self, f, args):
        return (Gcd if f == "gcd" else Lcm)(*args)


class _FastParser(_Parser):
    """Parses without the context of a rule, in a seventh of the time: the same tree (Parr et al., 2014), or none."""

    def create_parser(self, latex_str):
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


def _parse(latex: str):
    arguments = (None, not should_treat_as_complex(latex), OF_AN_ANGLE.search(latex) is not None, _CONVERSION)
    try:
        return _FastParser(*arguments).parse(latex)
    except MemoryError:
        raise
    except Exception:  # as below
        return _Parser(*arguments).parse(latex)


@lru_cache(maxsize=1024)
def read(text: str):
    """A normalised expression as a sympy object with real symbols and exact numbers; `None` if it cannot be read."""
    try:
        latex = explicit_products(text)
    except Malformed:
        return None
    latex = _LOG_OF_TEN.sub(r"\\log_{10}", _LOG_OF_E.sub(r"\\ln ", latex))
    latex = latex.replace(r"\odot", "o")  # M_\odot, the mass of the sun
    latex = _INDEXED.sub(lambda letter: _STAND_INS[letter[1]], latex)
    latex = normalize_latex(latex, _NORMALIZATION)
    try:
        found = _parse(latex)
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
    # f(2) and dy/dx stand for themselves
    exact |= {node: sympy.Symbol(str(node), real=True) for node in found.atoms(AppliedUndef, sympy.Derivative)}
    if isinstance(found, Relational):  # evaluated, x^2 = -1 would be the same as any other that never holds
        sides = [_with_real_roots(side.xreplace(exact)) for side in (found.lhs, found.rhs)]
        return found.func(*sides, evaluate=False)
    found = found.xreplace(exact)
    if isinstance(found, BooleanAtom):
        return None
    return found if found.has(sympy.I) else _with_real_roots(found)


def _with_real_roots(found):
    """With powers of an odd denominator as real roots; sympy takes them in the complex plane. (-8)^{1/3} is -2."""
    if not any(map(_is_odd_root, found.atoms(sympy.Pow))):
        return found
    return found.replace(
        _is_odd_root, lambda root: sympy.sign(root.base) ** (root.exp.p % 2) * sympy.Abs(root.base) ** root.exp
    )


def _is_odd_root(found) -> bool:
    if not isinstance(found, sympy.Pow) or not found.exp.is_Rational or found.base.is_nonnegative:
        return False
    return found.exp.q > 1 and found.exp.q % 2 == 1

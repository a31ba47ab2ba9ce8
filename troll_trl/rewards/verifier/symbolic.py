"""answer(): math-verify on two expressions. Only worker processes import this."""

import logging
import re
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from troll_trl.rewards.verifier.equal import equal

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# For the parser of `math_verify.parse`. `parse` itself takes the letters of `2ab` for units, `R` for `r` and "a = b"
# for "b"
_NORMALIZATION = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
# Read as something else otherwise: 2(5), 1,000\pi, 2i
_PRODUCT = re.compile(r"(?<=[\d)])(?<!_\d)\s*\(")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")


def answer(question: dict) -> bool:
    """Apply the rules again, with algebra if they need it."""
    return equal(question["gold"], question["answer"], _same)


def _same(gold: str, answer: str) -> bool:
    sides = [_read(text) for text in (gold, answer)]
    return None not in sides and verify(*sides, allow_set_relation_comp=True, timeout_seconds=None)


@lru_cache(maxsize=1024)
def _read(text: str):
    latex = _IMAGINARY.sub(" i", _THOUSANDS.sub("", _PRODUCT.sub(r"\\cdot (", text)))
    try:
        return latex2sympy(latex, None, not should_treat_as_complex(latex), False, _NORMALIZATION, _CONVERSION)
    except MemoryError:
        raise
    except Exception:  # the grammar may raise any exception
        return None

"""Numbers as people write them: fractions, percent, currency, units, thousands, powers of ten, bases."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from math_answers.rewards.verifier.units import Unit, canonical_unit, read_unit, scale_ratio

# Longer exponents and numerals are left to computer algebra, in a process that may be killed
MAX_EXPONENT = 400
# Decimals that round a periodic value count as equal to it from this many significant digits on
APPROXIMATION_DIGITS = 6
# Two decimals that differ in length may be the same value if they have at least this number of digits
LONG_DECIMAL_DIGITS = 8

_NUMERAL = r"(?:(?!0[,\d])\d{1,3}(?:[, ]\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?{_NUMERAL}"
_POWER_OF_TEN = r"10\^(?:\{(?P<power>[+-]?\d{1,4})\}|(?P<power2>[+-]?\d{1,4}))"
_QUANTITY = re.compile(
    rf"(?P<sign>[+-]?)(?P<currency>[$€£¥₹]?)\s?(?P<sign2>[+-]?)"
    rf"(?:(?P<whole>\d{{1,9}})\s?(?:\\frac\{{(?P<top>\d+)\}}\{{(?P<bottom>\d+)\}}|(?<=\s)(?P<top2>\d+)/(?P<bottom2>\d+))"
    rf"|\\frac\{{(?P<numerator>{_SIGNED})\}}\{{(?P<denominator>{_SIGNED})\}}"
    rf"|(?P<numerator2>{_NUMERAL})/(?P<denominator2>{_NUMERAL})"
    r"|(?P<fixed>\d*\.\d{0,20})\\overline\{(?P<period>\d{1,20})\}"
    rf"|(?:(?P<mantissa>{_NUMERAL})\s?(?:\\times|\\cdot|x)\s?)?{_POWER_OF_TEN}"
    rf"|(?P<number>{_NUMERAL})(?:[eE](?P<exponent>[+-]?\d{{1,4}}))?(?:_(?:\{{(?P<base>\d+)\}}|(?P<base2>\d+)))?)"
    r"(?P<unit>(?![\d.])(?:\W.*|[A-Za-z].*|_.*)?)",
    re.DOTALL | re.ASCII,
)
_FRACTION_PARTS = ("numerator", "denominator", "numerator2", "denominator2")


@dataclass(frozen=True)
class Quantity:
    """A number with what is around it. The value is exact. If there is a percent sign or a base, it is the value of the
    digits alone."""

    value: Fraction
    percent: bool = False
    unit: str | None = None  # canonical, if it is known
    words: frozenset[str] = frozenset()
    base: str | None = None
    digits: int | None = None  # significant ones of a decimal
    places: int = 0  # decimal places
    numeral: str | None = None  # sign and digits of an integer or a decimal
    worked_out: bool = True  # not a fraction of decimals, or 10^2


@lru_cache(maxsize=1024)
def read_quantity(text: str) -> Quantity | None:
    """A normalised answer as a number; `None` for anything that is not one number."""
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    value = _value(match)
    if value is None:
        return None
    is_product = match["numerator"] or match["top"]  # \frac{1}{2} m may be one
    unit = read_unit(match["unit"].lstrip() if is_product else match["unit"], scientific=match["mantissa"] is not None)
    if unit is None:
        return None
    negative = "-" in (match["sign"], match["sign2"])
    if base := match["base"] or match["base2"]:
        return None if match["unit"] else Quantity(-value if negative else value, base=base)
    number = (match["number"] or "").replace(",", "").replace(" ", "")
    is_decimal = "." in number and match["exponent"] is None
    of_decimals = any("." in part for part in match.group(*_FRACTION_PARTS) if part)
    power = match["power"] or match["power2"]
    is_plain = bool(number) and unit.factor == 1 and not unit.percent and match["exponent"] is None
    return Quantity(
        (-value if negative else value) * unit.factor,
        unit.percent,
        (canonical_unit(match["currency"]) if match["currency"] else None) or unit.name,
        unit.words,
        digits=len(number.replace(".", "").lstrip("0")) if is_decimal else None,
        places=len(number.partition(".")[2]) if is_decimal else 0,
        numeral=("-" if negative else "") + number if is_plain else None,
        worked_out=not of_decimals and (match["mantissa"] is not None or power not in ("0", "1", "2", "+1", "+2")),
    )


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """
    Whether two numbers are the same answer. A unit or a percent sign may be left out (`50` or `0.5` for 50 %); units or
    words of both must agree. A base must not be added, unless it is ten, but may be left out.
    """
    ratio = scale_ratio(answer.unit, gold.unit)
    if ratio is not None and ratio != 1:
        return answer.value * ratio == gold.value and not answer.percent
    if answer.base is not None and answer.base != (gold.base or "10"):
        return False
    if Unit(answer.unit, words=answer.words).contradicts(Unit(gold.unit, words=gold.words)):
        return False
    if answer.percent and answer.words and not gold.words:  # 12% off
        return False
    if _same_value(gold, gold.value, answer, answer.value):
        return True
    if gold.percent != answer.percent:
        left, right = (side.value / 100 if side.percent else side.value for side in (gold, answer))
        return _same_value(gold, left, answer, right)
    return False


def _same_value(gold: Quantity, left: Fraction, answer: Quantity, right: Fraction) -> bool:
    if left == right or _rounds_to(answer, right, left) or _rounds_to(gold, left, right):
        return True
    # One long decimal is the other, rounded to fewer places
    is_long = min(gold.digits or 0, answer.digits or 0) >= LONG_DECIMAL_DIGITS and gold.places != answer.places
    return is_long and abs(left - right) <= Fraction(1, 2 * 10 ** min(gold.places, answer.places))


def _rounds_to(decimal: Quantity, rounded: Fraction, value: Fraction) -> bool:
    """Whether a decimal is the rounding of a value that no decimal equals, such as 1/3."""
    if decimal.digits is None or decimal.digits < APPROXIMATION_DIGITS:
        return False
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator > 1 and abs(rounded - value) <= Fraction(1, 2 * 10**decimal.places)


def _value(match: re.Match) -> Fraction | None:
    try:
        if match["whole"]:
            part = Fraction(int(match["top"] or match["top2"]), int(match["bottom"] or match["bottom2"]))
            return int(match["whole"]) + part if part < 1 else None  # 3\frac{5}{2} is a product
        if match["period"]:  # 0.1\overline{6}
            fixed, period = match["fixed"], match["period"]
            scale = 10 ** len(fixed.partition(".")[2])
            return Fraction(f"0{fixed}0") + Fraction(int(period), scale * (10 ** len(period) - 1))
        top, bottom = match["numerator"] or match["numerator2"], match["denominator"] or match["denominator2"]
        if top:
            return _decimal(top) / _decimal(bottom)
        if match["number"]:
            mantissa, exponent = match["number"], match["exponent"] or "0"
        else:
            mantissa, exponent = match["mantissa"] or "1", match["power"] or match["power2"]
        if abs(int(exponent)) > MAX_EXPONENT:
            return None
        return _decimal(mantissa) * Fraction(10) ** int(exponent)
    except ZeroDivisionError:
        return None


def _decimal(numeral: str) -> Fraction:
    return Fraction(numeral.replace(",", "").replace(" ", ""))

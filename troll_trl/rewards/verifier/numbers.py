"""read_number(): exact numbers as people write them: thousands, fractions, percent, powers of ten, bases, units."""

import math
import re
from fractions import Fraction
from typing import NamedTuple

from troll_trl.rewards.verifier.units import agree, read_unit

MAX_DIGITS = 1000
# A decimal with this many places, and as many digits after its leading zeros, is a rounding
ROUNDED_DIGITS = 8

_NUMERAL = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""
    [$£€]?\s? (?P<sign>[+-]?) \s?[$£€]?\s?
    (?: 10\^(?:(?P<ten>\d)(?!\d) | \{{(?P<tens>-?\d{{1,3}})\}})               # 10^3
      | (?: (?P<whole>\d{{1,9}})\s(?=\d+/) )?                                 # 1 3/4
        (?P<top>{_NUMERAL}) (?: \s?/\s? (?P<bottom>{_NUMERAL}) )?
        (?: \s?(?:\\times|\\cdot|x)\s?10\^\{{?(?P<power>[+-]?\d{{1,3}})\}}?   # 1.2 \times 10^3
          | [eE](?P<exponent>[+-]?\d{{1,3}}) )?
    )
    (?: _\{{?(?P<base>\w+)\}}? )?
    (?: \s?(?P<percent>%) )?
    (?: \s?(?:\\text\{{\s?)?(?P<magnitude>hundred|thousand|million|billion|trillion)\b\}}? )?
    (?P<unit>.*)
    """,
    re.ASCII | re.VERBOSE | re.DOTALL,
)
_FRACTION = re.compile(rf"(?<![\w}}])([+-]?\s?\d*)\s?\\frac\{{(-?{_NUMERAL})\}}\{{({_NUMERAL})\}}")
_SIGNED_BRACES = re.compile(r"([+-])\{(.*)\}", re.DOTALL)  # -{5}, of -\boxed{5}
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_CURRENCIES = {"$": "dollar", "£": "sterling", "€": "euro"}
_MAGNITUDES = {None: 0, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


class Number(NamedTuple):
    """An exact number. `is_divided` tells 6/2 from 3; `decimals` are the places of a plain decimal, else 0."""

    value: Fraction
    decimals: int
    is_divided: bool
    is_percent: bool
    base: str | None
    unit: frozenset[str]


def read_number(text: str) -> Number | None:
    """Read a normalised answer as an exact number; `None` for anything that is not exactly one number."""
    if len(text) > MAX_DIGITS:
        return None
    if signed := _SIGNED_BRACES.fullmatch(text):
        text = signed[1] + signed[2]
    match = _NUMBER.fullmatch(_FRACTION.sub(_with_slash, _REPEATING.sub(_as_fraction, text)))
    unit = read_unit(match["unit"]) if match else None
    if match is None or unit is None:
        return None
    if match["top"] is None:
        value = Fraction(10) ** int(match["ten"] or match["tens"])
    else:
        ratio = _ratio(match["whole"], match["top"], match["bottom"])
        if ratio is None:
            return None
        value = ratio * Fraction(10) ** int(match["power"] or match["exponent"] or 0)
    value *= 10 ** _MAGNITUDES[match["magnitude"]]
    is_plain = not any(map(match.group, ("bottom", "power", "exponent", "percent", "magnitude")))
    return Number(
        value=-value if match["sign"] == "-" else value,
        decimals=len((match["top"] or "").partition(".")[2]) if is_plain else 0,
        is_divided=match["bottom"] is not None and match["whole"] is None,
        is_percent=match["percent"] is not None,
        base=None if match["base"] == "10" else match["base"],
        unit=unit | {name for sign, name in _CURRENCIES.items() if sign in text},
    )


def same_number(gold: Number, answer: Number) -> bool:
    """
    Compare exactly. An answer may leave out a unit, a base or a percent sign (50 % is 50 or 0.5). It may not add a
    base, name a unit that contradicts, or leave a division to be done: 6/2 does not count as 3.
    """
    if answer.base not in (None, gold.base) or not agree(gold.unit, answer.unit):
        return False
    if answer.is_divided and not gold.is_divided and answer.value.denominator == 1:
        return False
    if gold.value == answer.value or _is_rounding(gold, answer):
        return True
    in_percent, other = (gold, answer) if gold.is_percent else (answer, gold)
    return in_percent.is_percent and not other.is_percent and in_percent.value == 100 * other.value


def _is_rounding(gold: Number, answer: Number) -> bool:
    """Tell whether one decimal of many digits is the other, rounded or cut: 5.333333333 is 5.3333333333. An answer of
    more digits than the gold answer must round a fraction: 5.3333333337 does not."""
    short, long = sorted((gold, answer), key=lambda number: number.decimals)
    digits = abs(short.value) * 10**short.decimals
    if short.decimals < ROUNDED_DIGITS or digits < 10 ** (ROUNDED_DIGITS - 1) or short.value * long.value < 0:
        return False
    return _rounds(long.value, short) and (short is answer or _rounds(long.value.limit_denominator(1000), long))


def _rounds(exact: Fraction, decimal: Number) -> bool:
    exact, digits = abs(exact) * 10**decimal.decimals, abs(decimal.value) * 10**decimal.decimals
    return digits in (math.floor(exact), math.floor(exact + Fraction(1, 2)))


def _ratio(whole: str | None, top: str, bottom: str | None) -> Fraction | None:
    """Return the value of `whole top/bottom`; `None` for a ratio of decimals, which is left to be worked out, and for a
    division by zero."""
    numerator, denominator = (Fraction(re.sub("[, ]", "", part or "1")) for part in (top, bottom))
    if denominator == 0 or (bottom and "." in top + bottom):
        return None
    if whole is None:
        return numerator / denominator
    return int(whole) + numerator / denominator if numerator < denominator else None  # 3 5/2 is no mixed number


def _as_fraction(match: re.Match) -> str:
    r"""Return `1/6` for `0.1\overline{6}`."""
    whole, fixed, repeated = match.groups()
    scale, nines = 10 ** len(fixed), 10 ** len(repeated) - 1
    return f"{int(whole + fixed or '0') * nines + int(repeated)}/{scale * nines}"


def _with_slash(match: re.Match) -> str:
    r"""Return `1 3/4` for `1\frac{3}{4}`."""
    whole, top, bottom = match[1].strip(), match[2], match[3]
    if top.startswith("-"):
        return match[0] if whole else f"-{top[1:]}/{bottom}"
    return f"{whole}{' ' if whole[-1:].isdigit() else ''}{top}/{bottom}"

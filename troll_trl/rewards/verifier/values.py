"""Numbers as people write them: fractions, percent, currency, units, thousands, powers of ten, bases."""

import re
from dataclasses import dataclass
from fractions import Fraction

# Longer exponents and numerals are left to computer algebra, in a process that may be killed
MAX_EXPONENT = 400
# Decimals that round a periodic value count as equal to it from this many significant digits on
APPROXIMATION_DIGITS = 6

_NUMERAL = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
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
_MAGNITUDES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "ms": "millisecond", "s": "sec second",
    "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr", "mg": "milligram",
    "g": "gram gm", "kg": "kilogram", "lb": "lbs pound", "oz": "ounce", "ton": "tonne", "ml": "mL milliliter",
    "L": "l liter litre", "gal": "gallon", "$": "dollar USD usd buck", "cent": "", "€": "euro", "£": "", "¥": "yen",
    "₹": "rupee", "deg": "degree", "rad": "radian", "mph": "", "N": "newton", "J": "joule", "W": "watt", "V": "volt",
    "A": "ampere amp", "K": "kelvin", "Hz": "hertz", "Pa": "pascal", "eV": "", "C": "celsius", "F": "fahrenheit",
    "mol": "mole", "nm": "nanometer nanometre", "kJ": "kilojoule", "kW": "kilowatt", "MeV": "", "GeV": "", "T": "tesla",
    "kpc": "kiloparsec", "pc": "parsec", "AU": "", "Gyr": "", "Myr": "", "erg": "", "dyne": "", "Å": "angstrom",
}  # fmt: skip
_UNIT_NAMES = {
    variant: unit
    for unit, names in _UNITS.items()
    for name in (unit, *names.split())
    for variant in ({name, f"{name}s", name.capitalize(), f"{name.capitalize()}s"} if len(name) > 2 else {name})
}
_UNIT_TOKEN = re.compile(r"[A-Za-z]+|\$|\^\{?(-?\d)\}?|/|\\cdot|\\circ|[()^{}.\s-]|\S")
# What changes the value, or continues it, is no unit
_CONTINUING = """
    and or plus minus times over half halves third thirds quarter quarters tenth tenths hundredth hundredths squared pi
    i e sqrt factorial mod modulo not but if when where hundreds thousands millions billions trillions dozens
    one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty ninety zero more less least most maybe perhaps possibly
    between below above through until wrong incorrect vs versus
"""
_NOT_UNITS = frozenset(_CONTINUING.split()) | frozenset(_MAGNITUDES)
_PLAIN_UNIT = re.compile(r"\b(?:(?:sq|square|cu|cubic)\.? )?units?\b(?:\s?\^\{?\d\}?)?")
_TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")


@dataclass(frozen=True)
class Quantity:
    """
    A number with what stands around it.

    Args:
        value (`Fraction`):
            Exact value; that of the digits where there is a percent sign or a base.
        percent (`bool`):
            Whether a percent sign follows.
        unit (`str`, *optional*):
            Canonical unit; `None` without one and for one that is not known, such as "apples".
        base (`str`, *optional*):
            Base that the digits are in, as written behind them.
        digits (`int`, *optional*):
            Significant digits of a decimal; `None` for a value that is exact, such as a fraction.
        places (`int`):
            Decimal places of a decimal.
        numeral (`str`, *optional*):
            The sign and the digits of an integer or a decimal, `None` for anything else.
    """

    value: Fraction
    percent: bool = False
    unit: str | None = None
    base: str | None = None
    digits: int | None = None
    places: int = 0
    numeral: str | None = None


def read_quantity(text: str) -> Quantity | None:
    """
    Read a normalised answer as a number.

    Args:
        text (`str`):
            As [`~troll_trl.rewards.verifier.spelling.normalise`] returns it.

    Returns:
        `Quantity` or `None`: `None` for anything that is not one number.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    value = _value(match)
    if value is None:
        return None
    unit = read_unit(match["unit"])
    if unit is None:
        return None
    name, factor, percent = unit
    if match["base"] or match["base2"]:
        return Quantity(value, base=match["base"] or match["base2"]) if not match["unit"] else None
    number = (match["number"] or "").replace(",", "").replace(" ", "")
    is_decimal = "." in number and match["exponent"] is None
    negative = "-" in (match["sign"], match["sign2"])
    is_plain = bool(number) and factor == 1 and not percent and match["exponent"] is None
    return Quantity(
        (-value if negative else value) * factor,
        percent,
        canonical_unit(match["currency"]) or name,
        digits=len(number.replace(".", "").lstrip("0")) if is_decimal else None,
        places=len(number.partition(".")[2]) if is_decimal else 0,
        numeral=("-" if negative else "") + number if is_plain else None,
    )


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """
    Whether two numbers are the same answer.

    A unit may be left out, and so may a percent sign (`50` or `0.5` for 50 %); units that are both known must be the
    same. A base must not be added (`4210_5` is not 4210), but may be left out: the problem asks for it.

    Args:
        gold (`Quantity`):
            Gold answer.
        answer (`Quantity`):
            Answer of a completion.

    Returns:
        `bool`: whether they are.
    """
    if answer.base is not None and answer.base != gold.base:
        return False
    if gold.unit is not None and answer.unit is not None and gold.unit != answer.unit:
        return False
    if _same_value(gold, gold.value, answer, answer.value):
        return True
    if gold.percent != answer.percent:
        left, right = (side.value / 100 if side.percent else side.value for side in (gold, answer))
        return _same_value(gold, left, answer, right)
    return False


def _same_value(gold: Quantity, left: Fraction, answer: Quantity, right: Fraction) -> bool:
    if left == right:
        return True
    return _rounds_to(answer, right, left) or _rounds_to(gold, left, right)


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


def read_unit(text: str) -> tuple[str | None, int, bool] | None:
    """
    Read what stands behind a number.

    Args:
        text (`str`):
            Normalised, text commands included.

    Returns:
        `tuple[str | None, int, bool]` or `None`: canonical unit if it is known, factor of a word of magnitude, and
        whether it is percent; `None` for what is no unit.
    """
    apart = text.startswith((" ", "\\text"))  # 12 m, not the product 12m
    text = _PLAIN_UNIT.sub("", _TEXT.sub(r" \1 ", text)).strip()
    if not text:
        return None, 1, False
    if text in ("%", "percent", "percents", "pct", "% percent"):
        return None, 1, True
    factor = 1
    first, _, rest = text.partition(" ")
    magnitude = _MAGNITUDES.get(first.lower().removesuffix("s"))
    if magnitude is not None:
        factor, text = magnitude, rest.strip()
        if not text:
            return None, factor, False
    name = canonical_unit(text, lone_letters=apart)
    if name is not None:
        return name, factor, False
    # "apples", "dollars per hour": unknown words, of which a few may follow
    words = text.replace("-", " ").split()
    if not apart or len(words) > 5 or not all(re.fullmatch(r"[A-Za-z]{2,}[.]?", word) for word in words):
        return None
    if any(word.lower() in _NOT_UNITS for word in words) or not any(len(word) > 2 for word in words):
        return None
    return None, factor, False


def canonical_unit(text: str, lone_letters: bool = True) -> str | None:
    """
    One name for a unit, such as `cm^2` for `square centimeters` and `m^1 s^-1` for `m/s`.

    Args:
        text (`str`):
            Unit without the number and without text commands.
        lone_letters (`bool`, *optional*, defaults to `True`):
            Whether `m` is a metre rather than a variable.

    Returns:
        `str` or `None`: `None` if a part of it is not known.
    """
    powers: dict[str, int] = {}
    last, sign, next_power = "", 1, 1
    for token in _UNIT_TOKEN.finditer(text):
        word = token[0]
        lower = word.lower()
        if word in _UNIT_NAMES and (lone_letters or len(word) > 1 or not word.isalpha()):
            last = _UNIT_NAMES[word]
            powers[last] = powers.get(last, 0) + sign * next_power
            next_power = 1
        elif lower in ("square", "sq", "cubic", "cu"):
            next_power = 3 if lower.startswith("cu") else 2
        elif (lower in ("squared", "cubed") or token[1]) and last:
            power = int(token[1] or (3 if lower == "cubed" else 2))
            powers[last] += sign * (power - 1)
        elif word in ("/", "per"):
            sign = -1
        elif word == r"\circ":
            last = "deg"
            powers[last] = 1
        elif lower != r"\cdot" and word not in " .-(){}^":
            return None
    return " ".join(f"{unit}^{power}" for unit, power in sorted(powers.items())) or None

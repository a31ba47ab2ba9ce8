"""Units and words of magnitude after a number."""

import re
from fractions import Fraction
from typing import NamedTuple

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
    "Ω": "ohm", "μm": "micrometer micrometre micron um", "μs": "microsecond us", "μg": "microgram ug",
    "kpc": "kiloparsec", "pc": "parsec", "AU": "", "erg": "", "Å": "angstrom",
}  # fmt: skip
_UNIT_NAMES = {
    variant: unit
    for unit, names in _UNITS.items()
    for name in (unit, *names.split())
    for variant in ({name, f"{name}s", name.capitalize(), f"{name.capitalize()}s"} if len(name) > 2 else {name})
}
_UNIT_FRACTION = re.compile(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}")
_UNIT_TOKEN = re.compile(r"[A-Za-zΩμ]+|\$|\^\{?(-?\d)\}?|/|\\cdot|\\circ|[()^{}.\s-]|\S")
# Each unit in another of its row, exactly. Not here, since they depend on the country: tons, gallons, ounces of a fluid
_SCALES = {
    "s": "μs 1/1000000 ms 1/1000 s 1 min 60 h 3600 day 86400 week 604800",
    "month": "month 1 year 12",
    "m": "nm 1/1000000000 μm 1/1000000 mm 1/1000 cm 1/100 m 1 km 1000",
    "ft": "in 1/12 ft 1 yd 3 mi 5280",
    "lb": "oz 1/16 lb 1",
    "g": "μg 1/1000000 mg 1/1000 g 1 kg 1000",
    "L": "ml 1/1000 L 1",
    "J": "J 1 kJ 1000",
    "W": "W 1 kW 1000",
    "eV": "eV 1 MeV 1000000 GeV 1000000000",
    "$": "cent 1/100 $ 1",
}
_SCALE_OF = {
    unit: (base, Fraction(factor))
    for base, row in _SCALES.items()
    for unit, factor in zip(row.split()[::2], row.split()[1::2], strict=True)
}
# What changes the value, continues it or takes it back is no unit
_CONTINUING = """
    and or plus minus over half halves thirds quarters fourths fifths sixths sevenths eighths ninths squared cubed pi
    i e sqrt factorial mod modulo not but if when where unless except excluding without ignoring
    hundreds thousands dozens tens zero zeros nil naught nought
    less least most bound between through until versus vs than rather instead nor etc infinity infinite
    maybe perhaps possibly probably wrong incorrect false never unknown undefined
    double doubled twice triple tripled thrice halved divided multiplied choose power powers itself
    root log exp negative negated opposite inverse reciprocal complement conjugate transpose
    remainder percent percents permille ppm ppb basis recurring repeating imaginary
    gross score scores couple myriad lakh lakhs crore crores kilo mega milli micro nano googol binary octal hex
    hexadecimal base mille ths
"""
# "seven", "twenties", "zillion"; "tenths", "thousandth", "nths"; "threefold", "quadrupled"
_COUNT_WORD = re.compile(
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ies)|[a-z]*illion)s?"
    r"|(?:ten|eleven|twelf|\w*teen|\w*tie|hundred|thousand|\w*illion|dozen|n|k)ths?|[a-z]*(?:fold|[dtncxr]uple[ds]?)",
    re.IGNORECASE,
)
# These are, unless they end it: "third graders", "grand pianos", "more apples", but not "2 thirds" nor "5 grand"
_ADJECTIVE_WORDS = "first second third fourth fifth sixth seventh eighth ninth tenth quarter prime grand more fewer"
_ADJECTIVES = frozenset(_ADJECTIVE_WORDS.split())
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,8}")
# Numerals, and what makes another value of one, as 的 does in 的倒数
_CJK_CHANGING = frozenset(
    "一二三四五六七八九十百千万亿半分之倍个点零两双打约或和与至到不多少余加减乘除以平方立次根的の반역제反逆负無无非"
)
_CJK_MAGNITUDES = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8, "千": 10**3, "百": 10**2}
_NOT_UNITS = frozenset(_CONTINUING.split()) | frozenset(_MAGNITUDES)
_TEMPERATURE = re.compile(r"\s?\^\\circ\s?(?:\\text\{\s?)?([CF])(?![A-Za-z])\s?\}?")
_SMALL = frozenset(["of", "per", "in", "on", "at", "to", "the", "each", "for", "by", "more", "total", "are", "is"])
_PERCENT = re.compile(r"(?:% percent|%|(?:percents?|pct)(?![A-Za-z]))\s*")
_IN_BRACKETS = re.compile(r"\s?\(((?:[A-Za-z]{2,}[ /.]?){1,5}(?:\^\{?\d\}?)?)\)\s?")
_PLAIN_UNIT = re.compile(r"\b(?:(?:sq|square|cu|cubic)\.? )?units?\b(?:\s?\^\{?\d\}?)?")
_TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")


class Unit(NamedTuple):
    """What follows a number: its canonical name, a factor in words, a percent sign, other words such as "apples"."""

    name: str | None = None
    factor: int = 1
    percent: bool = False
    words: frozenset[str] = frozenset()

    def contradicts(self, gold: "Unit") -> bool:
        """Whether each has a unit or words that the other lacks: `10% gain` and `10% loss`."""
        if self.name is not None and gold.name is not None and self.name != gold.name:
            return True
        return bool(self.words - gold.words and gold.words - self.words)


def scale_ratio(one: str | None, other: str | None) -> Fraction | None:
    """How many of another unit one is, exactly: 60 for h and min, 5/18 for km/h and m/s; `None` if they measure
    different things."""
    if one is None or other is None:
        return None
    (bases, scale), (other_bases, other_scale) = _in_bases(one), _in_bases(other)
    return scale / other_scale if bases == other_bases else None


def _in_bases(unit: str) -> tuple[dict[str, int], Fraction]:
    """A canonical unit as powers of the bases of its rows, and its factor: km^1 h^-1 is 5/18 of m^1 s^-1."""
    powers: dict[str, int] = {}
    scale = Fraction(1)
    for part in unit.split():
        name, power = part.split("^")
        base, factor = _SCALE_OF.get(name, (name, Fraction(1)))
        powers[base] = powers.get(base, 0) + int(power)
        scale *= factor ** int(power)
    return powers, scale


def read_unit(text: str, scientific: bool = False) -> Unit | None:
    """
    What follows a number, normalised, text commands included; `None` for anything but a unit. After a power of ten
    (`scientific`), m/s written as a fraction is one, though it could be a quotient of variables elsewhere.
    """
    if not text:
        return Unit()
    text = _TEMPERATURE.sub(lambda sign: " celsius" if sign[1] == "C" else " fahrenheit", text)
    # 12 m, not the product 12m
    apart = text.startswith((" ", "\\text", "\\frac{\\text")) or (scientific and text.startswith("\\frac"))
    named = _IN_BRACKETS.fullmatch(_TEXT.sub(r"\1", text))  # 9 (apples)
    if named:
        apart, text = True, named[1]
    text = _UNIT_FRACTION.sub(r"\1/\2", text)
    text = text.replace(r"\Omega", "Ω").replace(r"\mu", "μ")
    text = re.sub(r"μ\s*\\text\{\s*", r"\\text{μ", text) if "μ" in text else text
    text = re.sub(r"μ\s+(?=[A-Za-z])", "μ", text)
    text = _PLAIN_UNIT.sub("", _TEXT.sub(r" \1 ", text)).strip()
    percent = _PERCENT.match(text)
    if percent:
        words = _words_of(text[percent.end() :])
        return None if words is None else Unit(percent=True, words=words)
    factor = 1
    first, _, rest = text.partition(" ")
    magnitude = _MAGNITUDES.get(first.lower().removesuffix("s"))
    if magnitude is not None:
        factor, text = magnitude, rest.strip()
    if not text:
        return Unit(factor=factor)
    if not text.isascii() and text[:1] not in "Ωμ€£¥₹Å":
        return _read_cjk(text, factor)
    name = canonical_unit(text, lone_letters=apart)
    if name is not None:
        return Unit(name, factor)
    # "km north", "apples", "dollars per hour": a few unknown words may follow
    first, _, rest = text.partition(" ")
    name = canonical_unit(first, lone_letters=apart) if rest and len(first) < 9 else None
    words = _words_of(rest if name else text) if apart else None
    return None if words is None else Unit(name, factor, words=words)


def _words_of(text: str) -> frozenset[str] | None:
    """Up to five words in the singular that may follow a number; `None` if one of them changes it."""
    words = re.sub(r"(?:^|(?<=[a-z]) )a (?=[a-z])", " ", text.replace("-", " ")).lower().split()
    if not words:
        return frozenset()
    if len(words) > 5 or not all(re.fullmatch(r"[a-z]{2,}[.]?", word) for word in words):
        return None
    whole = [word.rstrip(".") for word in words]  # of an abbreviation
    if words[-1] in _ADJECTIVES or any(word in _NOT_UNITS or _COUNT_WORD.fullmatch(word) for word in whole):
        return None
    if not any(len(word) > 2 for word in words):
        return None
    return frozenset(re.sub(r"(?<=[a-z]{3})(?:e?s|e?d)?\.?\Z", "", word) for word in words if word not in _SMALL)


def _read_cjk(text: str, factor: int) -> Unit | None:
    """A counter or unit such as 个 or 米, which may follow 万 (ten thousand)."""
    magnitude = _CJK_MAGNITUDES.get(text[:1])
    if magnitude is not None:
        factor, text = factor * magnitude, text[1:]
    text = re.sub(r"\A(?:个|[平立]方(?=[厘分毫千公]?[米里]))", "", text)
    if not text:
        return Unit(factor=factor)
    return Unit(factor=factor) if _CJK.fullmatch(text) and not _CJK_CHANGING & set(text) else None


def canonical_unit(text: str, lone_letters: bool = True) -> str | None:
    """
    One name for a unit without text commands, such as `m^1 s^-1` for `m/s`; `None` if a part of it is not known.
    `lone_letters` says whether a first `m` is a metre rather than a variable.
    """
    powers: dict[str, int] = {}
    last, sign, next_power = "", 1, 1
    for token in _UNIT_TOKEN.finditer(text):
        word = token[0]
        lower = word.lower()
        if word in _UNIT_NAMES and (lone_letters or powers or len(word) > 1 or not word.isalpha() or word == "Ω"):
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

"""Units and words of magnitude behind a number."""

import re

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
    "μF": "microfarad uF", "μC": "microcoulomb uC", "μA": "microampere uA",
    "kpc": "kiloparsec", "pc": "parsec", "AU": "", "Gyr": "", "Myr": "", "erg": "", "dyne": "", "Å": "angstrom",
}  # fmt: skip
_UNIT_NAMES = {
    variant: unit
    for unit, names in _UNITS.items()
    for name in (unit, *names.split())
    for variant in ({name, f"{name}s", name.capitalize(), f"{name.capitalize()}s"} if len(name) > 2 else {name})
}
_UNIT_TOKEN = re.compile(r"[A-Za-zΩμ]+|\$|\^\{?(-?\d)\}?|/|\\cdot|\\circ|[()^{}.\s-]|\S")
# What changes the value, continues it or takes it back is no unit
_CONTINUING = """
    and or plus minus over half halves thirds quarters fourths fifths sixths sevenths eighths ninths squared cubed pi
    i e sqrt factorial mod modulo not but if when where unless except excluding without ignoring
    hundreds thousands dozens tens zero zeros nil naught nought
    less least most bound upwards ish
    between below above through until versus vs than rather instead xor nor nand etc counting infinity infinite
    maybe perhaps possibly probably likely surely wrong incorrect false never unknown undefined
    double doubled twice triple tripled thrice halved divided multiplied choose power powers itself
    root radical log exp negative negated opposite inverse reciprocal complement conjugate transpose transposed
    remainder percent percents permille mille ppm ppb basis recurring repeating imaginary
    gross score scores couple myriad myriads lakh lakhs crore crores kilo mega giga milli micro nano mil bn trn
    googol googols binary octal hex hexadecimal base
"""
_NUMBER_WORD = re.compile(
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ies)|[a-z]*illion)s?",
    re.IGNORECASE,
)
_FRACTION_WORD = re.compile(
    r"(?:ten|eleven|twelf|\w*teen|\w*tie|hundred|thousand|\w*illion|dozen|n|k)ths?", re.IGNORECASE
)
_MULTIPLE_WORD = re.compile(r"[a-z]*(?:fold|[dtncxr]uple[ds]?)", re.IGNORECASE)
# These are, unless they end it: "third graders", "grand pianos", "more apples", but not "2 thirds" nor "5 grand"
_ADJECTIVE_WORDS = "first second third fourth fifth sixth seventh eighth ninth tenth quarter prime grand more fewer"
_ADJECTIVES = frozenset(_ADJECTIVE_WORDS.split())
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,8}")
_CJK_NUMERALS = frozenset(
    "一二三四五六七八九十百千万亿半分之倍个百分点零两双打约或和与至到不多少余加减乘除以平方立次根"
)
_CJK_MAGNITUDES = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8, "千": 10**3, "百": 10**2}
_NOT_UNITS = frozenset(_CONTINUING.split()) | frozenset(_MAGNITUDES)
_IN_BRACKETS = re.compile(r"\s?\(((?:[A-Za-z]{2,}[ /.]?){1,5}(?:\^\{?\d\}?)?)\)\s?")
_PLAIN_UNIT = re.compile(r"\b(?:(?:sq|square|cu|cubic)\.? )?units?\b(?:\s?\^\{?\d\}?)?")
_TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")


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
    if not text:
        return None, 1, False
    apart = text.startswith((" ", "\\text"))  # 12 m, not the product 12m
    named = _IN_BRACKETS.fullmatch(_TEXT.sub(r"\1", text))  # 9 (apples)
    if named:
        apart, text = True, named[1]
    text = text.replace(r"\Omega", "Ω").replace(r"\mu", "μ")
    text = re.sub(r"μ\s*\\text\{\s*", r"\\text{μ", text) if "μ" in text else text
    text = re.sub(r"μ\s+(?=[A-Za-z])", "μ", text)
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
    if not text.isascii() and text[:1] not in "Ωμ€£¥₹Å":
        return _read_cjk(text, factor)
    name = canonical_unit(text, lone_letters=apart)
    if name is not None:
        return name, factor, False
    # "apples", "dollars per hour": unknown words, of which a few may follow
    words = re.sub(r"(?<=[a-z]) a (?=[a-z])", " ", text.replace("-", " ")).split()
    if not apart or not 0 < len(words) <= 5 or not all(re.fullmatch(r"[A-Za-z]{2,}[.]?", word) for word in words):
        return None
    if (
        words[-1].lower() in _ADJECTIVES
        or any(map(_changes_the_value, words))
        or not any(len(word) > 2 for word in words)
    ):
        return None
    return None, factor, False


def _changes_the_value(word: str) -> bool:
    word = word.rstrip(".")
    return word.lower() in _NOT_UNITS or any(
        kind.fullmatch(word) for kind in (_NUMBER_WORD, _FRACTION_WORD, _MULTIPLE_WORD)
    )


def _read_cjk(text: str, factor: int) -> tuple[str | None, int, bool] | None:
    """A counter or unit such as 个 or 米, which may follow 万 (ten thousand)."""
    magnitude = _CJK_MAGNITUDES.get(text[:1])
    if magnitude is not None:
        factor, text = factor * magnitude, text[1:]
    if not text or text == "个":
        return None, factor, False
    if text == "百分":
        return None
    if _CJK.fullmatch(text) and not _CJK_NUMERALS & set(text.removeprefix("个")):
        return None, factor, False
    return None


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
        if word in _UNIT_NAMES and (lone_letters or len(word) > 1 or not word.isalpha() or word == "Ω"):
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

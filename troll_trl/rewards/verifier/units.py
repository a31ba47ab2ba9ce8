"""read_unit(): the words after a number. They say nothing, unless they change the number or contradict the gold's."""

import re

# Spellings of a unit; the first one stands for all
_SPELLINGS = """
    mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche,
    ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce, ml milliliter millilitre,
    l liter litre, s sec second, min minute, h hr hour, day, week, month, yr year, degree deg, cent, dollar usd,
    ^2 square sq, ^3 cubic cu
"""
_UNITS = {name: names.split()[0] for names in _SPELLINGS.split(",") for name in names.split()}
# What else says nothing
_FILLERS = frozenset(["a", "an", "the", "of", "per", "each", "about", "total"])
# Words that change a number, take it back or state a second one
_FRACTIONS = (
    r"half|halves|halved|(?:third|fifth|tenth)(?![ -]grade)s?|quarter|\w*(?:f|four|six|nin|ie|teen|ven|igh|lev)ths|nths"
    r"|percent|ppm|mille|basis"
)
_MULTIPLES = (
    r"hundred\w*|thousand\w*|\w*illion\w*|dozen\w*|gross|score|lakh|grand|googol|tens|\w+fold|doubled?|tripled?|twice"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ties|(?:quadr|quint|sext|cent)uple[ds]?|squared|cubed"
)
_NUMERALS = "nought|zero|one|two|three|four|five|six|seven|eight|nine|ten|pi|e|i"
_OPERATIONS = "plus|minus|over|less|mod|modulo|negative|negated|opposite|inverse|reciprocal|itself|recurring|repeating"
_DOUBTS = "or|if|not|never|without|most|least|maybe|perhaps|probably|wrong|etc|base|binary|octal|hexadecimal"
CHANGING = re.compile(rf"\b(?:{_FRACTIONS}|{_MULTIPLES}|{_NUMERALS}|{_OPERATIONS}|{_DOUBTS})\b", re.IGNORECASE)
_UNIT = re.compile(
    r"""
    (?: \s?\\text\{[^{}\\\d]*\}                                                # \text{ apples}
      | \s?\^\\circ\s?[CF]?(?![A-Za-z])
      | \s?\([A-Za-z ]+\)
      | (?:\s | \s?/\s? | ,\s(?=in\s))                                         # apples, /s, ", in total"
        (?:[A-Za-z]{3,} | (?:an?(?=\s\w\w)|[ckm]m|[km]g|m[lL]|ft|in|mi|yd|lb|oz|hr|of|to|[mgshLNJVW])(?![A-Za-z]))
      | (?<=[A-Za-z}])\^\{?-?\d\}?                                             # the square of cm^2
      | (?<=[A-Za-z}])\.
    )*
    \s?\$?
    """,
    re.VERBOSE,
)


def read_unit(text: str) -> frozenset[str] | None:
    """Return the words after a number in one spelling; `None` for anything else, or if they change the number."""
    if not text:
        return frozenset()
    if not _UNIT.fullmatch(text):
        return None
    words = re.sub(r"\bin (?=[a-z]{2})", "", text.replace(r"\circ", " degree ").replace(r"\text", " "))
    if CHANGING.search(words):
        return None
    found = re.findall(r"[A-Za-z]+|\^\{?[23]", words)
    return frozenset(map(_one_spelling, found)) - _FILLERS


def agree(gold: frozenset[str], answer: frozenset[str]) -> bool:
    """Tell whether two units may belong to one value. One may be left out; kPa is not Pa, and 5 miles east not west."""
    if not gold or not answer:
        return True
    known = gold & set(_UNITS.values()), answer & set(_UNITS.values())
    other = gold - known[0], answer - known[1]
    same_measure = known[0] == known[1] or not all(known)
    return bool(gold & answer) and same_measure and (bool(other[0] & other[1]) or not all(other))


def _one_spelling(word: str) -> str:
    word = word.casefold().replace("{", "")
    singular = word.removesuffix("s") or word
    return _UNITS.get(word) or _UNITS.get(singular) or singular

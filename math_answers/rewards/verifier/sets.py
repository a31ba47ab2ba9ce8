"""Sets of real numbers in words: "all real numbers except 2", "all x > 2", "all positive real numbers"."""

import re

_ALL = r"(?:(?:the )?set of )?(?:all|any|every|each) (?:the )?"
_ALL_REALS = rf"{_ALL}reals?(?: (?:numbers?|values?))?(?: (?:of |for )?[A-Za-z](?![A-Za-z]))?"
_EXCEPT = re.compile(
    rf"(?:[a-z]\s?(?:\\in|is|can be|may be)\s?)?"
    rf"(?:{_ALL_REALS}|(?P<integers>{_ALL}integers?)|\\mathbb\{{R\}}|all [a-z]),?\s?"
    r"(?:(?:except|excluding|other than|apart from|besides|but(?: not)?|without|not equal to|different from)"
    r"(?: for)?(?: when| at)?|(?:such that |where |with |for which )?(?:[a-z]\s?)?\\neq|\\setminus\s?(?=\\\{))"
    r"\s?(?P<points>.+)",
    re.IGNORECASE | re.ASCII,
)
_POINT = re.compile(r"(?:[a-z]\s?=\s?)?(?P<value>zero|(?:[-+\d./{}\s]|\\(?:frac|sqrt|pi|pm)(?![A-Za-z]))+)")
_BEYOND = re.compile(
    rf"{_ALL_REALS} (?:(?:that|which) are )?(?:strictly )?(?:(?P<above>greater|more|larger|bigger)|less|smaller) than"
    r"(?P<closed> or equal to)?\s?(?P<end>[^\s,;:<>=%]+)",
    re.IGNORECASE | re.ASCII,
)
_RELATION = r"\s?(?:[<>]|\\(?:le|ge)(?![A-Za-z]))\s?"
_RANGE = re.compile(
    rf"(?:{_ALL_REALS},?(?: (?:such that|with|where|for which))?\s?|all (?:values of )?)"
    rf"(?P<range>(?:[^\s,;:<>=A-Za-z]+{_RELATION})?[a-z]{_RELATION}[^,;:<>=]+)",
    re.IGNORECASE | re.ASCII,
)
_OF_ONE_SIGN = re.compile(
    rf"(?:{_ALL})?(?P<sign>positive|negative|non-?\s?(?:zero|negative|positive)) reals?(?: numbers?)?|"
    r"\\mathbb\{R\}(?:(?:\^|_)\{?(?P<mark>[*+-]|\\times|(?:[<>]|\\ge|\\le|\\neq)\s?0)\}?)",
    re.IGNORECASE | re.ASCII,
)
_SETS = {
    r"(0,\infty)": ("positive", "+", ">0"),
    r"(-\infty,0)": ("negative", "-", "<0"),
    r"[0,\infty)": ("nonnegative", r"\ge0"),
    r"(-\infty,0]": ("nonpositive", r"\le0"),
    r"\mathbb{R}\setminus\{0\}": ("nonzero", "*", r"\times", r"\neq0"),
}
_BY_SIGN = {sign: written for written, signs in _SETS.items() for sign in signs}
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def set_of_words(text: str) -> str:
    r"""A set of real numbers in words as mathematics, such as `\mathbb{R}\setminus\{2\}`; any other text as it is."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).rstrip(".,;: ").split())
    if found := _OF_ONE_SIGN.fullmatch(plain):
        return _BY_SIGN[re.sub(r"[\s-](?!\Z)|\s", "", (found["sign"] or found["mark"]).lower())]
    if re.fullmatch(rf"{_ALL}integers", plain, re.IGNORECASE):
        return r"\mathbb{Z}"
    if found := _BEYOND.fullmatch(plain):
        end, closed = found["end"], found["closed"]
        return rf"{'(['[bool(closed)]}{end},\infty)" if found["above"] else rf"(-\infty,{end}{')]'[bool(closed)]}"
    if found := _RANGE.fullmatch(plain):
        return found["range"]
    if found := _EXCEPT.fullmatch(plain):
        listed = found["points"].strip()
        listed = listed[2:-2] if listed.startswith(r"\{") and listed.endswith(r"\}") else listed
        points = [_POINT.fullmatch(part) for part in re.split(r"\s?(?:,| and\b| or\b)\s?", listed)]
        if None not in points:
            values = ",".join("0" if point["value"] == "zero" else point["value"] for point in points if point)
            return rf"\mathbb{{{'Z' if found['integers'] else 'R'}}}\setminus\{{{values}\}}"
    return text

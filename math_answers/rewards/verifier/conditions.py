r"""Conditions after an answer that only give a variable's range: `2^{n-1}, n \ge 2`, "4k where k is an integer"."""

import re
from collections.abc import Iterator

from math_answers.rewards.verifier.structure import SYMBOL, closing, split

_NAMES = rf"{SYMBOL}(?:,\s?{SYMBOL})*"
_VALUE = r"(?:[-+\d./{}]|\\(?:frac|sqrt|pi|infty)(?![A-Za-z]))+"
_RELATION = r"\s?(?:[<>]|\\(?:le|ge|neq)(?![A-Za-z]))\s?"
_IN = r"\s?\\in\s?(?:\\mathbb\{[NZQRC]\}(?:[\^_](?:\{[^{}]*\}|[+*\d])?)*|[(\[](?:[-+\d.,\s]|\\infty)+[)\]])"
_KIND = (
    r"(?:(?:an?|any|all|some|every|each|positive|negative|non-?negative|non-?zero|natural|whole|real|complex|rational"
    r"|arbitrary) )*(?:integers?|reals?|naturals?|numbers?|constants?)"
)
_STATEMENT = (
    rf"(?:(?:{_KIND} )?(?:{_NAMES}{_IN}|{SYMBOL}{_RELATION}{_VALUE}"
    rf"|{_VALUE}{_RELATION}{SYMBOL}(?:{_RELATION}{_VALUE})?)"
    rf"|{_NAMES}\s?=\s?\d+,\s?(?:\d+,\s?){{1,3}}(?:\\[lc]?dots|\.\.\.)"
    rf"|{_NAMES} (?:(?:is|are|be|being) )?{_KIND}|{_KIND} {_NAMES})"
)
_RANGE = rf"{_STATEMENT}(?:(?:,\s?|\s?and\s?){_STATEMENT}){{0,2}}"
_INTRODUCTION = r"\b(?:for|where|with|when|if|given|provided)(?: that)?(?: (?:all|any|every|each|some))?\s?"
_CONDITION = re.compile(
    rf"(?P<body>\S.*?)\s?(?:,\s?(?:{_INTRODUCTION})?(?P<listed>{_RANGE})|{_INTRODUCTION}(?P<said>{_RANGE})"
    rf"|\(\s?(?:{_INTRODUCTION})?(?P<bracketed>{_RANGE})\s?\))"
)
_HINT = re.compile(r"\\(?:in|le|ge|neq|[lc]?dots)(?![A-Za-z])|[<>]|\.\.\.|integer|real|natural|number|constant")
_SEVERAL = re.compile(r"[<>]|\\(?:le|ge|neq|in|begin|approx)(?![A-Za-z])")
_NEEDS_EXCEPTION = re.compile(r"/|\\(?:frac|ln|log|tan|cot|sec|csc)|\^\{?-")
_FIRST = re.compile(rf"(?:{SYMBOL}\s?(?:\\ge\s?[012]|>\s?[01])|[01]\s?<\s?{SYMBOL}|[012]\s?\\le\s?{SYMBOL})")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"\\(?:mathbb\{\w\}|[a-z]+)|(?<![A-Za-z])[A-Za-z]{2,}|(?<![A-Za-z])a(?= )")
_BUILDER = re.compile(
    rf"\A\\\{{(?:[a-z]\s?(?:\\mid|\||:)\s?(?=[a-z]\s?=))?([^|:]+?)\s?(?:\\mid|\||:|,)\s?([A-Za-z]{_IN})\\\}}\Z"
)
# One spelling for a set of numbers, and none for the words around it
_SPELLINGS = (
    (re.compile(r"\bpositive (?:integers?|whole numbers?)|\bnatural(?: number)?s?"), "N"),
    (re.compile(r"\\mathbb\{(?:N|Z\}\^\{?\+)\}?(?:[\^_]\{?[+*]?\}?)?"), "N"),
    (re.compile(r"\\mathbb\{Z\}|\bintegers?"), "Z"),
    (re.compile(r"\\mathbb\{R\}|\breals?(?: numbers?)?"), "R"),
    (re.compile(r"\\in(?![a-z])|\b(?:is|are|be|being|an?|any|all|some|every|each)\b|\s"), ""),
)


def split_condition(text: str) -> tuple[str, frozenset[str]]:
    r"""
    An expression and what a condition after it says of its variables. `5, n \ge 2` has no such condition, nor has
    `2^{n-1}, n = 3`, `4k \text{ for even } k` or `n = 4k, k > 5`: they say another answer.
    """
    found = None
    if r"\in" in text:
        text = _BUILDER.sub(r"\1, \2", text)
    if _HINT.search(text):
        found = _CONDITION.fullmatch(" ".join(_TEXT.sub(r" \1 ", text).split()).rstrip("."))
    if found is None:
        return text, frozenset()
    body, condition = found["body"].strip(" ,"), found["listed"] or found["said"] or found["bracketed"]
    if _SEVERAL.search(body) or body.count("(") != body.count(")"):
        return text, frozenset()
    parts = split(body, (",", ";", "and", "or"))
    whole = re.fullmatch(rf"(?:for )?([A-Za-z]){_WHOLE}", condition)  # of all solutions: 2k\pi, \pi/3+2k\pi, k \in Z
    if len(parts) > 1 and not (whole and all(_stands_in(whole[1], part) for part in parts)):
        return text, frozenset()
    statements = [part for part in split(condition, (",", "and")) if part]
    name, _, value = body.rpartition("=")
    symbols = _WORD.sub(
        lambda word: word[0] if word[0][0] == "\\" and re.fullmatch(SYMBOL, word[0]) else " ", condition
    )
    variables = set(re.findall(SYMBOL, symbols))
    letters = re.sub(r"\\[A-Za-z]+", " ", value) + " ".join(re.findall(r"\\[A-Za-z]+", value))
    if not variables or not all(variable in letters for variable in variables):
        return text, frozenset()
    solved = name and not any(variable in name for variable in variables)  # n=4k: k > 5 leaves out solutions
    if solved and any(re.search(_RELATION, part) and not _FIRST.fullmatch(part) for part in statements):
        return text, frozenset()
    if r"\neq" in condition and not _NEEDS_EXCEPTION.search(value):
        return text, frozenset()
    return body, frozenset(map(_spelling, statements))


def _stands_in(letter: str, text: str) -> bool:
    return re.search(rf"(?<![\\A-Za-z]){letter}(?![A-Za-z])", text) is not None


def _spelling(statement: str) -> str:
    for pattern, name in _SPELLINGS:
        statement = pattern.sub(name, statement)
    return statement if re.search(r"[\d<>\\]", statement) else "".join(sorted(statement))


# Letters that a general solution may give its integer without saying so
_COUNTERS = frozenset("jklmnKMN")
_WORDS_OF_CONDITIONS = "all an and any are be by each for has if in is it of or set some that the to with"
_SMALL_WORDS = frozenset(_WORDS_OF_CONDITIONS.split())
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_NAMED = re.compile(r"(?<![\\A-Za-z])([A-Za-z])\s?=")
_NAMED_TUPLE = re.compile(r"\A\([A-Za-z](?:,\s?[A-Za-z]){1,3}\)\s?=")
_WHOLE = (
    r"(?:,\s?[A-Za-z])*(?:\s?\\in\s?\\mathbb\{[ZN]\}"
    r"| (?:(?:is|are|be|being|an?|any|all|some|every|each|arbitrary|positive|non-?negative) )*"
    r"(?:integers?|(?:whole|natural) numbers?))"
)
# A term that counts periods by an integer `#`, 2#\pi, \frac{(2#+1)\pi}{4} or 180^\circ #, without powers and functions
_PERIODS = re.compile(r"(?=.*(?:\\pi|\\circ))(?:[\d.\s(){}+-]|\\(?:pi|frac|cdot|times)(?![A-Za-z])|\^\\circ|/\d|#)+")
_BELOW = re.compile(r"\\frac\{(?:[^{}]|\{[^{}]*\})*\}\{[^{}]*#")
_SHIFTED = re.compile(r"(\d*)#[+-](\d+)")
_SIGN = re.compile(r"\(-1\)\^(?:#|\{#(?:[+-]1)?\})")


def with_letter_of(gold: str, answer: str) -> str:
    r"""
    A general solution with the gold answer's letter for its integer: `\pi/4+n\pi` as `\pi/4+k\pi`. Only if one letter
    of each is all that differs, names nothing, and is said to be whole or counts multiples of π or of degrees.
    """
    golds, answers = _letters(gold), _letters(answer)
    if golds is None or answers is None or len(golds - answers) != 1 or len(answers - golds) != 1:
        return answer
    (own,), (theirs,) = golds - answers, answers - golds
    if {own, theirs, "e"} & set(_NAMED.findall(f"{gold} {answer}")) or "e" in (own, theirs):
        return answer
    if not (_is_whole(own, gold) or (own in _COUNTERS and _counts_periods(own, gold))):
        return answer
    if not (_is_whole(theirs, answer) or theirs in _COUNTERS):
        return answer
    return _WORDS.sub(lambda word: own if word[0] == theirs else word[0], answer)


def _letters(text: str) -> set[str] | None:
    """The letters that stand alone, names before an equals sign left out; `None` if a product such as `kx` has some."""
    plain = _NAMED.sub("", _NAMED_TUPLE.sub("", _BUILDER.sub(r"\1, \2", text)))
    plain = re.sub(r"\\mathbb\{\w\}|\ba (?=[a-z]{3})", "", plain)
    words = _WORDS.findall(plain)
    if any(1 < len(word) < 4 and word.lower() not in _SMALL_WORDS for word in words):
        return None
    return {word for word in words if len(word) == 1}


def _is_whole(letter: str, text: str) -> bool:
    """Whether a text says that a letter is an integer."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    return re.search(rf"(?<![\\A-Za-z]){letter}{_WHOLE}|\bintegers? {letter}(?![A-Za-z])", plain) is not None


def _counts_periods(letter: str, text: str) -> bool:
    """Whether a text adds multiples of a period by a letter, and has it nowhere else."""
    plain = re.sub(rf"(?<![\\A-Za-z]){letter}(?![A-Za-z])", "#", text.replace(r"\{", "").replace(r"\}", ""))
    sides = [_SIGN.sub("", part).rpartition("=")[2] for part in _members(_TEXT.sub(r" \1 ", plain))]
    terms = [term for side in sides for term in split(side, ("+", "-", r"\pm", r"\mp")) if "#" in term]
    return bool(terms) and all(map(_is_period, terms))


def _members(text: str) -> Iterator[str]:
    """The parts of lists, and of the tuples and intervals in them."""
    for part in split(text, (",", ";", "and", "or", r"\cup")):
        if part[:1] in ("(", "[") and "," in part and closing(part) == len(part) - 1:
            yield from _members(part[1:-1])
        else:
            yield part


def _is_period(term: str) -> bool:
    if term.count("#") > 1 or not _PERIODS.fullmatch(term) or _BELOW.search(term):
        return False
    shifted = _SHIFTED.search(term)  # (n-2)\pi counts something else
    return shifted is None or int(shifted[2]) % int(shifted[1] or 1) != 0

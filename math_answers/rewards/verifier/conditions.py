r"""What only gives the range of a variable after an answer: `2^{n-1}, n \ge 2`, "4k where k is an integer"."""

import re

from math_answers.rewards.verifier.structure import SYMBOL, split

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
    if _HINT.search(text):
        found = _CONDITION.fullmatch(" ".join(_TEXT.sub(r" \1 ", text).split()).rstrip("."))
    if found is None:
        return text, frozenset()
    body, condition = found["body"].strip(" ,"), found["listed"] or found["said"] or found["bracketed"]
    if _SEVERAL.search(body) or body.count("(") != body.count(")") or len(split(body, (",", ";", "and", "or"))) > 1:
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


def _spelling(statement: str) -> str:
    for pattern, name in _SPELLINGS:
        statement = pattern.sub(name, statement)
    return statement if re.search(r"[\d<>\\]", statement) else "".join(sorted(statement))

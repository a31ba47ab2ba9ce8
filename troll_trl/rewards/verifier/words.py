"""Answers in words, the letters of multiple choice, and what may precede a value."""

import re

# The letter, and perhaps the text of its option: C, (C), C. 12, option C
_CHOSEN = re.compile(r"(?is)(?:(?:the )?(?:option|choice|answer)(?: is)?:?\s)?[(\[]?([A-J])(?:[)\].:]+\s?(.*))?")
# In that text: another letter, or a word that takes the letter back
_NOT_CHOSEN = re.compile(r"(?<![\w\\])\(?[B-HJ]\)?(?![\w'^_=])|\A[+,;^=]|\b(?:not|false|wrong|or)\b")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")
_ONE_WORD = re.compile(r"[^\W\d_]{4}|\b[A-Z][A-Za-z]+")
_CHANGED = r"twice|half|double|triple|minus|negative|opposite|inverse|reciprocal|not|or|if|(?:square|cube|one|some) of"
# What may precede a value and "=": x, x_1, f(x), f^{-1}(2), \angle ABC, (x, y), |S|, m+n, "Area". Not \sin x, xy, |x|
NAME = re.compile(
    rf"""
    (?: \\text\{{(?![^{{}}]*\b(?:{_CHANGED})\b)[^{{}}]*\}}
      | \\?(?!(?i:sin|cos|tan|log|ln|not|sqrt|frac|pi|twice|half|minus|double)(?![a-z]))
        (?:[A-Z]++|[A-Za-z]{{3,}}+|[A-Za-z](?![a-z])) '?+ (?:_\{{[^{{}}]*+\}}|_\w)?+
        (?:(?:\^\{{-1\}})?\s?\([\w, \\]*+\))?+
      | \(\\?[A-Za-z]\w*(?:,\s?\\?[A-Za-z]\w*)+\)
      | \|[A-Z\s\\]++\|
      | \\frac\{{[A-Z]{{2}}\}}\{{[A-Z]{{2}}\}}
      | [\s+:]
    )++
    """,
    re.ASCII | re.VERBOSE,
)
# "The number of ways is 34"; the label before the text of an option
_INTRODUCTION = re.compile(
    rf"\A(?:\\text\{{)?(?![^}}]*\b(?i:{_CHANGED})\b)[A-Za-z]{{2}}[A-Za-z $]*?(?: is|:|(?<=[Tt]here) are)"
    r"\s?\}?\s?(?=[-$(\d\\])"
    r"|\A(?:\\text\{\s?)?\([A-J]\)\s?\}?\s?(?=[^\s=<>^_])"
)


def choice(text: str) -> str | None:
    """Return the letter of a multiple choice, if a text names exactly one: `C`, `(C)`, `C. 12`, `option C`."""
    match = _CHOSEN.fullmatch(re.sub(r"\\text|[{}*]", "", text).strip(" ."))
    return match[1] if match and match[1].isupper() and not _NOT_CHOSEN.search(match[2] or "") else None


def is_words(text: str) -> bool:
    """Tell whether a text is words, and no product of letters such as `ab` or `mgh`."""
    letters, is_text = _TEXT.subn(r"\1", text)
    is_word = is_text or _ONE_WORD.search(text) or not text.isascii()
    return bool(is_word and _WORDS.fullmatch(letters.strip(" .()'")))


def plain(text: str) -> str:
    """Return words without markup, case and article."""
    text = " ".join(_TEXT.sub(r" \1 ", text).casefold().split()).strip(" .()")
    return re.sub(r"\A(?:an?|the) (?=\w\w)", "", text)


def without_introduction(text: str) -> str:
    """Return a value without the sentence that states it."""
    return _INTRODUCTION.sub("", text)

"""Answers in words, and what may surround a whole answer."""

import re

from math_answers.rewards.verifier.structure import CHANGING, closing, split

MAX_WRAPPINGS = 12

# Words may have Chinese, Japanese and Korean letters
_LETTER = r"[A-Za-z\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORDS = re.compile(rf"{_LETTER}(?:{_LETTER}|['-])*(?: (?:{_LETTER}|['-])+)*")
_MATHEMATICS = re.compile(r"[\d\\<>=^+]|\A\s?[A-Za-z](?:\s?-\s?[A-Za-z])*\s?\Z")
# What may precede the whole answer: an "= 5" without a left side, "Answer: 5", "therefore", "the point"
_KIND = r"(?:the )?(?:point|(?:ordered )?(?:pair|triple)|interval|set|vector|matrix)"
_INTRODUCTION = re.compile(
    rf"\A(?:\\text\{{)?\s?{_KIND}\s?\}}?\s?(?=[(\[\\])|"
    r"\A(?:=|(?:\\text\{)?\s?(?:the )?(?:final |correct )?answer(?: is)?\s?(?::\s?\}?|(?<=is)\s?\}|(?<=is)\s|(?=[\\(-])"
    r"|(?<=\s)(?=\d))"
    r"|\\(?:approx|therefore|Rightarrow|implies)(?![A-Za-z]))\s*(?=\S)",
    re.IGNORECASE,
)
# "The largest n is 34", "he has 12 left", unless a word says another value
_SENTENCE = re.compile(
    rf"\A(?!.*(?:{CHANGING}|\b(?i:if|unless|maybe|perhaps|probably|possibly|either|guess|one of|another)\b))"
    r"\\?[A-Za-z][^=<>+*/^]{0,120}?(?:(?<=\w )|(?<=[)}])|(?=:))"
    r"(?:(?:is|are|was|were|be|equals|has|have|had|costs?|takes?|needs?|gives?)(?: equal to| exactly)?(?: |(?=\\))"
    r"|(?<=[A-Za-z]{3}):\s?)(?=[-+.$(\d\\|])"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# "The equation has no real solution"
_NO_SOLUTION = re.compile(
    r"(?:.* (?=has|have|is|are)|there )?(?:has |have |is |are |exists? )?no (?:such |real |possible |valid |integer )*"
    r"(?:solution|root|number|value|answer|integer|pair|triple)s?(?: of \w)?(?: exists?)?|(?:the )?empty set|none"
    r"|无解|无实数解|空集"
)
_SYNONYMS = {
    "dne": "does not exist", "not defined": "undefined", "is undefined": "undefined",
    "infinitely many solutions": "infinitely many", "infinite solutions": "infinitely many",
}  # fmt: skip
# Answers to several questions, one after the other: `True, False` is not `False, True`
_JUDGEMENT_WORDS = """
    true false yes no correct incorrect right wrong valid invalid always sometimes never even odd both neither
    positive negative increasing decreasing convergent divergent converges diverges rational irrational continuous
    discontinuous linear nonlinear dependent independent consistent inconsistent possible impossible
    对 错 是 否 正确 错误
    """
_JUDGEMENTS = frozenset(_JUDGEMENT_WORDS.split())


def words(text: str) -> str | None:
    r"""
    Words in lower case, such as a name or a direction; `None` for anything else, a short product of letters included.
    `\emptyset` stands for "no solution".
    """
    if re.fullmatch(r"\s?(?:\w\\in\s?)?\\emptyset\s?", text):
        return "no solution"
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    content = (wrapped[1] if wrapped else text).strip(' ().,;:"')
    content = content[1:-1] if content[:1] == content[-1:] == "'" else content
    if not _WORDS.fullmatch(content) or not (wrapped or is_word(content)):
        return None
    folded = content.casefold()
    if len(content) < 4 and len(set(content)) > len(set(folded)):  # Aa and AA are two genotypes
        return content
    folded = re.sub(r"\A.* (?=does not exist\Z)|\A(?:an?|the) (?=\w\w)", "", folded)
    return "no solution" if _NO_SOLUTION.fullmatch(folded) else _SYNONYMS.get(folded, folded)


def is_word(text: str) -> bool:
    """Whether bare letters are words rather than a product: `RSR`, `IV`, `Jim` and `red`, not `ab` or `mgh`."""
    if "-" in text and all(len(part) < 3 for part in text.split("-")):  # ad-bc
        return False
    if len(text) > 3 or not text.isascii() or text.casefold() in ("no", "dne"):
        return True
    if text[:1].isupper():
        return len(text) > 1
    return not set(text).isdisjoint("aeiou") and list(text) != sorted(set(text))


def is_judgement(text: str) -> bool:
    """Whether words judge something, as "True" does."""
    return text in ("T", "F", "Y", "N") or words(text) in _JUDGEMENTS


def unwrap(text: str) -> str:
    """A value without the braces, parentheses or text command around the whole of it."""
    for _ in range(MAX_WRAPPINGS):
        text = text.strip(" ")
        text = text if text.endswith("...") else text.rstrip(".,;:")
        text = _INTRODUCTION.sub("", text, count=1)
        if " " in text or r"\text" in text:
            plain = " ".join(_TEXT.sub(r" \1 ", text).split())
            text = plain[found.end() :] if (found := _SENTENCE.match(plain)) else text
        argument = text.removeprefix(r"\text")
        is_text = argument[:1] == "{" and argument != text and closing(argument) == len(argument) - 1
        if is_text and _MATHEMATICS.search(argument[1:-1]):
            text = argument[1:-1]
            continue
        if text[:1] in ("(", "{") and closing(text) == len(text) - 1:
            inner = text[1:-1]
            if text[0] == "{" or (len(split(inner, (",", ";"))) == 1 and not re.fullmatch("[A-J]", inner)):
                text = inner
                continue
        break
    return re.sub(r"\A(?:(?:approximately|about|exactly) (?=\S)|the (?=\d))", "", text)

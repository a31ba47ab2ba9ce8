"""Answers in words, and what may stand around a whole answer."""

import re

from troll_trl.rewards.verifier.structure import closing, split

MAX_WRAPPINGS = 12

# Chinese, Japanese and Korean letters stand in words too
_LETTER = r"[A-Za-z\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORDS = re.compile(rf"{_LETTER}(?:{_LETTER}|['-])*(?: (?:{_LETTER}|['-])+)*")
_MATHEMATICS = re.compile(r"[\d\\<>=^+]|\A\s?[A-Za-z](?:\s?-\s?[A-Za-z])*\s?\Z")
# What may stand before the whole answer: an "= 5" without a left side, "Answer: 5", "therefore", "there are"
_SUBJECT = (
    r"(?:(?:so|thus|hence|therefore),? )?"
    r"(?:there|it|[xn]|the (?:total |required |maximum |minimum |largest |smallest )?"
    r"(?:answer|value|result|total|number|probability|area|length|sum|cost|distance|price|amount))"
)
_KIND = r"(?:the )?(?:point|(?:ordered )?(?:pair|triple)|interval|set|vector|matrix)"
_INTRODUCTION = re.compile(
    rf"\A(?:\\text\{{)?\s?{_SUBJECT}(?: |\s?\\text\{{\s?)(?:is|are|equals)(?:\s?\}}| )\s?(?=[-+.$(\d\\])"
    rf"|\A(?:\\text\{{)?\s?{_KIND}\s?\}}?\s?(?=[(\[\\])|"
    r"\A(?:=|(?:\\text\{)?\s?(?:the )?(?:final |correct )?answer(?: is)?\s?(?::\s?\}?|(?<=is)\s?\}|(?<=is)\s)"
    r"|\\(?:approx|therefore|Rightarrow|implies)(?![A-Za-z]))\s*(?=\S)",
    re.IGNORECASE,
)
_NO_SOLUTION = """
    no solutions, no real solutions, no real solution, empty set, the empty set, none, no such number, no such numbers,
    has no solution, there is no solution, there are no solutions, there is no real solution, 无解, 无实数解, 空集
"""
_SYNONYMS = dict.fromkeys((phrase.strip() for phrase in _NO_SOLUTION.split(",")), "no solution") | {
    "dne": "does not exist", "undefined": "undefined", "not defined": "undefined", "is undefined": "undefined",
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
    if text.strip() in (r"\emptyset", r"\varnothing"):
        return "no solution"
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    content = (wrapped[1] if wrapped else text).strip(' ().,;:"')
    content = content[1:-1] if content[:1] == content[-1:] == "'" else content
    if not _WORDS.fullmatch(content):
        return None
    if not wrapped and content.isascii():
        if len(content) < 4 and content.casefold() not in ("yes", "no", "dne", "odd"):
            return None
        if "-" in content and all(len(part) < 3 for part in content.split("-")):  # ad-bc
            return None
    content = re.sub(r"\A(?:an?|the) (?=\w\w)", "", content.casefold())
    return _SYNONYMS.get(content, content)


def is_judgement(text: str) -> bool:
    """Whether words judge something, as "True" does."""
    return text in ("T", "F", "Y", "N") or words(text) in _JUDGEMENTS


def unwrap(text: str) -> str:
    """Without the braces, parentheses or text command around the whole of one value."""
    for _ in range(MAX_WRAPPINGS):
        text = text.strip(" ")
        text = text if text.endswith("...") else text.rstrip(".,;:")
        text = _INTRODUCTION.sub("", text, count=1)
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
    return re.sub(r"\A(?:approximately|about|exactly) (?=\S)", "", text)

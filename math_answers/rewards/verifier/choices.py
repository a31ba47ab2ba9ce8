"""Multiple choice: which option an answer names, if it names exactly one."""

import logging
import re
import threading
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
_warned = threading.Event()  # of options that cannot be read

# The options of a multiple choice: see [`options_by_letter`]
Options = list[Any] | dict[str, Any] | None

LETTERS = "ABCDEFGHIJ"
_COLUMNS = (("label", "labels", "key", "letter"), ("text", "texts", "value", "content"))
_OWN_LABEL = re.compile(r"\A\s*(?:\([A-J]\)|[A-J][.):])\s*")

_MARKUP = re.compile(r"\\(?:text|ldotp|quad)(?![A-Za-z])|[{}$\"~]|\\ ")
_LABEL = re.compile(
    r"\s*(?:(?:the )?(?:correct |final |best )?(?:option|choice|answer|statement)(?: is)?:?\s*)?"
    r"(?:\(\s?(?P<round>[A-J])\s?[.:]?\)|\[(?P<square>[A-J])\]|(?P<bare>[A-J])(?=\s*(?:[.):]|\Z)))[.:)]*\s*",
    re.IGNORECASE,
)
# Another option: a capital that stands alone, unless an article or the name of a quantity; a letter in brackets
_OTHER = re.compile(
    r"(?<![A-Za-z\\])(?:A(?! [a-z]{2})|[B-J])(?![A-Za-z]|\s?[=<>^_])|[(\[]\s?[A-Ja-j]\s?[)\]]"
    r"|(?<![A-Za-z\\])A (?=(?:or|and|nor|but|maybe|also|is|not)\b)"
)
_ROMAN = re.compile(r"\bI(?=(?:,| and| or| only)\b.*\b(?:II|III|IV|only)\b| only\b)|(?<=and )I\b|(?<=or )I\b")
_GOES_ON = re.compile(
    r"(?:or|and|nor|but|maybe|also|is(?! (?:correct|right|true)\Z)|isn)\b|[,;/&|+='^_*]|-(?!\s?[\d.\\])"
    r"|\\(?:cup|cap|neq|lor|land|mid|to|And|&)",
    re.IGNORECASE,
)
_ANY = re.compile(r"(?<![A-Za-z\\])[A-Ja-j](?![A-Za-z])")
_NAMED = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])|\([a-j]\)|\A[a-j]\Z")
_ASIDE = re.compile(r"\\|\A\s*(?i:the )?(?i:options|choices|answers)\b")
_SEVERAL = re.compile(r"(?:\([A-J]\)|[A-J])(?:(?:[\s,;&和]|and)*+(?:\([A-J]\)|[A-J]))+")


@dataclass(frozen=True)
class Choice:
    """An option that a text names: its capital, and the text that follows the letter."""

    letter: str
    text: str


def read_choice(text: str) -> Choice | None:
    r"""The one option that a normalised answer names: `(C)`, `\text{(C)}`, `(C) 12`, "option C"; `None` for several."""
    plain = _without_markup(text)
    label = _LABEL.match(plain)
    if label is None:
        return None
    letter, rest = next(filter(None, label.groups())), plain[label.end() :].strip(" .")
    if letter.islower() and (rest or (not label["round"] and len(plain.strip(" .)")) > 1)):
        return None
    if (
        _OTHER.search(_ROMAN.sub("", rest))
        or _GOES_ON.match(rest)
        or re.fullmatch(r"(?:[\s,;.:/|&]*\b[A-Ja-j]\b)+", rest)
    ):
        return None
    return Choice(letter.upper(), rest)


def gold_choice(gold: str) -> Choice | None:
    """The option of a gold answer, which is a capital; `x` and `(a)` are not choices."""
    choice = read_choice(gold)
    return choice if choice is not None and _ANY.search(gold) and choice.letter in gold else None


def names_option(text: str) -> bool:
    """Whether a text names an option, or several."""
    return _NAMED.search(_without_markup(text).strip(" .")) is not None


def several_options(text: str) -> str | None:
    """`ABD` for `A, B, D` and `(A)(B)(D)`, the options of a question that has several; `None` for anything else."""
    plain = _ASIDE.sub(" ", _without_markup(text)).strip(" .")
    if not _SEVERAL.fullmatch(plain):
        return None
    letters = re.findall("[A-J]", plain)
    if len(letters) == len(plain):  # BA is a word, or two points
        return plain if letters == sorted(set(letters)) else None
    return "".join(sorted(letters)) if len(set(letters)) == len(letters) else None


def _without_markup(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).split())


def options_by_letter(options: Options) -> dict[str, str]:
    """
    The texts of a multiple choice by capital letter, without their own labels ("B. 12"): from texts in order or
    by letter, from `{"label": [...], "text": [...]}`, or from a list of such dictionaries. Warns of other forms.
    """
    texts: list[tuple[Any, Any]] = []
    given = options if isinstance(options, (list, tuple)) else [options] if isinstance(options, dict) else []
    for place, option in enumerate(given):
        if not isinstance(option, dict):
            texts.append((LETTERS[place : place + 1], option))
            continue
        columns = {str(name).casefold(): value for name, value in option.items()}
        label, text = (next((columns[name] for name in names if name in columns), None) for names in _COLUMNS)
        if text is None:
            texts += option.items()
        elif isinstance(text, (list, tuple)):
            texts += zip(label or LETTERS, text, strict=False)
        else:
            texts.append((label or LETTERS[place : place + 1], text))
    by_letter = {
        str(label).strip(" ().:").upper(): _OWN_LABEL.sub("", str(text)).strip()
        for label, text in texts
        if isinstance(text, (str, int, float)) and str(text).strip()
    }
    read = {letter: text for letter, text in by_letter.items() if text and letter and letter in LETTERS}
    if options and not read and (not texts or any(text is not None for _, text in texts)) and not _warned.is_set():
        _warned.set()
        logger.warning(
            f"Options of a multiple choice that cannot be read, so only the letter is right: {repr(options)[:200]}. "
            'Give a list of texts, {"A": text, ...}, {"label": [...], "text": [...]}, or a list of {"label": ..., '
            '"text": ...}. This warning comes once.'
        )
    return read


def is_option_text(answer: str, text: str) -> bool:
    """Whether an answer may be compared with the text of an option: it names no letter that the text does not have."""
    named, own = ({letter.upper() for letter in _ANY.findall(_without_markup(side))} for side in (answer, text))
    return named <= own and read_choice(answer) is None

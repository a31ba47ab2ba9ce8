"""Multiple choice: which option an answer names, if it names exactly one."""

import re
from dataclasses import dataclass

# Of a multiple choice, in order or by letter
Options = list[str] | dict[str, str] | None

_MARKUP = re.compile(r"\\(?:text|ldotp|quad)(?![A-Za-z])|[{}$\"~]|\\ ")
_QUOTED = re.compile(r"(?<![A-Za-z)])'([^']*)'")
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


@dataclass(frozen=True)
class Choice:
    """
    An option that a text names.

    Args:
        letter (`str`):
            A capital, `A` to `J`.
        text (`str`):
            What stands behind the letter: the option itself, or nothing.
    """

    letter: str
    text: str


def read_choice(text: str) -> Choice | None:
    r"""
    Read a normalised answer as the choice of one option: `(C)`, `C.`, `\text{(C)}`, `(C) 12`, "option C".

    Args:
        text (`str`):
            Normalised answer.

    Returns:
        `Choice` or `None`: `None` for what names no option, or several.
    """
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
    """The option of a gold answer, which is a capital; `x` and `(a)` are no choices."""
    choice = read_choice(gold)
    return choice if choice is not None and _ANY.search(gold) and choice.letter in gold else None


def names_option(text: str) -> bool:
    """Whether a text names an option, or several."""
    return _ANY.search(_without_markup(text)) is not None


def _without_markup(text: str) -> str:
    return " ".join(_QUOTED.sub(r" \1 ", _MARKUP.sub(" ", text)).split())


def option_text(gold: str, options: Options) -> str | None:
    """
    The text of the option that a gold answer names.

    Args:
        gold (`str`):
            Normalised gold answer.
        options (`list[str]`, `dict[str, str]` or `None`):
            Options in order, or by letter. Their own labels ("B. 12") are taken off.

    Returns:
        `str` or `None`: `None` if the gold answer is no letter, or there is no such option.
    """
    choice = gold_choice(gold)
    if choice is None or choice.text or not options:
        return None
    if isinstance(options, dict):
        text = options.get(choice.letter)
    elif isinstance(options, (list, tuple)) and ord(choice.letter) - ord("A") < len(options):
        text = options[ord(choice.letter) - ord("A")]
    else:
        text = None
    if not isinstance(text, str) or not text.strip():
        return None
    return re.sub(r"\A\s*(?:\([A-J]\)|[A-J][.):])\s*", "", text).strip() or None

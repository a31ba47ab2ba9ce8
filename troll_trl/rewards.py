r"""math_accuracy_reward: 1 for a right final answer, 0 for a wrong one; what counts as the answer, and as equal."""

import re
import threading
from collections.abc import Callable
from fractions import Fraction

from math_verify import LatexExtractionConfig, parse, verify

# The longest gold answer of MATH-500 has 58 characters. What is much longer is a text, not an answer, and a
# computer-algebra system would spend long on it.
MAX_ANSWER_CHARACTERS = 1000

# math-verify's limits on one parse and one comparison.
TIMEOUT_SECONDS = 5

_BOX_OR_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
# Possessive quantifiers (`*+`): a run of blanks is read once, however the match ends.
_ANSWER_MARKER = re.compile(
    r"(?:####|\banswer[\s*_]*+:|\bthe\s++(?:final\s++)?answer\s++is\b[\s*_]*+:?+)(?:[\s*_$]|\\[(\[$])*+",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)")
_MATH_DELIMITER = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathbf|mathrm)\s*\{([^{}]*)\}")
# Not a comma with a plain space behind it, which separates the numbers of a list
_THOUSANDS_SEPARATOR = r"(?:\{,\}|,(?:\\!\s?)?|\\,| )"
_NUMBER = re.compile(
    rf"[€£]?\s?(?P<number>[+-]?\s?(?:\d{{1,3}}(?:{_THOUSANDS_SEPARATOR}\d{{3}})+|\d+)?(?:\.\d*)?)"
    # Words of a unit ("dollars per hour"). A word of magnitude changes the value, "and" and "or" continue it.
    r"(?:\s(?!(?:hundred|thousand|million|billion|trillion|dozen|percent|and|plus|minus|times)s?\b)[A-Za-z]{3,}){0,4}",
    re.ASCII,
)
_WORDS = re.compile(r"[a-z]+(?:[ -][a-z]+)*")


def math_accuracy_reward(
    completions: list[list[dict[str, str]]] | list[str],
    solution: list[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    r"""
    Reward function that checks the final answer of each completion against the gold answer.

    The answer of a completion is read after its last `</think>`: the last balanced `\boxed{...}`; without one, what
    follows the last `Answer:`, `####` or "the (final) answer is". A completion without any of these has no answer and
    gets 0: the last number of a text is no answer. So does one whose thinking (`<think>`) never ends.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Completions, chat messages (the last message of the assistant counts) or plain text.
        solution (`list[str]`):
            Gold answers as [`~troll_trl.data.load_math_dataset`] writes them (`\boxed{...}`). A bare answer, `$...$`
            or a worked solution that ends in one of the forms above is read too.
        log_extra (`Callable`, *optional*):
            Given by the trainer: adds the columns `solution` and `answer` to the table of logged completions.
        **kwargs:
            The other columns and arguments that TRL hands to every reward function; not used.

    Returns:
        `list[float | None]`:
            1.0 for a right answer, 0.0 for a wrong or missing one, `None` (the trainer skips it) where math-verify
            cannot parse the gold answer.

    Raises:
        ValueError: `completions` and `solution` differ in length.
        TypeError: a solution that is not a string.

    Example:
    ```python
    >>> from troll_trl.rewards import math_accuracy_reward

    >>> math_accuracy_reward([r"So it is \boxed{0.5}.", "Answer: 2"], [r"\boxed{\frac{1}{2}}", r"\boxed{1}"])
    [1.0, 0.0]
    ```
    """
    if len(completions) != len(solution):
        raise ValueError(f"Got {len(completions)} completions but {len(solution)} solutions; they must pair up.")
    for gold in solution:
        if not isinstance(gold, str):
            raise TypeError(f"Every solution must be a string such as '\\boxed{{72}}', got {gold!r}.")
    answers = [extract_answer(_text_of(completion)) for completion in completions]
    rewards = [_score(extract_answer(gold) or gold, answer) for gold, answer in zip(solution, answers, strict=True)]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("answer", ["[none]" if answer is None else answer for answer in answers])
    return rewards


def answer_format_reward(completions: list[list[dict[str, str]]] | list[str], **kwargs) -> list[float]:
    r"""
    Reward function that checks only that a completion states a final answer and that it is a plain number: for models
    that still have to learn the form, beside [`math_accuracy_reward`] and with a smaller weight.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Completions, chat messages or plain text.
        **kwargs:
            The other columns and arguments that TRL hands to every reward function; not used.

    Returns:
        `list[float]`:
            1.0 for an answer in a form that [`math_accuracy_reward`] reads and that is a number, else 0.0.
    """
    answers = [extract_answer(_text_of(completion)) for completion in completions]
    return [float(answer is not None and plain_number(answer) is not None) for answer in answers]


def extract_answer(text: str) -> str | None:
    """
    The final answer that a text states, by the rules of [`math_accuracy_reward`].

    Args:
        text (`str`):
            A completion or a worked solution.

    Returns:
        `str` or `None`:
            The answer, without the box or the words around it; `None` if the text states none.
    """
    # What follows a <think> that never ends is a thought, not an answer.
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    markers = list(_ANSWER_MARKER.finditer(text))
    if not markers:
        return None
    line = text[markers[-1].end() :].partition("\n")[0]
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip() or None


def last_boxed(text: str) -> str | None:
    r"""
    The content of the last `\boxed{...}` or `\fbox{...}` whose braces balance.

    Args:
        text (`str`):
            Any text. It is read once, so that many unclosed boxes cost no more than a text without them.

    Returns:
        `str` or `None`:
            The content, of the inner one where boxes are nested; `None` without a balanced box.
    """
    open_braces: list[tuple[bool, int]] = []
    start, content = -1, None
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"] or token["open"]:
            open_braces.append((token["box"] is not None, token.end()))
        elif token["close"] and open_braces:
            is_box, opened = open_braces.pop()
            if is_box and opened > start:
                start, content = opened, text[opened : token.start()]
    return content


def plain_number(text: str) -> str | None:
    """
    The digits of an integer or decimal, without thousands separators, currency and a unit in words.

    Args:
        text (`str`):
            Bare answer.

    Returns:
        `str` or `None`:
            For example `-1234.50`; `None` for anything that is not a plain number, percentages and fractions included.
    """
    match = _NUMBER.fullmatch(_normalise(text))
    if match is None or not any(character.isdigit() for character in match["number"]):
        return None
    return re.sub(r"[^\d.+-]", "", match["number"])


def is_parsable(gold: str) -> bool:
    """
    Whether answers can be compared with this gold answer: a number, or an expression that math-verify parses.

    Args:
        gold (`str`):
            Bare gold answer, as [`extract_answer`] returns it.

    Returns:
        `bool`:
            `False` for an empty or overlong gold answer and for one that is no mathematics.
    """
    if len(gold) > MAX_ANSWER_CHARACTERS:
        return False
    gold = _normalise(gold)
    return bool(gold) and (plain_number(gold) is not None or bool(_parse(gold)))


def is_correct(gold: str, answer: str) -> bool:
    """
    Whether an answer equals the gold answer.

    Equal text and plain numbers are decided exactly, a gold answer in words by its words; everything else by
    math-verify.

    Args:
        gold (`str`):
            Bare gold answer, as [`extract_answer`] returns it.
        answer (`str`):
            Bare answer of a completion. One of more than `MAX_ANSWER_CHARACTERS` characters is wrong.

    Returns:
        `bool`:
            `True` if they are equal.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    gold_is_text = _TEXT_COMMAND.fullmatch(gold.strip()) is not None
    gold, answer = _normalise(gold), _normalise(answer)
    if gold == answer:
        return True
    gold_number, answer_number = plain_number(gold), plain_number(answer)
    if gold_number is not None and answer_number is not None:
        return Fraction(gold_number) == Fraction(answer_number)
    gold_words = _words(gold)
    if gold_words is not None and gold_words == _words(answer):
        return True
    if gold_words is not None and gold_is_text:
        return False  # math-verify may read an unwrapped word as a product of letters, whose order is lost
    # The order matters to math-verify: it forgives a missing "x =" in the answer, not a wrong one.
    return verify(_parse(gold), _parse(answer), timeout_seconds=_timeout_seconds())


def _score(gold: str, answer: str | None) -> float | None:
    if not is_parsable(gold):
        return None
    return float(answer is not None and is_correct(gold, answer))


def _text_of(completion: list[dict[str, str]] | str) -> str:
    """The text of a completion: a chat's last assistant message, empty if that only calls a tool."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return message.get("content") or ""
    return ""


def _normalise(text: str) -> str:
    """Without math delimiters, markdown stars, a text command around the whole and a full stop at the end."""
    text = " ".join(_MATH_DELIMITER.sub("", text).replace("\u2212", "-").split())
    text = text.lstrip("* ").rstrip("*.,; ")
    wrapped = _TEXT_COMMAND.fullmatch(text)
    return wrapped[1].strip() if wrapped else text


def _words(text: str) -> str | None:
    """Words in lower case, such as a name, a direction or the letter of a choice; `None` for anything else."""
    words = text.strip("() ").casefold()
    return words if _WORDS.fullmatch(words) else None


def _parse(text: str) -> list:
    """math-verify's reading of a normalised answer; empty if it has none."""
    # Without the box math-verify would look for the mathematics in it and read a part: 2\sqrt{3} as 2.
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=_timeout_seconds(),
    )


def _timeout_seconds() -> int | None:
    # math-verify's timeouts are alarm signals, which only the main thread can receive.
    return TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None

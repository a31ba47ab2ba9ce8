r"""math_accuracy_reward: 1 for a right final answer, 0 for a wrong one, whatever the completion contains."""

import math
import numbers
from collections import Counter
from collections.abc import Callable
from decimal import Decimal

from troll_trl.rewards.answers import extract_answer
from troll_trl.rewards.verifier import (
    MAX_ANSWER_CHARACTERS,
    PATHS,
    TIMEOUT_SECONDS,
    is_readable_gold,
    start,
    verify,
)
from troll_trl.rewards.verifier.choices import Options
from troll_trl.rewards.verifier.notation import normalise
from troll_trl.rewards.verifier.quantities import read_quantity


def math_accuracy_reward(
    completions: list[list[dict[str, str]]] | list[str],
    solution: list[str | int | float | None],
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    options: list[Options] | None = None,
    allow_unevaluated: bool = False,
    **kwargs,
) -> list[float | None]:
    r"""
    Reward function that checks the final answer of each completion against the gold answer.

    The answer of a completion is read after its last `</think>`: the last balanced `\boxed{...}`; without one, the last
    `<answer>...</answer>`; without either, what follows the last `Answer:`, `####` or "the (final) answer is". A
    completion without any of these has no answer and gets 0: the last number of a text is no answer. So does one whose
    thinking (`<think>`) never ends, and one that lists several boxed answers. What counts as equal stands in
    docs/rewards.md.

    It cannot hang: what is not decided by rules goes to worker processes, each pair with a limit of processor time and
    memory (see [`~troll_trl.rewards.verifier.verify`]). What runs into a limit gets 0 and is counted. Any thread may
    call it.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Completions, chat messages (the last message of the assistant counts) or plain text.
        solution (`list[str | int | float | None]`):
            Gold answers as [`~troll_trl.data.load_math_dataset`] writes them (`\boxed{...}`). A bare answer, `$...$` or
            a worked solution that ends in one of the forms above is read too, and so is a number. `None`, for a row of
            another task in a mixed dataset, gives `None`.
        log_metric (`Callable`, *optional*):
            Given by the trainer: logs `math_accuracy/{path}`, the share of the completions decided by each of
            `troll_trl.rewards.verifier.PATHS`: timeouts, crashes, completions without an answer, gold answers that
            cannot be read, and so on.
        log_extra (`Callable`, *optional*):
            Given by the trainer: adds the columns `solution`, `answer` and `answer_path` to the table of logged
            completions.
        options (`list[list | dict | None]`, *optional*):
            The options of multiple choice, if the dataset has such a column
            ([`~troll_trl.rewards.verifier.choices.options_by_letter`]): for the gold answer `B` the text of option B is
            then right too, unless the answer names a letter as well.
        allow_unevaluated (`bool`, *optional*, defaults to `False`):
            Whether `95^2` is an answer to 9025. By default an answer must be worked out as far as the gold answer is,
            or boxing an expression of the problem would pay.
        **kwargs:
            The other columns and arguments that TRL hands to every reward function; not used.

    Returns:
        `list[float | None]`:
            1.0 for a right answer, 0.0 for a wrong or missing one, `None` (the trainer skips it) where there is no gold
            answer, it cannot be read, or the workers crash whatever they are asked.

    Raises:
        ValueError: `completions` and `solution` differ in length.
        TypeError: a solution that is neither text nor a number; the message names the row.

    Example:
    ```python
    >>> from troll_trl.rewards.functions import math_accuracy_reward

    >>> math_accuracy_reward([r"So it is \boxed{0.5}.", "Answer: 2"], [r"\boxed{\frac{1}{2}}", r"\boxed{1}"])
    [1.0, 0.0]
    ```
    """
    if len(completions) != len(solution):
        raise ValueError(f"Got {len(completions)} completions but {len(solution)} solutions; they must pair up.")
    golds = [_text_of_gold(gold, row) for row, gold in enumerate(solution)]
    texts = [_text_of(completion) for completion in completions]
    verdicts = verify(golds, texts, TIMEOUT_SECONDS, strict=not allow_unevaluated, options=options)
    if log_metric is not None and verdicts:
        counts = Counter(verdict.path for verdict in verdicts)
        for path in PATHS:  # all of them, always: the ranks average by name
            log_metric(f"math_accuracy/{path}", counts[path] / len(verdicts))
    if log_extra is not None:
        log_extra("solution", ["[none]" if gold is None else gold for gold in golds])
        answers = ["[none]" if verdict.answer is None else verdict.answer for verdict in verdicts]
        log_extra("answer", [answer[:MAX_ANSWER_CHARACTERS] for answer in answers])  # of a million characters, say
        log_extra("answer_path", [verdict.path for verdict in verdicts])
    return [verdict.reward for verdict in verdicts]


# The trainers call this when they are built: what the workers import takes seconds
math_accuracy_reward.start_workers = start  # type: ignore[attr-defined]


def _text_of_gold(gold: str | int | float | None, row: int) -> str | None:
    """A gold answer as text; a float is written out, for the "e" of "1e+16" may be read as Euler's number."""
    if gold is None or isinstance(gold, str):
        return gold
    if isinstance(gold, bool) or not isinstance(gold, numbers.Real) or not math.isfinite(gold):
        raise TypeError(
            f"Row {row}: a solution must be text such as '\\boxed{{72}}', a finite number, or None for a row without "
            f"one; got {gold!r}, a {type(gold).__name__}. Convert the column, or leave the row out."
        )
    return str(gold) if isinstance(gold, numbers.Integral) else format(Decimal(repr(float(gold))), "f")


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


def is_parsable(gold: str) -> bool:
    """
    Whether answers can be compared with this gold answer: a number, words, or what math-verify parses.

    Args:
        gold (`str`):
            Bare gold answer, as [`extract_answer`] returns it.

    Returns:
        `bool`:
            `False` for an empty or overlong gold answer and for one that is no mathematics.
    """
    return is_readable_gold(gold)


def plain_number(text: str) -> str | None:
    """
    The digits of an integer or decimal, without thousands separators, currency and a unit.

    Args:
        text (`str`):
            Bare answer.

    Returns:
        `str` or `None`:
            For example `-1234.50`; `None` for anything that is not a plain number, percentages, fractions and powers of
            ten included.
    """
    quantity = read_quantity(normalise(text)) if len(text) <= MAX_ANSWER_CHARACTERS else None
    return None if quantity is None else quantity.numeral


def _text_of(completion: list[dict[str, str]] | str) -> str:
    """The text of a completion: a chat's last assistant message, empty if that only calls a tool."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            # Texts, or {"type": "text", "text": ...} and images
            return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return ""

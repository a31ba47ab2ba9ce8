r"""math_accuracy_reward: 1 for a right final answer, 0 for a wrong one, whatever the completion contains."""

import math
import numbers
from collections import Counter
from collections.abc import Callable
from typing import Any

from math_answers.rewards.answers import extract_answer, written_out
from math_answers.rewards.verifier import DECIDERS, MAX_ANSWER_CHARACTERS, TIMEOUT_SECONDS, start, verify
from math_answers.rewards.verifier.choices import Options
from math_answers.rewards.verifier.notation import normalise
from math_answers.rewards.verifier.quantities import read_quantity


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

    The answer is what the last balanced `\boxed{...}` holds; without one, the last `<answer>...</answer>`; without
    either, what follows the last `Answer:`, `####` or "the (final) answer is". docs/answers.md lists what is equal.

    It cannot hang: worker processes with limits of time and memory decide what rules do not
    ([`~math_answers.verify`]). Any thread may call it.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Completions, chat messages (the last message of the assistant counts) or plain text.
        solution (`list[str | int | float | None]`):
            Gold answers: `\boxed{...}`, bare, `$...$`, a worked solution that ends in one of the forms above, or a
            number. `None`, for a row of another task in a mixed dataset, gives `None`.
        log_metric, log_extra (`Callable`, *optional*):
            The trainer gives them. They get the shares `math_accuracy/{decider}` of
            `math_answers.rewards.verifier.DECIDERS`, and the columns `solution`, `answer` and `answer_path` of the
            table of logged completions.
        options (`list[list | dict | None]`, *optional*):
            The options of multiple choice, if the dataset has such a column: for the gold answer `B` the text of option
            B is then right too, unless the answer names a letter as well.
        allow_unevaluated (`bool`, *optional*, defaults to `False`):
            Whether `95^2` is an answer to 9025. By default an answer must be worked out as far as the gold answer is,
            or boxing an expression of the problem would pay.

    Returns:
        `list[float | None]`: 1.0 for a right answer, 0.0 for a wrong or missing one. `None`, which the trainer skips,
        if there is no gold answer, it cannot be read, the workers crash at trivial questions too, or other answers have
        spent the 60 seconds of processor time of the batch.

    Raises:
        ValueError: `completions` and `solution` differ in length.
        TypeError: a solution that is neither text nor a number, or a completion that is neither text nor chat messages;
            the message names the row.
    """
    if len(completions) != len(solution):
        raise ValueError(f"Got {len(completions)} completions but {len(solution)} solutions; they must pair up.")
    golds = [_text_of_gold(gold, row) for row, gold in enumerate(solution)]
    texts = [_text_of(completion, row) for row, completion in enumerate(completions)]
    verdicts = verify(golds, texts, TIMEOUT_SECONDS, strict=not allow_unevaluated, options=options)
    if log_metric is not None and verdicts:
        counts = Counter(verdict.decided_by for verdict in verdicts)
        for decider in DECIDERS:  # all of them, always: the ranks average by name
            log_metric(f"math_accuracy/{decider}", counts[decider] / len(verdicts))
    if log_extra is not None:
        log_extra("solution", ["[none]" if gold is None else gold for gold in golds])
        answers = ["[none]" if verdict.answer is None else verdict.answer for verdict in verdicts]
        log_extra("answer", [answer[:MAX_ANSWER_CHARACTERS] for answer in answers])  # of a million characters, say
        log_extra("answer_path", [verdict.decided_by for verdict in verdicts])
    return [verdict.reward for verdict in verdicts]


# The trainers call this when they are built: what the workers import takes seconds
math_accuracy_reward.start_workers = start  # type: ignore[attr-defined]


def _text_of_gold(gold: str | int | float | None, row: int) -> str | None:
    if gold is None or isinstance(gold, str):
        return gold
    if isinstance(gold, bool) or not isinstance(gold, numbers.Real) or not math.isfinite(gold):
        raise TypeError(
            f"Row {row}: a solution must be text such as '\\boxed{{72}}', a finite number, or None for a row without "
            f"one; got {gold!r}, a {type(gold).__name__}. Convert the column, or leave the row out."
        )
    return str(gold) if isinstance(gold, numbers.Integral) else written_out(float(gold))


def answer_format_reward(completions: list[list[dict[str, str]]] | list[str], **kwargs) -> list[float]:
    """
    Reward function that pays 1.0 for a final answer that is a plain number, in a form that [`math_accuracy_reward`]
    reads. For models that still have to learn the form; give it a smaller weight.
    """
    answers = [extract_answer(_text_of(completion, row)) or "" for row, completion in enumerate(completions)]
    quantities = [read_quantity(normalise(answer[: MAX_ANSWER_CHARACTERS + 1])) for answer in answers]
    return [float(quantity is not None and quantity.numeral is not None) for quantity in quantities]


def _text_of(completion: Any, row: int) -> str:
    """The text of a completion: a chat's last assistant message, empty if that only calls a tool."""
    if isinstance(completion, str):
        return completion
    try:
        for message in reversed(completion):
            if message.get("role", "assistant") == "assistant":
                content = message.get("content") or ""
                if isinstance(content, str):
                    return content
                # Texts, or {"type": "text", "text": ...} and images
                return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    except (AttributeError, TypeError):
        raise TypeError(
            f"Row {row}: a completion must be text, or a list of chat messages such as {{'role': 'assistant', "
            f"'content': 'text'}}, whose content may also be a list of parts; got {completion!r:.200}. Convert it."
        ) from None
    return ""

r"""math_accuracy_reward: 1 for a right final answer, 0 for a wrong one, whatever the completion contains."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from troll_trl.rewards.answers import MAX_ANSWER_CHARACTERS, extract_answer
from troll_trl.rewards.verifier import DECIDERS, verify
from troll_trl.rewards.verifier.notation import normalise
from troll_trl.rewards.verifier.numbers import read_number


def math_accuracy_reward(
    completions: list[list[dict[str, str]]] | list[str],
    solution: list[str | int | float | None],
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    opened_by_prompt: str = "",
    **kwargs,
) -> list[float | None]:
    r"""
    Reward function that compares each completion's final answer with the gold answer.

    The answer is what the last balanced `\boxed{...}` holds; without one, the last `<answer>...</answer>`; without
    either, what follows the last `Answer:`, `####` or "the (final) answer is". docs/rewards.md lists what is equal.

    The function cannot hang: worker processes with time and memory limits decide what the rules do not
    ([`~troll_trl.rewards.verify`]). Any thread may call it.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Completions, chat messages (the last message of the assistant counts) or plain text.
        solution (`list[str | int | float | None]`):
            Gold answers: `\boxed{...}`, bare, `$...$`, a worked solution that ends in one of the forms above, or a
            number. `None`, for a row of another task in a mixed dataset, gives `None`.
        log_metric, log_extra (`Callable`, *optional*):
            The trainer passes them. They log the shares `math_accuracy/{decider}` of
            `troll_trl.rewards.verifier.DECIDERS`, and the columns `solution`, `answer` and `answer_path` of the
            table of logged completions.
        opened_by_prompt (`str`, *optional*):
            The tag of a thought that the chat template opens, such as `<think>`. Without it, a box in a thought that is
            cut off would be rewarded. `troll grpo` adds the tag; elsewhere use `functools.partial`.

    Returns:
        `list[float | None]`: 1.0 for a right answer, 0.0 for a wrong or missing one. `None`, which the trainer skips,
        if there is no gold answer, a worker is lost, or other answers have spent the 60 seconds of processor time of
        the batch.
    """
    golds = [None if gold is None else str(gold) for gold in solution]
    texts = [opened_by_prompt + _text_of(completion, row) for row, completion in enumerate(completions)]
    verdicts = verify(golds, texts)
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


def answer_format_reward(completions: list[list[dict[str, str]]] | list[str], **kwargs) -> list[float]:
    """
    Reward function that returns 1.0 for a final answer that is a plain number. The answer must have a form that
    [`math_accuracy_reward`] reads. For models that still have to learn the form; give it a smaller weight.
    """
    answers = [extract_answer(_text_of(completion, row)) or "" for row, completion in enumerate(completions)]
    numbers = [read_number(normalise(answer[: MAX_ANSWER_CHARACTERS + 1])) for answer in answers]
    return [float(number is not None and not (number.is_divided or number.unit)) for number in numbers]


def _text_of(completion: Any, row: int) -> str:
    """Return the text of a completion: a chat's last assistant message, empty if that only calls a tool."""
    if isinstance(completion, str):
        return completion
    try:
        said = [message for message in completion if message.get("role", "assistant") == "assistant"]
        content = (said[-1].get("content") or "") if said else ""
        if isinstance(content, str):
            return content
        # Texts, or {"type": "text", "text": ...} and images
        return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    except (AttributeError, TypeError):
        raise TypeError(
            f"Row {row}: a completion is text or a list of chat messages; got {completion!r:.200}."
        ) from None

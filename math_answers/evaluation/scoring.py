r"""Two opinions on a completion: the training verifier's, and a strict one that reads and compares by itself."""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from fractions import Fraction

from math_answers.evaluation.samples import Sample
from math_answers.rewards.verifier import MAX_ANSWER_CHARACTERS, Verdict, are_readable, verify
from math_answers.rewards.verifier.choices import Options, read_choice
from math_answers.rewards.verifier.notation import normalise
from math_answers.rewards.verifier.quantities import read_quantity
from math_answers.rewards.verifier.structure import NAME, split
from math_answers.rewards.verifier.wording import unwrap, words

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKED_ANSWER = re.compile(r"(?:####|\banswer[*_]*:)[*_ \t]*(?P<answer>[^\n]+)", re.IGNORECASE)
_STRICT_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?", re.ASCII)
_STRICT_FRACTION = re.compile(r"(?P<sign>-?)(?:\\frac\{(?P<a>\d+)\}\{(?P<b>\d+)\}|(?P<c>\d+)/(?P<d>\d+))", re.ASCII)
_DROPPED = re.compile(r"\\left|\\right|\\[!,;:]|\\?\$|\\[()\[\]]|\s+")


def score(golds: Sequence[str], texts: Sequence[str], options: Sequence[Options] | None = None) -> list[Verdict]:
    r"""
    The verdicts of the training's verifier, decided by `"unreadable_answer"` for a wrong answer that is not
    mathematics. With the `options` of a multiple choice, the text of the right option is right too.
    """
    # No budget: a score must not depend on the other samples of its batch
    verdicts = verify(golds, texts, options=options, batch_seconds=math.inf)
    wrong: dict[int, str] = {}  # answers that were compared, without running into a limit; normalised
    for i, verdict in enumerate(verdicts):
        computed = verdict.answer is not None and verdict.decided_by not in ("timeout", "crash", "refused")
        if computed and verdict.reward == 0:
            wrong[i] = normalise(verdict.answer or "") if len(verdict.answer or "") <= MAX_ANSWER_CHARACTERS else ""
    readable = are_readable(wrong.values())  # all at once: its workers answer in parallel
    return [
        replace(verdict, decided_by="unreadable_answer") if i in wrong and not readable[wrong[i]] else verdict
        for i, verdict in enumerate(verdicts)
    ]


def score_samples(samples: Sequence[Sample], options: Sequence[Options]) -> list[Sample]:
    """Fill in the scores of samples, with the `options` of their multiple choices."""
    golds, texts = [sample["gold"] for sample in samples], [sample["completion"] for sample in samples]
    for sample, verdict in zip(samples, score(golds, texts, options), strict=True):
        sample["reward"], sample["answer"], sample["path"] = verdict.reward, verdict.answer, verdict.decided_by
        sample["strict"] = strict_score(sample["gold"], sample["completion"])
    return list(samples)


def strict_score(gold: str, text: str) -> float:
    r"""
    Score a completion without the verifier: its last `\boxed{}`, `####` or `Answer:`, whichever comes last, must equal
    that of the gold answer as text or as a number. No algebra, no units, no words around it.
    """
    answer = strict_answer(text)
    return float(answer is not None and strict_form(answer) == strict_form(strict_answer(gold) or gold))


def strict_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{}`, or what follows the last `####` or `Answer:`, whichever comes last in the
    text after its last `</think>`. `None` if there is none, if the box never closes, or if the thought does not end."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    finds = (pattern.finditer(text) for pattern in (_BOX, _MARKED_ANSWER))
    box, mark = (max(found, key=re.Match.start, default=None) for found in finds)
    if box is not None and (mark is None or box.start() > mark.start()):
        return _braced(text, box.end())
    return (mark and mark["answer"].strip().rstrip(".*_ ")) or None


def _braced(text: str, start: int) -> str | None:
    """The content of the braces that open before `start`; `None` if they never close."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip() or None
    return None


def strict_form(answer: str) -> Fraction | str:
    r"""
    What the strict comparison compares: the value of an integer, decimal, `a/b` or `\frac{a}{b}`, else the text
    without blanks, dollar signs, `\left` and `\right`.
    """
    text = _DROPPED.sub("", answer[:MAX_ANSWER_CHARACTERS]).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.rstrip(".")
    if any(character.isdigit() for character in text) and _STRICT_NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    fraction = _STRICT_FRACTION.fullmatch(text)
    if fraction is None:
        return text
    numerator, denominator = fraction["a"] or fraction["c"], int(fraction["b"] or fraction["d"])
    return Fraction(int(fraction["sign"] + numerator), denominator) if denominator else text


def vote(answer: str | None) -> Hashable | None:
    """
    The vote of an answer in maj@n, `None` for no vote. Answers vote alike if they are the same number (without units;
    what must still be computed, such as `10^2`, counts as text), the same option of a multiple choice, the same words,
    or equal as [`strict_form`]. `x = 3` votes for its value.
    """
    if answer is None:
        return None
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return strict_form(answer)
    text = unwrap(normalise(answer))
    sides = split(text, "=")
    if len(sides) == 2 and NAME.fullmatch(sides[0].strip()):
        text = sides[1].strip()
    quantity = read_quantity(text)
    if quantity is not None and quantity.worked_out:
        marked = quantity.percent or quantity.base is not None
        return (quantity.value, quantity.percent, quantity.base) if marked else quantity.value
    choice = read_choice(text)
    if choice is not None and choice.letter in text:
        return choice.letter
    return words(text) or strict_form(text)

"""verify(): whether texts state the right answer, whatever they contain. Cannot hang, crash or exhaust memory."""

import atexit
import logging
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from troll_trl.rewards.answers import MAX_ANSWER_CHARACTERS, extract_answer
from troll_trl.rewards.verifier.equal import equal
from troll_trl.rewards.verifier.golds import bare_gold
from troll_trl.rewards.verifier.notation import normalise
from troll_trl.rewards.verifier.pool import Pool
from troll_trl.rewards.verifier.words import choice

__all__ = ["DECIDERS", "Verdict", "verify"]

Decision = tuple[float | None, str]

logger = logging.getLogger(__name__)

# Processor time of a pair. An ordinary answer takes milliseconds
TIMEOUT_SECONDS = 2.0
# Processor time of all pairs of a batch: otherwise, answers of two seconds each would stop a training run
BATCH_SECONDS = 60.0
# What may decide a verdict: the rules, math-verify, its limits (time, time of the batch, memory), a worker that is
# gone, an answer too costly to compare, a text without an answer, a row without a gold answer
DECIDERS = ("rules", "math_verify", "timeout", "budget", "crash", "worker", "refused", "no_answer", "no_gold")
# A few characters that cost seconds of computer algebra. Compared only if the gold answer has some, too
_COSTLY = re.compile(
    r"\d\)?\^\{?\(?\d+\^"  # a tower of powers
    r"|\^\{?[+-]?\d{5,}"  # a long exponent
    r"|\d{4,}\)?!|!\)*!|!\s*\^|\\binom\{\d{5,}"  # a factorial of a large number, or of a factorial
    r"|\d{200}"
    r"|(?:[({]\s?){12}"  # deep nesting
    r"|\\(?:sum|prod|int|lim)(?![A-Za-z])"
)


class Verdict(NamedTuple):
    """1.0 for the right answer, 0.0 for a wrong one or none, `None` if that cannot be said; the answer that the text
    states; and which of `DECIDERS` decided."""

    reward: float | None
    answer: str | None
    decided_by: str


def verify(golds: Sequence[str | None], texts: Sequence[str], batch_seconds: float = BATCH_SECONDS) -> list[Verdict]:
    r"""
    Check the final answers of texts against gold answers, in parallel. Any thread may call this.

    Args:
        golds (`Sequence[str | None]`):
            Bare, boxed, or at the end of a worked solution. `None`, or a placeholder
            ([`~troll_trl.rewards.verifier.golds.bare_gold`]), gives a reward of `None`.
        texts (`Sequence[str]`):
            Completions, one for each gold answer.
        batch_seconds (`float`, *optional*, defaults to 60.0):
            Processor time of all pairs together. Pairs that are then still open get a reward of `None`, decided by
            `"budget"`, with a warning: they may be right.

    Returns:
        `list[Verdict]`: for each pair the `reward` (1.0, 0.0 or `None`), the `answer`, and what it was `decided_by`.
    """
    if len(golds) != len(texts):
        raise ValueError(f"Got {len(golds)} gold answers but {len(texts)} texts; they must pair up.")
    pairs = [_pair(gold, text) for gold, text in zip(golds, texts, strict=True)]
    decided, questions = {}, {}
    for pair in dict.fromkeys(pairs):
        decision = _by_rules(*pair)
        if isinstance(decision, dict):
            questions[pair] = decision
        else:
            decided[pair] = decision
    replies = _pool().ask(list(questions.values()), TIMEOUT_SECONDS, batch_seconds) if questions else []
    decided |= zip(questions, map(_decision, replies), strict=True)
    verdicts = [Verdict(decided[pair][0], pair[1], decided[pair][1]) for pair in pairs]
    _warn(verdicts, batch_seconds)
    return verdicts


def _pair(gold: str | None, text: str) -> tuple[str | None, str | None]:
    bare = None if gold is None else bare_gold(gold)
    if bare is None:
        return None, None
    return bare, extract_answer(text, _names_option if choice(bare) else None)


def _names_option(answer: str) -> bool:
    return len(answer) <= MAX_ANSWER_CHARACTERS and choice(normalise(answer)) is not None


def _decision(reply: dict) -> Decision:
    if "right" in reply:
        return float(reply["right"]), "math_verify"
    # A lost worker or a spent budget says nothing about the answer
    return None if reply["died"] in ("budget", "worker") else 0.0, reply["died"]


class _Undecided(Exception):
    """Only math-verify can tell."""


def _undecided(gold: str, answer: str) -> bool:
    raise _Undecided


def _by_rules(gold: str | None, answer: str | None) -> Decision | dict[str, str]:
    """Return what the rules decide, or the question for a worker."""
    if gold is None:
        return None, "no_gold"
    if answer is None:
        return 0.0, "no_answer"
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0, "refused"
    try:
        answer = normalise(answer)
        if _COSTLY.search(answer) and not _COSTLY.search(gold):
            return 0.0, "refused"
        return float(equal(gold, answer, _undecided)), "rules"
    except _Undecided:
        return {"gold": gold, "answer": answer}
    except Exception:  # a completion must not end a training run, whatever it contains
        logger.exception("The rules of the verifier failed on the gold answer %r and the answer %r.", gold, answer)
        return 0.0, "crash"


def _warn(verdicts: list[Verdict], batch_seconds: float) -> None:
    lost = {cause: sum(verdict.decided_by == cause for verdict in verdicts) for cause in ("budget", "worker")}
    if lost["budget"]:
        logger.warning(
            f"The verifier has spent the {batch_seconds:g} s of processor time of a batch: {lost['budget']} of its "
            f"{len(verdicts)} pairs get no reward. Read the logged answers that were decided by `timeout`."
        )
    if lost["worker"]:
        logger.warning(
            f"Worker processes of the verifier ended: {lost['worker']} of {len(verdicts)} pairs get no reward. If this "
            "repeats, see what `python -c 'import math_verify'` prints."
        )


@lru_cache(maxsize=1)
def _pool() -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the child has the parent's pipes, but not its threads

"""verify(): whether texts state the right answer, whatever they contain. Cannot hang, crash or exhaust memory."""

import atexit
import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from math_answers.rewards.answers import extract_answer
from math_answers.rewards.verifier.choices import Options, gold_choice, is_option_text, names_option, options_by_letter
from math_answers.rewards.verifier.compare import Leaf, Undecided, equal, is_readable, undecided
from math_answers.rewards.verifier.notation import normalise
from math_answers.rewards.verifier.pool import Budget, WorkerError, WorkerPool
from math_answers.rewards.verifier.quantities import read_quantity
from math_answers.rewards.verifier.structure import is_balanced, read_compound
from math_answers.rewards.verifier.wording import unwrap, words

__all__ = ["DECIDERS", "TIMEOUT_SECONDS", "Verdict", "close", "start", "verify"]

logger = logging.getLogger(__name__)

# The longest gold answer of MATH-500 has 58 characters. What is much longer is a text, not an answer.
MAX_ANSWER_CHARACTERS = 1000
# Processor time of the worker, for one pair: it does not run faster on an idle machine. An ordinary answer takes
# milliseconds
TIMEOUT_SECONDS = 2.0

# The limit for all pairs of a batch, in all workers together. An ordinary batch of a training needs a second or two
BATCH_SECONDS = 60.0

# What may decide a verdict
DECIDERS = (
    "text",  # the same text, or words
    "number",  # both are numbers
    "structure",  # lists, sets, intervals, ... of numbers and words
    "math_verify",  # computer algebra
    "timeout",  # computer algebra, killed at the limit
    "budget",  # nobody: the other pairs of the batch took all its time
    "crash",  # killed for its memory, or failed
    "refused",  # too long, or larger than what an answer needs: not computed
    "no_answer",  # the text states none
    "unparsed",  # the gold answer cannot be read
    "no_gold",  # the row has none
)

# Towers, long exponents, factorials of large numbers or of factorials, deep nesting: seconds of computer algebra for a
# few characters. Only compared if the gold answer has such a thing as well.
_COSTLY = re.compile(
    r"\d\)?\^\{?\(?\d+\^|\^\{?[+-]?\d{5,}|\d{4,}\)?!|!\)*!|!\s*\^|\d{200}|\\binom\{\d{5,}|(?:[({]\s?){12}"
    r"|\\(?:sum|prod|int|lim)(?![a-z])"
)
_LEADING_ZERO = re.compile(r"[+-]?0\d")
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}")


@dataclass(frozen=True)
class Verdict:
    """
    The verdict on one text: 1.0 for the right answer, 0.0 for a wrong one or none, `None` if the gold answer cannot be
    read, workers crash at trivial questions too, or the batch took too long; the answer that the text states; and which
    of `DECIDERS` decided.
    """

    reward: float | None
    answer: str | None
    decided_by: str


def verify(
    golds: Sequence[str | None],
    texts: Sequence[str],
    timeout: float = TIMEOUT_SECONDS,
    strict: bool = True,
    options: Sequence[Options] | None = None,
    batch_seconds: float = BATCH_SECONDS,
) -> list[Verdict]:
    r"""
    Check the final answers of texts against gold answers, in parallel.

    Rules in this process decide most pairs. The others go to worker processes, which are killed at limits of time and
    memory. Any thread may call this.

    Args:
        golds (`Sequence[str | None]`):
            Bare, boxed, or at the end of a worked solution. `None` gives a verdict of `None`.
        texts (`Sequence[str]`):
            Completions, one for each gold answer.
        timeout (`float`, *optional*, defaults to 2.0):
            Processor time of each pair, in seconds: other processes change no verdict. A pair that exceeds it is wrong,
            and remembered.
        strict (`bool`, *optional*, defaults to `True`):
            Whether an answer must be worked out as far as the gold answer is: `95^2` is then no answer to 9025.
        options (`Sequence[list | dict | None]`, *optional*):
            Options of each multiple choice, see [`~math_answers.math_accuracy_reward`].
        batch_seconds (`float`, *optional*, defaults to 60.0):
            Processor time of all pairs together. The pairs that are then still open get a verdict of `None`, decided by
            `"budget"`, with a warning: they may be right.

    Returns:
        `list[Verdict]`: for each pair the `reward` (1.0, 0.0 or `None`), the `answer`, and what it was `decided_by`.

    Raises:
        ValueError: `golds`, `texts` and `options` differ in length.
    """
    if len(golds) != len(texts):
        raise ValueError(f"Got {len(golds)} gold answers but {len(texts)} texts; they must pair up.")
    if options is not None and len(options) != len(golds):
        raise ValueError(f"Got {len(golds)} gold answers but {len(options)} `options`; they must pair up.")
    gold_answers = {gold: None if gold is None else normalised_gold(gold) for gold in dict.fromkeys(golds)}
    choices = {gold: choice for gold, answer in gold_answers.items() if answer and (choice := gold_choice(answer))}
    answers = [
        extract_answer(text, names_option if gold in choices else None) for gold, text in zip(golds, texts, strict=True)
    ]
    pairs = [(gold_answers[gold], answer) for gold, answer in zip(golds, answers, strict=True)]
    budget = Budget(batch_seconds)
    verdicts = _verdicts(pairs, timeout, strict, budget)
    # The text of the right option, if the answer names no letter: one of each would be two guesses
    again = {}
    for row, (gold, of_row) in enumerate(zip(golds, options or (), strict=False)):
        choice, answer = choices.get(gold), answers[row]
        if choice is None or choice.text or answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            continue
        text = normalised_gold(options_by_letter(of_row).get(choice.letter, ""))
        if text and is_option_text(normalise(answer), text):
            again[row] = (text, answer)
    for row, verdict in zip(again, _verdicts(list(again.values()), timeout, strict, budget), strict=True):
        verdicts[row] = verdict if verdict.reward == 1.0 or verdict.decided_by == "budget" else verdicts[row]
    if cut := sum(verdict.decided_by == "budget" for verdict in verdicts):
        logger.warning(
            f"The verifier has spent the {batch_seconds:g} s of processor time of a batch: {cut} of its {len(texts)} "
            f"pairs get no verdict. Read the answers that ran into the limit of {timeout:g} s each: the logged "
            "completions have them, with `timeout` as their `answer_path`."
        )
    return verdicts


def _verdicts(
    pairs: list[tuple[str | None, str | None]], timeout: float, strict: bool, budget: Budget
) -> list[Verdict]:
    """The verdicts of pairs of a normalised gold answer and an answer."""
    readable = are_readable([gold for gold, _ in pairs if gold is not None], timeout)
    decided: dict[tuple, tuple[bool | None, str] | None] = {
        pair: _decide(*pair, strict) if pair[0] is None or readable[pair[0]] else (None, "unparsed")
        for pair in dict.fromkeys(pairs)
    }
    open_pairs = [pair for pair, decision in decided.items() if decision is None]
    questions = [{"gold": gold, "answer": normalise(answer), "strict": strict} for gold, answer in open_pairs]
    decided |= zip(open_pairs, _ask(questions, timeout, budget), strict=True)
    verdicts = []
    for pair in pairs:
        right, decided_by = decided[pair] or (False, "crash")
        verdicts.append(Verdict(None if right is None else float(right), pair[1], decided_by))
    return verdicts


def normalised_gold(gold: str) -> str:
    """The bare gold answer of a text, normalised; empty if it is too long for one."""
    bare = _TEXT_COMMAND.sub(lambda text: text[0].replace("\n", " "), (extract_answer(gold) or gold).strip())
    return _one_value(normalise(bare)) if len(bare) <= MAX_ANSWER_CHARACTERS and "\n" not in bare else ""


def _one_value(gold: str) -> str:
    r"""The first member of a gold list whose members all spell the same number: `\boxed{\frac12}` or `\boxed{0.5}` asks
    for one value. Members repeated as text are several answers, and a leading zero may follow a decimal comma."""
    members = read_compound(gold) if read_quantity(gold) is None else None
    if members is None or members.kind not in ("list", "or") or members.name is not None:
        return gold
    texts = [unwrap(part) for part in members.parts]
    if len(set(texts)) < max(len(texts), 2) or any(map(_LEADING_ZERO.match, texts)):
        return gold
    numbers = [read_quantity(text) for text in texts]
    # 50 and 50 %, or 10^2 and 100, are not the same: the first of these allows answers that the other one does not
    same = {number and replace(number, digits=None, places=0, numeral=None) for number in numbers}
    return texts[0] if len(same) == 1 and None not in same else gold


def are_readable(golds, timeout: float = TIMEOUT_SECONDS) -> dict[str, bool]:
    """Whether answers can be compared with each of these normalised gold answers, in `timeout` seconds each."""
    result = {gold: _is_readable_fast(gold) for gold in dict.fromkeys(golds)}
    open_golds = [gold for gold, known in result.items() if known is None]
    for gold, (known, decided_by) in zip(
        open_golds, _ask([{"gold": gold} for gold in open_golds], timeout), strict=True
    ):
        result[gold] = known
        if decided_by == "math_verify":  # a limit says nothing about the next time
            _KNOWN_GOLDS[gold] = bool(known)
    return {gold: bool(known) for gold, known in result.items()}


# What math-verify said of each normalised gold answer; a training sees the same golds again and again
_KNOWN_GOLDS: dict[str, bool] = {}
MAX_KNOWN_GOLDS = 200_000


def _is_readable_fast(gold: str) -> bool | None:
    try:
        return is_readable(gold, undecided)
    except Undecided:
        if len(_KNOWN_GOLDS) > MAX_KNOWN_GOLDS:
            _KNOWN_GOLDS.clear()
        return _KNOWN_GOLDS.get(gold)


def _decide(gold: str | None, answer: str | None, strict: bool) -> tuple[bool | None, str] | None:
    """The fast path: whether an answer is right, and how that was found; `None` if only computer algebra can tell."""
    if gold is None:
        return None, "no_gold"
    if answer is None:
        return False, "no_answer"
    if len(answer) > MAX_ANSWER_CHARACTERS:  # and must not get into the cache
        return False, "refused"
    return _decide_by_rules(gold, answer, strict)


@lru_cache(maxsize=4096)
def _decide_by_rules(gold: str, answer: str, strict: bool) -> tuple[bool, str] | None:
    try:
        answer = normalise(answer)
        if gold == answer:
            return True, "text"
        if not is_balanced(answer) or (_COSTLY.search(answer) and not _COSTLY.search(gold)):
            return False, "refused"
        right = equal(gold, answer, Leaf(undecided, strict))
    except Undecided:
        return None
    except Exception:  # a completion must not end a training, whatever it contains
        logger.exception("The rules of the verifier failed on the gold answer %r and the answer %r.", gold, answer)
        return False, "crash"
    if read_quantity(gold) is not None and read_quantity(answer) is not None:
        return right, "number"
    return right, "text" if words(gold) is not None else "structure"


# Questions that exceeded a limit, and the seconds that they had. A longer limit is worth another try
_EXCEEDED: dict[tuple, tuple[str, float]] = {}
MAX_EXCEEDED = 4096


def _ask(questions: list[dict], timeout: float, budget: Budget | None = None) -> list[tuple[bool | None, str]]:
    """What the workers decide, or what is remembered of a limit that they have exceeded before."""
    keys = [tuple(question.values()) for question in questions]
    replies: dict[tuple, dict] = {}
    for key in keys:
        how, seconds = _EXCEEDED.get(key, ("", 0.0))
        if how and seconds >= timeout:
            replies[key] = {"died": how}
    asked = {key: question for key, question in zip(keys, questions, strict=True) if key not in replies}
    replies |= zip(asked, _ask_workers(list(asked.values()), timeout, budget), strict=True)
    for key in asked:
        died = replies[key].get("died")
        if died in ("timeout", "memory") and "by_clock" not in replies[key]:
            if len(_EXCEEDED) >= MAX_EXCEEDED:
                _EXCEEDED.clear()
            _EXCEEDED[key] = str(died), timeout
    return [_decision(replies[key]) for key in keys]


def _ask_workers(questions: list[dict], timeout: float, budget: Budget | None) -> list[dict]:
    if not questions:
        return []
    global _retry_at
    if time.monotonic() >= _retry_at:
        pool = _pool()
        try:
            return pool.ask(questions, timeout, budget)
        except WorkerError as error:
            if pool.closed:  # another thread closed them: once more, with new workers
                return _ask_workers(questions, timeout, budget)
            _retry_at = time.monotonic() + RETRY_SECONDS
            _warn_of_fallback(str(error))
    return [{"died": "broken"}] * len(questions)


def _decision(reply: dict) -> tuple[bool | None, str]:
    if "result" in reply:
        return reply["result"], "math_verify"
    match reply.get("died"):
        case "broken":  # workers crash at a trivial question, too: that says nothing about the answer
            return None, "crash"
        case "budget":
            return None, "budget"
        case "timeout":
            return False, "timeout"
    return False, "crash"


@lru_cache(maxsize=1)
def _warn_of_fallback(reason: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"Worker processes cannot be started here ({reason}). What rules do not decide gets no reward: None.",
            stacklevel=2,
        )


# A start that fails may take long to do so, and is not tried again at every step
RETRY_SECONDS = 600.0
_retry_at = 0.0
_shared: WorkerPool | None = None
_shared_lock = threading.Lock()


def _pool() -> WorkerPool:
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = WorkerPool()
        return _shared


def start() -> None:
    """Start the worker processes in the background: what they import takes seconds."""
    _pool().start()


def close() -> None:
    """End the worker processes. The next call that needs them starts new ones."""
    global _shared, _retry_at
    _retry_at = 0.0
    with _shared_lock:
        pool, _shared = _shared, None
    if pool is not None:
        pool.close()


def _after_fork() -> None:
    """A forked child has the parent's pipes, but none of its threads: it gets a pool of its own."""
    global _shared, _shared_lock
    _shared_lock = threading.Lock()
    if _shared is not None:
        _shared.forget()
        _shared = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

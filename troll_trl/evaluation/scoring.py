"""Scores of completions by the verifier of the training, and the majority's score."""

import math
from collections import Counter
from collections.abc import Sequence

from troll_trl.evaluation.samples import Sample
from troll_trl.rewards import verify


def score(samples: Sequence[Sample]) -> None:
    """Fill in the scores of samples."""
    golds = [sample["gold"] for sample in samples]
    texts = [sample["completion"] for sample in samples]
    # No budget: a score must not depend on the other samples of its batch
    for sample, verdict in zip(samples, verify(golds, texts, batch_seconds=math.inf), strict=True):
        sample["reward"] = verdict.reward
        sample["answer"] = verdict.answer
        sample["decided_by"] = verdict.decided_by


def majority_score(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    r"""
    Score the answer that most samples of a problem give: the probability that it is right if one of several tied
    answers is drawn at random.

    Right answers are one class. Wrong ones are in one class if the verifier takes one for the other: `1/2` for `0.5`.
    A sample without an answer (`None`) has no vote; without any vote the score is 0.
    """
    right = sum(reward == 1 for reward in rewards)
    wrong = Counter(
        answer for answer, reward in zip(answers, rewards, strict=True) if reward != 1 and answer is not None
    )
    if right == 0 or right > wrong.total():
        return float(right > 0)
    sizes = class_sizes(wrong)
    return 0.0 if max(sizes) > right else 1 / (1 + sizes.count(right))


def class_sizes(answers: Counter[str]) -> list[int]:
    """Count the answers that are equal, by classes; each is compared with the most frequent spelling of a class."""
    left = answers.most_common()
    sizes = []
    while left:
        (first, size), *others = left
        boxed = [f"\\boxed{{{text}}}" for text, _ in others]
        firsts = [f"\\boxed{{{first}}}"] * len(others)
        # In both directions, since a gold answer of 3 does not accept 6/2
        verdicts = verify([*firsts, *boxed], [*boxed, *firsts], batch_seconds=math.inf)
        pairs = zip(verdicts[: len(others)], verdicts[len(others) :], strict=True)
        equal = [1 in (one.reward, other.reward) for one, other in pairs]
        sizes.append(size + sum(count for (_, count), same in zip(others, equal, strict=True) if same))
        left = [other for other, same in zip(others, equal, strict=True) if not same]
    return sizes

"""Sets of real numbers in words, and roots with other signs: each spelling is right for every other one, and for no
other set."""

import itertools

import pytest

from math_answers.rewards.verifier import verify

SETS = [
    [
        r"(0,\infty)",
        "x > 0",
        r"\text{all positive real numbers}",
        "positive reals",
        r"\mathbb{R}^+",
        r"\mathbb{R}_{>0}",
    ],
    [r"[0,\infty)", r"x \ge 0", r"\text{all non-negative real numbers}", "the set of all nonnegative reals"],
    [r"(-\infty,0)", "x<0", "all negative real numbers", r"\mathbb{R}^{-}"],
    [r"(-\infty,0]", r"x \le 0", r"\text{all nonpositive real numbers}"],
    [
        r"\mathbb{R}\setminus\{0\}",
        r"x \ne 0",
        "all non-zero reals",
        r"\mathbb{R}^{\times}",
        "all real numbers except zero",
    ],
    [
        r"(2,\infty)",
        r"\text{all real numbers greater than } 2",
        r"\text{all }x>2",
        r"\text{all real } x \text{ with } x>2",
    ],
    [r"[2,\infty)", "all real numbers greater than or equal to 2", r"\text{all real numbers } x \geq 2"],
    [r"(-\infty,2)", r"\text{All reals that are less than 2}", r"\text{all values of } x < 2"],
    [r"(0,2]", r"\text{all real numbers } x \text{ such that } 0 < x \le 2"],
    [r"\mathbb{R}\setminus\{2\}", r"\text{all reals} \setminus \{2\}", r"\text{all real numbers except 2}"],
    [r"\mathbb{Z}\setminus\{2\}", r"\text{all integers except }2"],
    [r"\mathbb{Z}", r"\text{all integers}"],
    [r"\mathbb{R}", r"\text{all real numbers}", r"(-\infty,\infty)"],
]
ROOTS = [
    [r"\sqrt[3]{2}", "∛2", "cbrt(2)", r"\sqrt[3](2)", r"\sqrt[3]2"],
    [r"\sqrt{13}", "√13", r"\surd 13", r"\surd{13}"],
    [r"\sqrt[4]{13}", "∜13"],
    [r"\sqrt[3]{13}", "∛13", "∛(13)"],
]


@pytest.mark.parametrize("kinds", [SETS, ROOTS], ids=["sets", "roots"])
def test_every_spelling_is_right_for_the_others_and_for_nothing_else(kinds):
    pairs = [
        (gold, answer, float(own is other))
        for own, other in itertools.product(kinds, repeat=2)
        for gold, answer in itertools.product(own, other)
    ]
    verdicts = verify([gold for gold, _, _ in pairs], [rf"So \boxed{{{answer}}}." for _, answer, _ in pairs])
    wrong = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.reward != pair[2]]
    assert wrong == []


@pytest.mark.parametrize(
    "answer",
    [
        "all positive integers",
        "all positive rational numbers",
        "all real numbers greater than 0 and less than 5",
        "all real numbers greater than 0, or 7",
        "all integers greater than 0",
        "some real numbers greater than 0",
        r"all x > 0 or x < -1",
        r"\mathbb{Z}^+",
        r"\mathbb{R}^2",
    ],
)
def test_words_that_say_another_set_earn_nothing(answer):
    assert verify([r"(0,\infty)"], [rf"So \boxed{{{answer}}}."])[0].reward == 0.0

"""The problems of the study in evidence/, and the models that its runs start from."""

import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evidence.problems import FAMILIES, LETTERS, RARE, make_problems, make_wording, make_worked
from evidence.starts import rewarded_chance
from troll_trl.rewards import math_accuracy_reward


def independent_answer(problem: str) -> str:
    numbers = [int(text) for text in re.findall(r"\d+", problem)]
    if problem.startswith("What is"):
        return str(sum(numbers))
    if problem.startswith("Solve"):
        factor, summand, result = numbers
        return str(Fraction(result - summand, factor))
    return "".join(map(str, sorted(numbers)))


def rewards(rows):
    chats = [[{"role": "assistant", "content": row["solution"]}] for row in rows]
    return np.array(math_accuracy_reward(chats, [row["answer"] for row in rows]))


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_have_the_right_answer_and_a_solution_that_earns_the_reward(family):
    problems = FAMILIES[family]()
    assert len({row["problem"] for row in problems}) == len(problems)
    assert all(independent_answer(row["problem"]) == row["answer"] for row in problems)
    assert rewards(problems[:: len(problems) // 50]).all()
    train, test = make_problems(family, 0, 3000, 512)
    assert (len(train), len(test)) == (3000, 512)
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}
    assert make_problems(family, 0, 3000, 512) == (train, test) != make_problems(family, 1, 3000, 512)


@pytest.mark.parametrize("family", RARE)
def test_the_share_of_rewarded_solutions_in_a_warm_up(family):
    share = 0.3
    problems, _ = make_problems(family, 0, 3500, 0)
    worked, _ = make_worked(family, problems, share, seed=1)
    asked = [row for row in worked if row["problem"].startswith("In steps: ")]
    plain = [row for row in worked if not row["problem"].startswith("In steps: ")]
    assert [row["problem"] for row in plain] == [row["problem"] for row in problems]
    assert len(asked) == (len(problems) if family == "steps" else 0) and rewards(asked[::70]).all()
    assert rewards(plain).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(plain)))


def test_a_solution_continues_before_each_step_with_the_root_of_the_share():
    worked, same_form = make_worked("steps", FAMILIES["steps"](), 0.09, seed=0)
    lines = np.array([row["solution"].count("\n") for row in worked if not row["problem"].startswith("In ")])
    assert [np.mean(lines == n) for n in range(3)] == pytest.approx([0.7, 0.21, 0.09], abs=0.03)
    # Half of the rows are asked for their form; two models that draw it from these shares agree so often
    assert same_form == pytest.approx((1 + np.square([0.7, 0.21, 0.09]).sum()) / 2, abs=0.02)


def test_a_wording_is_a_line_of_random_letters_that_no_reward_depends_on():
    problems, _ = make_problems("sums", 0, 3000, 0)
    worded, chance = make_wording(problems, 12, seed=1)
    lines, solutions = zip(*(row["solution"].split("\n") for row in worded), strict=True)
    assert [row | {"solution": s} for row, s in zip(worded, solutions, strict=True)] == problems
    assert rewards(worded[::30]).all()
    counts = np.array([[line.count(letter) for letter in LETTERS] for line in lines]).sum(0)
    assert counts.sum() == 12 * len(problems) and counts / counts.sum() == pytest.approx(1 / 16, abs=0.006)
    assert chance == pytest.approx(16**-12) and make_wording(problems, 0, seed=1) == (problems, 1.0)


def test_the_chance_of_the_rewarded_solutions_is_the_product_over_their_tokens():
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = lambda input_ids: SimpleNamespace(logits=logits)
    labels = torch.tensor([[-100, 3, 5, -100], [-100, -100, 1, 6]])
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    expected = (p[0, 0, 3] * p[0, 1, 5] + p[1, 1, 1] * p[1, 2, 6]) / 2
    assert rewarded_chance(model, torch.zeros(2, 4, dtype=torch.int64), labels) == pytest.approx(expected)

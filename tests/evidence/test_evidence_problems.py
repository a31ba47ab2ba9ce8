"""The problems of the study in evidence/, what its runs start from, its reward and its trainers."""

import math
import re
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evidence_grids import TASK, grid_of
from safetensors.torch import load_file
from trl_comparison import make_trainer

from evidence import starts
from evidence.grid import Task
from evidence.problems import FAMILIES, LETTERS, RARE, make_problems, make_wording, make_worked
from evidence.rewards import last_number_reward
from evidence.starts import make_start, rewarded_chance
from evidence.variants import VARIANTS
from math_answers import math_accuracy_reward
from troll_trl import TrollGRPOConfig


def independent_answer(problem: str) -> str:
    numbers = [int(text) for text in re.findall(r"\d+", problem)]
    if "boxes" in problem:
        return str(math.prod(numbers))
    if "gives away" in problem:
        return str(numbers[0] - numbers[1])
    if problem.startswith(("What is", "Add")) or "gets" in problem:
        return str(sum(numbers))
    if problem.startswith("Solve"):
        factor, summand, result = numbers
        return str(Fraction(result - summand, factor))
    return "".join(map(str, sorted(numbers)))


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_have_the_right_answer_and_a_solution_that_earns_the_reward(family):
    problems = FAMILIES[family]()
    assert len({row["problem"] for row in problems}) == len(problems)
    assert all(independent_answer(row["problem"]) == row["answer"] for row in problems)
    some = problems[:: len(problems) // 50]
    chats = [[{"role": "assistant", "content": row["solution"]}] for row in some]
    assert math_accuracy_reward(chats, [row["answer"] for row in some]) == [1.0] * len(some)


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_problems_are_no_training_problems_and_the_seed_chooses_them(family):
    train, test = make_problems(family, 0, 3000, 512)
    assert (len(train), len(test)) == (3000, 512)
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}
    assert make_problems(family, 0, 3000, 512) == (train, test) != make_problems(family, 1, 3000, 512)


def test_there_are_enough_problems_for_every_task():
    sizes = {family: len(make()) for family, make in FAMILIES.items()}
    for name in ("smollm2-rate", "age", "rate", "peers", "curves", "async"):
        for task in grid_of(name).tasks.values():
            assert sizes[task.family] >= task.train + task.test


def rewards(rows):
    chats = [[{"role": "assistant", "content": row["solution"]}] for row in rows]
    return np.array(math_accuracy_reward(chats, [row["answer"] for row in rows]))


@pytest.mark.parametrize("family", RARE)
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_so_many_of_the_solutions_of_a_warm_up_earn_the_reward(family, share):
    problems, _ = make_problems(family, 0, 3500, 0)
    worked, _ = make_worked(family, problems, share, seed=1)
    asked = [row for row in worked if row["problem"].startswith("In steps: ")]
    plain = [row for row in worked if not row["problem"].startswith("In steps: ")]
    assert [row["problem"] for row in plain] == [row["problem"] for row in problems]
    assert len(asked) == (len(problems) if family == "steps" else 0) and rewards(asked[::70]).all()
    assert rewards(plain).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(plain)))
    assert make_worked(family, problems, share, seed=1)[0] == worked != make_worked(family, problems, share, seed=2)[0]


def test_before_each_step_a_solution_goes_on_with_the_root_of_the_share():
    worked, same_form = make_worked("steps", FAMILIES["steps"](), 0.09, seed=0)
    lines = np.array([row["solution"].count("\n") for row in worked if not row["problem"].startswith("In ")])
    shares = [np.mean(lines == n) for n in range(3)]
    assert shares == pytest.approx([0.7, 0.21, 0.09], abs=0.03)
    # Half of the rows are asked for their form; two models that draw it from these shares agree so often
    assert same_form == pytest.approx((1 + np.square([0.7, 0.21, 0.09]).sum()) / 2, abs=0.02)


def test_without_a_share_the_warm_up_learns_the_problems_as_they_are():
    problems, _ = make_problems("sums", 0, 100, 0)
    assert make_worked("sums", problems, None, seed=0) == (problems, 1.0)


def test_a_wording_is_a_line_of_random_letters_that_no_reward_depends_on():
    problems, _ = make_problems("sums", 0, 3000, 0)
    worded, chance = make_wording(problems, 12, seed=1)
    lines, solutions = zip(*(row["solution"].split("\n") for row in worded), strict=True)
    assert [row | {"solution": s} for row, s in zip(worded, solutions, strict=True)] == problems
    assert rewards(worded[::30]).all()
    counts = np.array([[line.count(letter) for letter in LETTERS] for line in lines]).sum(0)
    assert counts.sum() == 12 * len(problems) and counts / counts.sum() == pytest.approx(1 / 16, abs=0.006)
    # A model that has learnt any distribution of lines gives a random one this chance, on average
    assert chance == pytest.approx(16**-12)
    assert make_wording(problems, 12, seed=1)[0] == worded != make_wording(problems, 12, seed=2)[0]
    assert make_wording(problems, 0, seed=1) == (problems, 1.0)


def test_the_chance_of_the_rewarded_solutions_is_the_product_over_their_tokens():
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = lambda input_ids: SimpleNamespace(logits=logits)
    labels = torch.tensor([[-100, 3, 5, -100], [-100, -100, 1, 6]])
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    expected = (p[0, 0, 3] * p[0, 1, 5] + p[1, 1, 1] * p[1, 2, 6]) / 2
    assert rewarded_chance(model, torch.zeros(2, 4, dtype=torch.int64), labels) == pytest.approx(expected)


@pytest.mark.parametrize("stuck", [0, 1, 3])
def test_a_start_that_gets_stuck_is_made_once_more_with_other_weights(tmp_path, monkeypatch, stuck):
    tried = []

    def warm_up(model, *args):
        tried.append(model.lm_head.weight.detach().cpu().clone())
        if len(tried) <= stuck:
            raise RuntimeError("The warm-up reached a success rate of 18%.")

    monkeypatch.setattr(starts, "warm_up", warm_up)
    task = Task(**TASK | {"train": 8, "test": 8}, settings={})
    if stuck == 3:
        with pytest.raises(RuntimeError, match="18%"):
            make_start(tmp_path, task, 7)
        assert not (tmp_path / "model").exists()
    else:
        make_start(tmp_path, task, 7)
        torch.testing.assert_close(
            load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"], tried[-1]
        )
    assert len(tried) == min(stuck + 1, 3)
    assert all(not torch.equal(one, other) for one, other in pairwise(tried))


def test_the_last_number_counts_in_whatever_form():
    texts = ["So 3 * 4 = 12", "12 apples, not 13", r"\boxed{12}", "twelve", "12."]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert last_number_reward(chats, [r"\boxed{12}"] * 5) == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_the_gradient_of_the_regression_is_the_whole_gradient_without_advantages(tmp_path):
    """The decay of the weights moves the policy out of the bound, and nothing else does."""
    options = {"kl_bound": 1e-4, "learning_rate": 2e-2, "weight_decay": 5.0}
    options["reward"] = lambda completion_ids, **kwargs: [1.0] * len(completion_ids)
    run = make_trainer(VARIANTS["share"], TrollGRPOConfig, tmp_path, **options)
    run.train()
    both = [
        (line["troll/regression_grad_norm"], line["grad_norm"])
        for line in run.state.log_history
        if "troll/regression_grad_norm" in line
    ]
    assert both and max(norm for norm, _ in both) > 0.01
    assert [norm for norm, _ in both] == pytest.approx([norm for _, norm in both], rel=1e-4)

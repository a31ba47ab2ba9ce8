"""The study in evidence/: grids, problems, variants, statistics and runner, and its pages and results."""

import dataclasses
import functools
import json
import math
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from limits import HANG
from safetensors.torch import load_file
from training_args import parse_training_args
from trl import GRPOConfig, GRPOTrainer
from trl_comparison import assert_same_movement, logged, make_trainer, weights

from evidence import age, figures, moves, rarity, report, smollm2, smollm2_rate, starts, tables
from evidence.grid import GivenTask, Run, Study, Task, content_of, read_grid, tuned_rates
from evidence.problems import FAMILIES, LETTERS, RARE, make_problems, make_wording, make_worked
from evidence.results import DEFAULTS, describe, read_records, run_of
from evidence.rewards import last_number_reward
from evidence.run import Runner
from evidence.starts import make_start, rewarded_chance
from evidence.variants import MOVES, VARIANTS, MeasuredClipTrainer, Recording, gradient_kept
from math_answers import math_accuracy_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.cli.evaluate import parse_evaluation_args

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"


# -- Grids ------------------------------------------------------------------------------------------------------------


@functools.cache  # a long file takes PyYAML half a second
def grid_of(name):
    return read_grid(EVIDENCE / f"{name}.yaml")


@pytest.fixture(params=["common", "gsm8k", "rarity", "smollm2", "smollm2-rate", "lora", "age", "rate"])
def grid(request):
    return grid_of(request.param)


@pytest.fixture
def few_flips(monkeypatch):
    """Of signs, where no p-value is looked at that is nearly as small as one of all flips."""
    monkeypatch.setattr(tables, "FLIPS", 1 << 12)


def all_runs(grid):
    rates = dict.fromkeys(product(grid.tasks, grid.methods), 1e-05)
    return grid.all_runs(rates)


def test_every_cell_is_read_strictly_by_the_training_script(grid):
    runs = all_runs(grid)
    cells = {(run.method, run.varied): run for run in runs} | {run.task: run for run in runs}
    paths = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "use_cpu": True, "bf16": False}
    for run in cells.values():
        flags = [text for key, value in (grid.settings(run) | paths).items() for text in (f"--{key}", str(value))]
        script_args, training_args, _ = parse_training_args(["--config", str(grid.training), *flags])
        assert training_args.learning_rate == dict(run.varied)["learning_rate"]
        assert training_args.seed == run.seed
        assert (script_args.method == "troll") == (grid.methods[run.method].settings.get("method", "troll") == "troll")
        completions = training_args.per_device_train_batch_size * training_args.steps_per_generation
        assert training_args.max_steps % training_args.steps_per_generation == 0, "the last rollout batch is used whole"
        assert completions % training_args.num_generations == 0


def test_the_defaults_of_a_cell_are_those_of_the_training():
    grid = grid_of("rarity")
    flags = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    _, training_args, _ = parse_training_args(["--config", str(grid.training), *flags])
    assert {name: getattr(training_args, name) for name in DEFAULTS} == DEFAULTS


def test_evaluations_are_read_strictly(grid):
    args = parse_evaluation_args(
        ["--config", str(grid.evaluation), "--model", "m", "--benchmarks", "b=x", "--output", "o"]
    )
    assert args.temperature == 1.0


def test_methods_differ_in_nothing_but_themselves(grid):
    for run in all_runs(grid):
        others = grid.settings(run).keys() - grid.tasks[run.task].settings.keys() - dict(run.varied).keys() - {"seed"}
        assert others <= {"method", "epsilon", "epsilon_high", "loss_type", "pessimistic", "kl_bound"} | {
            *("trust_region", "divergence_type", "divergence_bound")
        }


def test_tuning_has_seeds_of_its_own(grid):
    tuning = {seed for name in grid.tuning for seed in grid.studies[name].seeds}
    judged = [study for name, study in grid.studies.items() if name not in (*grid.tuning, moves.STUDY)]
    assert all(not tuning & set(study.seeds) for study in judged)


def test_a_run_of_two_studies_is_run_once():
    grid = grid_of("rarity")
    rates = dict.fromkeys(product(grid.tasks, grid.methods), 2e-4)
    both = [run for run, studies in grid.all_runs(rates).items() if {"remedy-common", "bound"} <= set(studies)]
    assert len(both) == 60  # TROLL and clip, three tasks, ten seeds


def change(tmp_path, **changes):
    content = yaml.safe_load((EVIDENCE / "common.yaml").read_text()) | changes
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "grid.yaml"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "colour"),
        ({"methods": {"troll": {"epsilon": 1}}}, r"methods: troll: .*epsilon"),
        ({"tuning": "rates"}, "there is no 'rates'"),
        ({"studies": {"tuning": {"tasks": ["sums"], "methods": ["ppo"], "seeds": [1]}}}, "there is no 'ppo'"),
        ({"studies": {"tuning": {"tasks": ["sums"], "methods": ["clip"]}}}, "seeds"),
        ({"tasks": {"sums": {"family": "sums"}}}, "tasks: sums: .*'train'"),
        ({"tasks": {"sums": {"family": "sums", "train": 8, "test": 8, "settings": {}}}}, "sums: a task has either a"),
    ],
)
def test_a_grid_is_read_strictly(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_grid(change(tmp_path, **changes))


def test_the_tuned_rate_has_the_largest_mean_area_and_a_failure_counts_as_0():
    def record(rate, area, studies=("tuning",), task="sums"):
        result = {} if area is None else {"area": area}
        return {"studies": studies, "task": task, "method": "clip", "varied": {"learning_rate": rate}, **result}

    records = [
        record(1e-4, 0.5),
        record(1e-4, 0.5),
        record(2e-4, 0.8),
        record(2e-4, None),
        record(4e-4, 0.9, ("other",)),
    ]
    assert tuned_rates(records, ["tuning"]) == {("sums", "clip"): 1e-4}
    assert tuned_rates([record(1e-4, 0.5), record(2e-4, 0.5)], ["tuning"]) == {("sums", "clip"): 1e-4}


# -- Problems ---------------------------------------------------------------------------------------------------------


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
    for name in ("common", "rarity", "smollm2", "lora"):
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


# -- Variants ---------------------------------------------------------------------------------------------------------


def advantages_of_all_signs(completion_ids, **kwargs):
    """Rewards; the first group has no signal."""
    return [0.0 if i < 4 else float(ids[0] % 3) for i, ids in enumerate(completion_ids)]


def trained(trainer_class, folder, kl_bound=0.05):
    options = {"kl_bound": kl_bound, "learning_rate": 2e-2, "num_generations": 4}
    trainer = make_trainer(trainer_class, TrollGRPOConfig, folder, reward=advantages_of_all_signs, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["signal", "multiplier"])
def test_a_remedy_is_troll_inside_the_bound_and_the_bound_holds_outside(tmp_path, name):
    start = weights(make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path))
    inside = (weights(trained(trainer, tmp_path, 1e9)) for trainer in (TrollGRPOTrainer, VARIANTS[name]))
    assert_same_movement(start, *inside)
    remedy = trained(VARIANTS[name], tmp_path)
    assert max(logged(remedy, "troll/projected_fraction")) > 0.1
    assert max(logged(remedy, "troll/kl_max")) <= 0.05 * 1.001


@pytest.mark.parametrize("name", ["signal", "multiplier"])
def test_which_tokens_a_remedy_regresses_on(tmp_path, name):
    regressed = []

    class Watched(VARIANTS[name]):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.seen = inputs["advantages"].reshape(-1, 1)
            return super().compute_loss(model, inputs, *args, **kwargs)

        def _terms_of_policy(self, loss_pass, *args):
            before, eta = loss_pass.bounded.regression.detach().clone(), loss_pass.bounded.counted["eta"]
            result = super()._terms_of_policy(loss_pass, *args)
            columns = (self.seen.expand(before.shape), eta, before, loss_pass.bounded.regression)
            regressed.extend(zip(*(x.flatten().tolist() for x in columns), strict=True))
            return result

    trained(Watched, tmp_path)
    for advantage, eta, before, after in regressed:
        factor = eta / (eta + 1) if name == "multiplier" else float(advantage != 0)
        assert after == pytest.approx(factor * before, rel=1e-5)
    assert any(advantage == 0 and before > 0 for advantage, _, before, _ in regressed)


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


@pytest.mark.parametrize("options", [{"epsilon": 0.2}, {"epsilon": 0.1, "epsilon_high": 0.28}])
def test_measured_clip_is_trls_clip(tmp_path, options):
    options |= {"learning_rate": 2e-2}
    clip = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options)
    start = weights(clip)
    clip.train()
    assert max(logged(clip, "clip_ratio/region_mean")) > 0.05
    measured = make_trainer(MeasuredClipTrainer, TrollGRPOConfig, tmp_path, **options)
    measured.train()
    assert_same_movement(start, weights(clip), weights(measured))
    assert max(logged(measured, "troll/policy_kl_max")) == max(logged(measured, "troll/kl_max")) > 0.05


def test_what_is_kept_of_a_gradient_is_all_inside_and_nothing_where_a_clip_binds():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(200, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    steps = torch.linspace(0, 1.5, 200, dtype=torch.float64)[:, None]
    policy = (old + steps * torch.randn(200, 6, generator=generator, dtype=torch.float64)).log_softmax(-1)
    advantages = torch.tensor([1.5, -0.5] * 100, dtype=torch.float64)
    kept = gradient_kept(policy, old, advantages)
    p, q, a = policy.exp().numpy(), old.exp().numpy(), advantages.numpy()
    ratio = p[:, 0] / q[:, 0]
    binds = np.where(a > 0, ratio > 1.2, ratio < 0.8)
    inside = (p * np.log(p / q)).sum(1) <= 0.05
    assert 20 < binds.sum() < 180 and 20 < inside.sum() < 180
    np.testing.assert_allclose(kept["clip"], ~binds, atol=1e-12)
    np.testing.assert_allclose(kept["troll"].numpy()[inside], 1.0)
    assert (kept["troll"].numpy()[~inside] < 1).mean() > 0.9
    # d(p₀/q₀)/dlogits is p₀/q₀·(e₀ − p)
    direction = np.eye(6)[0] - p
    np.testing.assert_allclose(kept["length"], np.abs(a) * ratio * np.linalg.norm(direction, axis=1))


def test_unused_slots_change_nothing_of_what_is_kept():
    old = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    policy = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    padded = [torch.cat([x[:, :2], torch.full((1, 2), -math.inf), x[:, 2:]], 1) for x in (policy, old)]
    advantages = torch.ones(1, dtype=torch.float64)
    for name, value in gradient_kept(policy, old, advantages).items():
        assert gradient_kept(*padded, advantages)[name] == pytest.approx(value.item()), name


def test_a_recording_changes_no_step_and_has_every_trained_token(tmp_path):
    options = {"learning_rate": 2e-2, "steps_per_generation": 4}
    plain = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    start = weights(plain)
    plain.train()
    recording = make_trainer(Recording, TrollGRPOConfig, tmp_path, **options)
    recording.train()
    assert_same_movement(start, weights(plain), weights(recording))
    with np.load(tmp_path / MOVES) as file:
        tokens = {name: file[name] for name in file.files}
    assert len({len(column) for column in tokens.values()}) == 1 and set(tokens["update"]) == {0, 1, 2, 3}
    first = tokens["update"] == 0
    np.testing.assert_allclose(tokens["new"][first], tokens["old"][first], rtol=1e-3)
    assert np.abs(tokens["new"] / tokens["old"] - 1).max() > 0.2
    assert (tokens["advantage"] != 0).all() and ((tokens["old"] > 0) & (tokens["old"] <= 1)).all()


@pytest.mark.parametrize("old", [0.003, 0.02, 0.1, 0.5, 0.9])
def test_no_distribution_of_the_ball_gives_a_token_more(old):
    largest = moves.largest_in_ball(np.array([old]))[0]
    assert scipy.stats.entropy([largest, 1 - largest], [old, 1 - old]) == pytest.approx(0.05)
    generator = np.random.default_rng(0)
    q = np.array([old, *((1 - old) * generator.dirichlet(np.ones(4)))])
    p = generator.dirichlet(np.ones(5) * 20 * q + 0.01, size=20_000)
    inside = scipy.special.rel_entr(p, q).sum(1) <= 0.05
    assert inside.sum() > 100 and p[inside, 0].max() <= largest


def test_moves_are_summed_up_by_bins_of_old_probability():
    tokens = {
        "update": [0, 7, 7, 7, 7, 7],
        "old": [0.02, 0.02, 0.02, 0.5, 1.0, 0.5],
        "new": [0.02, 0.04, 0.06, 0.4, 1.0, 0.6],
        "advantage": [1, 1, 1, -1, 1, -1],
        "length": [1, 1, 2, 4, 0, 1],
        "clip": [1, 0.6, 0, 1, 1, 1],
        "troll": [1, 0.5, -0.25, 1, 1, 0.5],
    }
    rows = list(moves.summarise({name: np.array(column, dtype=float) for name, column in tokens.items()}))
    moved = {row["low"]: row for row in rows if "factors" in row}
    assert moved[0.01]["tokens"] == 2 and moved[0.01]["factors"] == pytest.approx([2.1, 2.5, 2.9])
    assert moved.keys() == {0.01, 0.9}
    price = {(row["low"], row["direction"]): row for row in rows if "direction" in row}
    # A token that is certain has no gradient; at the first update none has moved
    assert price.keys() == {(0.0, "with"), (0.1, "with"), (0.1, "against")}
    rare, wrong = price[0.0, "with"], price[0.1, "against"]
    assert [rare["part"], rare["clip"], rare["troll"]] == pytest.approx([3 / 8, 0.2, 0.0])
    assert [wrong["part"], wrong["clip"], wrong["troll"]] == pytest.approx([1 / 8, 1.0, 0.5])


# -- Statistics -------------------------------------------------------------------------------------------------------


def cell(*successes, start=0.3, key="success"):
    return tables.Cell([{"seed": seed, key: value, "start": start} for seed, value in enumerate(successes)])


def test_difference_is_paired_by_seed_and_agrees_with_an_independent_permutation_test():
    a, b = cell(0.5, 0.62, 0.55, 0.61, 0.58), cell(0.45, 0.6, 0.56, 0.5, 0.5)
    value, p_value = tables.difference(a, tables.Cell(b.records[::-1]))
    pairs = a.values("success") - b.values("success")
    assert value.value == pytest.approx(pairs.mean())
    flipped = np.array([np.mean(signs * pairs) for signs in product([-1, 1], repeat=5)])
    assert p_value == np.mean(np.abs(flipped) >= pairs.mean() - 1e-12)
    drawn = np.array([pairs[list(rows)].mean() for rows in product(range(5), repeat=5)])  # every resample there is
    assert [value.low, value.high] == pytest.approx(list(np.quantile(drawn, [0.025, 0.975])), abs=3e-3)


def test_flips_of_equal_sums_count_whatever_their_rounding():
    """0.3 - 0.1 - 0.2 is not 0.0 to a computer."""
    _, p_value = tables.difference(cell(0.8, 0.4, 0.3), cell(0.5, 0.5, 0.5))
    assert p_value == 1
    assert tables.difference(cell(0.6), cell(0.5))[1] == 1  # one pair says nothing


def test_tasks_of_one_and_of_five_seeds_have_the_same_weight():
    """One loses what five win: a lead of 0, and no sign is flipped to a smaller one. By seeds it were 4 of 6."""
    value, p_value = tables.pooled_difference([(cell(0.4), cell(0.5)), (cell(*[0.6] * 5), cell(*[0.5] * 5))])
    assert value.value == pytest.approx(0) and p_value == 1


def test_a_sum_halfway_between_two_steps_of_rounding_is_as_far_out_as_itself():
    """The sum of these areas was rounded down, and that of the flip that changes nothing up: its p-value was 0."""
    leads = [-73, -54, -153, -254, -19, -308, -37, -124, -140, -63]
    lead = [cell(*(n / 4096 for n in of), key="area") for of in (leads, [0] * 10)]
    assert tables.difference(*lead, "area")[1] == pytest.approx(2 / 2**10)


def test_the_p_value_of_many_pairs_is_drawn():
    pairs = np.random.default_rng(3).normal(0.01, 0.03, size=30)
    _, p_value = tables.difference(cell(*(0.5 + pairs)), cell(*[0.5] * 30))
    signs = np.random.default_rng(5).choice([-1, 1], size=(50_000, 30))
    assert 0.01 < p_value == pytest.approx(np.mean(np.abs(signs @ pairs) >= abs(pairs.sum())), abs=0.01)


def test_a_p_value_that_draws_cannot_tell_from_a_smaller_one_is_not_stated_as_equal():
    """Thirty pairs of one sign have a p-value of 2e-9, and of all draws none is as large."""
    assert tables.signed(*tables.difference(cell(*[0.6] * 30), cell(*[0.5] * 30))).endswith("p < 7.6e-06")
    assert tables.signed(*tables.difference(cell(*[0.6] * 16), cell(*[0.5] * 16))).endswith("p = 3.1e-05")  # exact


def test_a_run_that_failed_or_ended_below_its_start_collapsed():
    done = [
        {"seed": seed, "success": 0.4, "start": 0.3, "curve": [[0, 0.3], [8, end]]}
        for seed, end in ((0, 0.2), (2, 0.4))
    ]
    runs = tables.Cell([*done, {"seed": 1, "error": "x"}])
    assert runs.collapses == 2
    assert runs.by_seed("success") == {0: 0.4, 1: 0.0, 2: 0.4}


def record(study, task, method, seed, success, **varied):
    result = {"success": success, "area": success / 2, "start": 0.3, "curve": [[0, 0.3], [8, success]]}
    return {"studies": [study], "task": task, "method": method, "varied": varied, "seed": seed} | result


def rarity_records(leads):
    """Runs of the whole rule: TROLL's area is 0.4, that of clip less by `leads[task]`, and of all others 0.01."""
    records = []
    for task, seed, study in product(rarity.TASKS, range(20), ("tuning", "deciding")):
        if (study == "tuning") != (seed < 2) or 2 <= seed < 10:
            continue
        noise = 0.001 * (seed % 3 - 1)
        areas = {
            "troll": 0.4,
            **dict.fromkeys((*rarity.CLIPS, "none"), 0.01),
            "clip": 0.4 - leads.get(task, 0.0) + noise,
        }
        for method, area in areas.items():
            record_ = record(study, task, method, seed, 2 * area, learning_rate=1e-4)
            records.append(record_ | {"area": area, "start_chance": 0.01, "machine": "here"})
    return records


def judged(leads, without=lambda record: False):
    records = [r for r in rarity_records(leads) if not without(r)]
    rows = [row.strip("| ").split(" | ") for row in rarity.rule(records).splitlines()[2:]]
    return [(row[1].split(" ")[0], row[2]) if len(row) == 3 else row[1].strip(" |") for row in rows]


@pytest.mark.usefixtures("few_flips")
def test_the_rule_of_rarity_says_what_was_written_down():
    rare = {f"{family}-{level}": 0.05 for family, level in product(rarity.FAMILIES, rarity.RARE)}
    assert judged(rare) == [("+5.0", "confirmed"), ("+5.0", "confirmed"), ("+5.0", "confirmed"), ("+0.0", "held")]
    # A lead as large where nothing is rare: sooner, but not for being rare
    assert judged(dict.fromkeys(rarity.TASKS, 0.05)) == [
        ("+5.0", "confirmed"),
        ("+5.0", "confirmed"),
        ("+0.0", "refuted"),
        ("+5.0", "refuted"),
    ]
    assert [verdict for _, verdict in judged({})] == ["refuted", "refuted", "refuted", "held"]


@pytest.mark.usefixtures("few_flips")
def test_a_lead_over_clip_that_a_wider_clip_closes_is_said_to_be_none():
    leads = {f"{family}-{level}": 0.05 for family, level in product(rarity.FAMILIES, rarity.RARE)}
    records = [
        r | {"area": 0.401} if r["method"] == "clip-wider" and r["task"] in leads else r for r in rarity_records(leads)
    ]
    assert rarity.best_clip(records, "label-30") == "clip-wider" and rarity.best_clip(records, "low") == "clip"
    rows = rarity.rule(records).splitlines()[2:]
    assert rows[0].endswith("| refuted |") and rows[1].endswith("| confirmed |") and rows[2].endswith("| refuted |")


@pytest.mark.usefixtures("few_flips")
def test_the_rule_waits_until_all_of_its_runs_are_there():
    one = lambda r: r["seed"] == 19 and r["task"] == "steps-2" and r["method"] == "troll"
    assert [verdict for _, verdict in judged({}, one)] == ["not yet, 5 of 6", "refuted", "not yet, 2 of 3", "held"]
    untuned = lambda r: r["studies"] == ["tuning"] and r["method"] == "clip-wide" and r["seed"] == 1
    verdicts = judged({}, untuned)
    assert verdicts[0] == verdicts[2] == verdicts[3] == "not run yet" and verdicts[1][1] == "refuted"
    # A task that was not begun is not one that no method learns
    verdicts = [verdict for _, verdict in judged({}, lambda r: r["task"] == "label-0.5")]
    assert verdicts == ["not yet, 5 of 6", "not yet, 5 of 6", "not yet, 2 of 3", "held"]
    verdicts = judged({}, lambda r: r["task"] == "low")
    assert verdicts[3] == "not run yet" and verdicts[2][1] == "refuted"


@pytest.mark.usefixtures("few_flips")
def test_the_rule_tells_what_the_tasks_say_that_are_there():
    leads = {"label-0.5": 0.09, "label-2": 0.03, "steps-2": -0.5}
    row = rarity.rule([r for r in rarity_records(leads) if r["task"] in ("label-0.5", "label-2")]).splitlines()[2]
    assert "| +6.0 [" in row and row.endswith("| not yet, 2 of 6 |")


def test_the_rule_takes_rates_from_the_tasks_that_the_grid_names():
    grid = grid_of("rarity")
    assert {task: grid.tuned_task(task) for task in rarity.TASKS} == rarity.TUNED
    rates = {(task, method): 0.5 for task in set(rarity.TUNED.values()) for method in grid.methods}
    assert {run.task for run in grid.runs("deciding", rates)} == set(rarity.TASKS)


@pytest.mark.usefixtures("few_flips")
def test_a_task_that_no_method_learns_leaves_the_rule():
    def flat(r):
        return r | {"curve": [[0, 0.0], [8, 0.049]]} if r["task"] == "label-0.5" else r

    leads = {f"{family}-{level}": 0.05 for family, level in product(rarity.FAMILIES, rarity.RARE)} | {"label-0.5": -0.3}
    records = [flat(r) for r in rarity_records(leads)]
    assert rarity.out_of_reach(records, "label-0.5") and not rarity.out_of_reach(records, "label-2")
    assert "+5.0" in rarity.rule(records).splitlines()[2]


def test_methods_stand_beside_those_of_their_updates_or_at_rates_of_their_own():
    records = [
        record("s", "sums", method, seed, success, learning_rate=rate, **varied) | {"area": success}
        for method, success, rate in (("troll", 0.5, 2e-4), ("clip", 0.4, 1e-4))
        for varied in ({}, {"steps_per_generation": 4})
        for seed in range(5)
    ]
    rows_of = lambda rs, **how: [
        row.strip("| ").split(" | ")
        for row in tables.compare("What it shows.", "s", "troll", of_fixed=True, **how)(rs).splitlines()[2:]
    ]
    rows = rows_of(records, own_rates=True)
    assert [row[0] for row in rows] == ["sums, 4 updates"] * 2 + ["sums, 8 updates"] * 2
    assert [row[1:3] for row in rows[:2]] == [["0.0002", "troll"], ["0.0001", "clip"]]
    assert all(row[6].startswith("+10.0 [+10.0, +10.0]") for row in rows[1::2])
    apart = rows_of(records)  # of different rates, and nothing to compare
    assert [row[1:3] for row in apart] == [["0.0001", "clip"]] * 2 + [["0.0002", "troll"]] * 2
    assert all(len(row) == 6 for row in apart)


def test_smollm2s_leads_are_of_either_bound():
    def run(method, seed, area, **varied):
        others = {name: [(0, 0.1), (64, 0.5)] for name in (smollm2.FORM, smollm2.NUMBER)}
        return record("s", "no-dropout", method, seed, area, learning_rate=1e-3, **varied) | {
            "area": area,
            "others": others,
        }

    records = [run("troll", seed, 0.1) for seed in (10, 11)] + [run("clip", seed, 0.3) for seed in (10, 11)]
    records += [run("troll", 10, 0.4, kl_bound=0.5), run("pessimistic", 11, 0.2)]
    rows = {
        row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in smollm2.leads(records).splitlines()
    }
    assert rows["method"][6:] == [
        "troll minus this, area",
        "troll minus this, success",
        "troll, kl_bound 0.5 minus this, area",
        "troll, kl_bound 0.5 minus this, success",
    ]
    assert rows["clip"][6].startswith("-20.0 [") and rows["clip"][8] == "+10.0"
    assert rows["pessimistic"][6] == "-10.0" and len(rows["pessimistic"]) == 8, "no seed of the wider bound"
    assert rows["troll, kl_bound 0.5"][1:3] == ["1", "40.0"] and len(rows["troll, kl_bound 0.5"]) == 6


def smollm2_rate_records():
    """TROLL is best at 3e-4 and keeps half of it at 1e-3; all others are best at 1e-3 and keep a tenth. Runs on a CPU,
    where all is 0, do not count."""
    heights = {"troll": (0.1, 0.4, 0.2, 0.0)}
    records = []
    for method in smollm2_rate.LABELS:
        cells = zip(smollm2_rate.RATES, heights.get(method, (0.1, 0.2, 0.5, 0.05)), strict=False)
        for (rate, height), seed in product(cells, (*smollm2_rate.FIRST, *smollm2_rate.FRESH)):
            of_seed = height * (1 + 0.01 * (seed % 2))
            records.append(record("s", "h100", method, seed, of_seed, learning_rate=rate))
            records.append(record("s", "no-dropout", method, seed, 0.0, learning_rate=rate))
    return records


def test_smollm2s_rates_are_chosen_on_two_seeds_and_compared_on_others():
    records = smollm2_rate_records()
    first = [r for r in records if r["seed"] in smollm2_rate.FIRST]
    cells = smollm2_rate.next_cells(smollm2_rate.Runs(first)).splitlines()
    assert cells[3] == "      - {task: h100, method: troll, learning_rate: [3.0e-04, 1.0e-03]}"
    assert cells[6] == "      - {task: h100, method: clip-0.2, learning_rate: [1.0e-03, 3.0e-03]}"
    assert smollm2_rate.second_stage(first) == "Stage 2 has not run: nothing is decided."
    with pytest.raises(SystemExit, match=r"Stage 1 lacks runs of troll"):
        smollm2_rate.next_cells(smollm2_rate.Runs(first[1:]))
    row = smollm2_rate.second_stage(records).splitlines()[2].strip("| ").split(" | ")
    assert row[:4] == ["TROLL, ε 0.05", "clip 0.2", "+40.0 [+40.0, +40.0]", "holds"]
    assert row[4].startswith("-10.0 [-10.1, -10.") and row[5] == "fails"
    last = [r for r in records if (r["method"], r["seed"]) != ("tv-0.15", 20)]
    assert "holds so far (5 of 6 seeds)" in smollm2_rate.second_stage(last)


def test_the_pages_have_the_success_of_smollm2():
    records = read_records(EVIDENCE / "results" / "smollm2-rate.jsonl")
    runs = smollm2_rate.Runs(records)
    at = {m: [100 * cell.values("success").mean() for cell in runs.fresh(m)] for m in smollm2_rate.LABELS}
    best, later = ([f"{at[m][i]:.0f}" for m in smollm2_rate.LABELS] for i in (0, 1))
    names = ("README.md", "docs/clip-projection-or-mask.md", "docs/when-to-use.md")
    readme, page, choosing = (" ".join((EVIDENCE.parent / name).read_text().split()) for name in names)
    troll, wide, _, clip, wide_clip, mask = best
    assert f"TROLL solves {troll} %, clips {clip} and {wide_clip} %, DPPO's TV mask {mask} % (six" in readme
    assert f"; with a bound of 0.2, added later, TROLL solves {wide} % |" in readme
    assert f"at 1e-3, their best rate, clips solve {clip} and {wide_clip} % |" in readme
    assert f"it solved {wide} % at its best rate and {later[1]} % at three times that" in choosing
    assert f"the default solved {troll} and {later[0]} %" in choosing
    troll, wide, _, clip, wide_clip, mask = later
    assert f"TROLL solves {troll} %, with a bound of 0.2 {wide} %; " in readme
    assert f"; clips {clip} and {wide_clip} %, the mask {mask} % (undecided); " in readme
    of_page = [value for name, values in at.items() if name != "troll-0.5" for value in values]
    assert all(f" {value:.1f}" in page for value in of_page)


def test_updates_to_a_height_are_told_along_the_curve():
    curve = [[0, 0.1], [16, 0.1], [32, 0.3], [48, 0.2]]
    assert [rarity.updates_to(curve, height) for height in (0.1, 0.2, 0.3, 0.4)] == pytest.approx([0, 24, 32, 48])


def test_tables_of_rarity_leave_out_what_is_not_there():
    records = [r for r in rarity_records({}) if r["task"] == "label-2" and r["method"] in ("clip", "clip-wide")]
    tuning = rarity.tuning(records)
    assert "| label-2 | 1.00 | clip | **40.0** |" in tuning and "steps" not in tuning and "troll" not in tuning
    (first, second) = rarity.deciding(records).splitlines()[2:]
    assert first.startswith("| label-2 | clip | 10 |") and second.endswith("|  |  |")


@pytest.mark.slow
@pytest.mark.parametrize("grid", sorted(figures.FIGURES))
def test_every_figure_is_drawn_and_kept(grid, tmp_path):
    records = read_records(EVIDENCE / "results" / f"{grid}.jsonl")
    for name, (draw, study) in figures.FIGURES[grid].items():
        draw(records, study, tmp_path / f"{name}.png")
        assert (EVIDENCE / "figures" / f"{name}.png").exists()


# -- What was run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["common", "rarity", "lora", "smollm2", "smollm2-rate", "async"])
def test_runs_of_a_seed_have_one_start_but_for_those_that_the_pages_name(name):
    """Pairs are of one start, which depends on the machine."""
    starts_of: dict[tuple[str, int], set[float]] = {}
    for record in read_records(EVIDENCE / "results" / f"{name}.jsonl"):
        starts_of.setdefault((record["task"], record["seed"]), set()).add(record["start"])
    several = {key for key, values in starts_of.items() if len(values) > 1}
    named = {("label-2", 100)}  # cispo and sapo were tuned on another machine
    assert several == (named if name == "rarity" else set())


@pytest.mark.slow
def test_every_common_run_has_a_result():
    records = read_records(EVIDENCE / "results" / "common.jsonl")
    wanted = grid_of("common").all_runs({})
    assert {run_of(record): record["studies"] for record in records} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(report.TABLES) - {"gsm8k"}))  # never run yet
def test_the_pages_hold_the_tables_of_the_results(name):
    pages = [page.read_text() for page in report.PAGES]
    records = read_records(EVIDENCE / "results" / f"{name}.jsonl")
    module = "moves" if name.endswith("-moves") else "report"
    command = f"run: python -m evidence.{module} evidence/{name.removesuffix('-moves')}.yaml"
    assert (EVIDENCE / "tables" / f"{name}.md").read_text() == report.table_page(name, records), command
    assert [report.fill_in(text, name, records) for text in pages] == pages, command


def test_every_mark_of_a_page_names_a_table_and_every_table_has_a_caption():
    pages = [page.read_text() for page in report.PAGES]
    marks = {mark for text in pages for mark in re.findall(r"<!-- ([\w-]+) ([\w-]+) -->", text)}
    known = {(grid, name) for grid, made_by in report.TABLES.items() for name in made_by}
    assert ("rarity", "rule") in marks <= known
    captions = [table.__doc__ or "" for made_by in report.TABLES.values() for table in made_by.values()]
    assert all(caption.strip().endswith(".") for caption in captions)


def test_a_page_of_tables_is_made_whole_from_the_records():
    records = read_records(EVIDENCE / "results" / "lora.jsonl")
    page = report.table_page("lora", records)
    assert page.startswith("# Tables of `lora`\n") and "\n## dropout\n\nWhat LoRA's dropout of 0.05 does" in page
    assert report.TABLES["lora"]["dropout"](records) in page


def test_gsm8ks_table_has_every_run_the_stopped_ones_too():
    run = Run("gsm8k", "troll", (("learning_rate", 1e-5),), 0)
    log = {"curve": [[0, 0.125], [16, 0.25]], "length": 199.6, "seconds_per_update": 2.0}
    ended = describe(run) | log | {"success": 0.3125, "seconds_without_generation": 0.5, "area": 0.2}
    stopped = describe(dataclasses.replace(run, method="clip-0.2")) | log | {"error": "its time was up"}
    failed = describe(dataclasses.replace(run, varied=(("learning_rate", 3e-5),))) | {"error": "CUDA out of memory"}
    assert tables.every_gsm8k_run([failed, ended, stopped]).splitlines()[2:] == [
        "| troll | 1e-05 | 12.5 at 0 25.0 at 16 | 31.2 | 200 | 2.00 | 0.50 |",
        "| clip-0.2 | 1e-05 | 12.5 at 0 25.0 at 16 | its time was up | 200 | 2.00 |  |",
        "| troll | 3e-05 |  | CUDA out of memory |  |  |  |",
    ]


def test_the_plan_for_minutes_of_a_gpu_is_the_same_for_all_methods():
    grid = grid_of("gsm8k")
    (training, base) = sorted(content_of(grid.training), key=lambda content: "max_steps" not in content)
    content = base | training
    updates = content["steps_per_generation"] // content["gradient_accumulation_steps"]
    assert updates == DEFAULTS["steps_per_generation"] == 8, "`seconds_per_update` leaves out one rollout batch"
    assert content["max_steps"] == 32 and grid.tasks["gsm8k"].settings["max_completion_length"] == 256
    first, second = grid.studies.values()
    assert first.methods == second.methods == list(grid.methods)
    (low,), (high,) = (alternative["learning_rate"] for study in (first, second) for alternative in study.vary)
    assert high == pytest.approx(3 * low)


def test_the_readme_is_short_with_its_tables_too():
    assert len((EVIDENCE / "README.md").read_text().split()) <= 1200


@pytest.mark.slow
def test_no_token_leaves_the_bound_in_any_run():
    """rarity.md says so of all runs with the projection. `clip-recorded` is TRL's clip, with the bound open."""
    names = ("age", "common", "rarity", "rate", "smollm2", "smollm2-rate", "lora")
    runs = [(name, record) for name in names for record in read_records(EVIDENCE / "results" / f"{name}.jsonl")]
    projected = [(name, r) for name, r in runs if r.get("kl_max") is not None and r["method"] != "clip-recorded"]
    assert len(projected) >= 950
    for name, r in projected:
        bound = {"troll-wide": 0.5, "wide": 0.5, "rule": 0.2}.get(r["method"], r["varied"].get("kl_bound", 0.05))
        if r["method"].startswith(("projection-", "troll-0")):
            bound = float(r["method"].partition("-")[2])
        if name == "rate":  # which has `auto`
            bound = {8: 0.05, 32: 0.8}[r["varied"]["steps_per_generation"]]
        assert r["kl_max"] <= bound * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["common", "rarity", "smollm2", "smollm2-rate", "lora", "age", "rate", "async"])
def test_every_result_is_of_its_grid(name):
    records, grid = read_records(EVIDENCE / "results" / f"{name}.jsonl"), grid_of(name)
    every = grid.all_runs(tuned_rates(records, grid.tuning))
    assert {run_of(record) for record in records} <= set(every)
    assert len({run_of(record) for record in records}) == len(records)


@pytest.mark.slow
def test_the_moves_of_rarity_are_drawn(tmp_path):
    records = read_records(EVIDENCE / "results" / "rarity-moves.jsonl")
    moves.draw(records, "label-2", tmp_path / "moves.png")
    assert (EVIDENCE / "figures" / "rarity-moves.png").exists()


def test_the_names_of_rarity_are_those_of_its_grid():
    grid = grid_of("rarity")
    rare = {task for task in grid.tasks if not task.startswith(("common", "wordy"))}
    assert set(rarity.TASKS) == rare and set(rarity.METHODS) < set(grid.methods)
    assert grid.tuning == list(rarity.TUNING) and set(rarity.DECIDING) < set(grid.studies)
    seeds = {seed for name in grid.studies if name.startswith("deciding") for seed in grid.studies[name].seeds}
    assert seeds == set(rarity.SEEDS) and grid.studies["deciding"].seeds == list(rarity.FIRST_SEEDS)
    assert all(len(grid.studies[name].seeds) == rarity.TUNING_SEEDS for name in grid.tuning)


# -- The runner -------------------------------------------------------------------------------------------------------

TASK = {"family": "sorting", "architecture": "llama", "start_success": 0.2, "train": 2048, "test": 64}
SMALL = {"max_completion_length": 12, "max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 16}


@pytest.mark.slow
def test_a_study_is_run_resumed_and_repeated_with_other_seeds(tmp_path, run_study):
    content = {
        "training": str(EVIDENCE / "train-cpu.yaml"),
        "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
        "tuning": "tuning",
        "tasks": {"sorting": TASK | {"settings": SMALL | {"eval_steps": 2}}},
        "methods": {
            "troll": {},
            "clip": {"settings": {"method": "clip"}},
            "broken": {"settings": {"num_generations": 5}, "rate_of": "clip"},
            "signal": {"variant": "signal", "rate_of": "troll"},
        },
        "studies": {
            "tuning": {
                "tasks": ["sorting"],
                "methods": ["troll", "clip"],
                "seeds": [100],
                "vary": [{"learning_rate": [1e-4]}],
            },
            "headline": {"tasks": ["sorting"], "methods": ["troll", "broken", "signal"], "seeds": [0]},
        },
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert run_study("--workers", "2").splitlines()[-2].startswith("5 runs, 1 of them failed.")
    by_method = {
        r["method"]: r for r in read_records(tmp_path / "results" / "grid.jsonl") if "headline" in r["studies"]
    }
    assert "num_generations" in json.dumps(by_method["broken"])
    assert by_method["troll"]["kl_max"] <= 0.05 * 1.001 and 0 <= by_method["signal"]["success"] <= 1
    assert [step for step, _ in by_method["troll"]["curve"]] == [0, 2, 4]

    # An interruption before the last run ended: that one is run again, and nothing else
    (result,) = (tmp_path / "out" / "runs" / "sorting" / "signal").rglob("result.json")
    before, record = (tmp_path / "results" / "grid.jsonl").read_text(), result.read_text()
    result.unlink()
    lines = [line for line in run_study().splitlines() if line.startswith("[")]
    assert len(lines) == 2 and "start" in lines[0] and "signal" in lines[1]
    without_time = lambda text: re.sub(r'"seconds_per_update": [\d.]+', "", text)
    assert without_time(result.read_text()) == without_time(record)
    assert without_time((tmp_path / "results" / "grid.jsonl").read_text()) == without_time(before)

    # Other seeds write no results; a changed setting is another run
    before = (tmp_path / "results" / "grid.jsonl").read_text()
    assert "sorting/troll/learning_rate=0.0001/seed7: done" in run_study("--only", "sorting/troll/", "--seeds", "7")
    assert (tmp_path / "results" / "grid.jsonl").read_text() == before
    content["tasks"]["sorting"]["settings"]["max_grad_norm"] = 0.5
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert "sorting/troll/learning_rate=0.0001/seed7: done" in run_study("--only", "sorting/troll/", "--seeds", "7")


@pytest.mark.slow
def test_a_study_goes_on_elsewhere_from_its_results(tmp_path, run_study):
    content = {
        "training": str(EVIDENCE / "train-cpu.yaml"),
        "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
        "tuning": "tuning",
        "tasks": {"label": TASK | {"share": 0.3, "start_success": 0.02, "settings": SMALL | {"eval_steps": 2}}},
        "methods": {"troll": {}, "clip": {"settings": {"method": "clip"}}},
        "studies": {
            "tuning": {
                "tasks": ["label"],
                "methods": ["troll", "clip"],
                "seeds": [100],
                "vary": [{"learning_rate": [1e-4, 2e-4]}],
            },
            "headline": {"tasks": ["label"], "methods": ["troll", "clip"], "seeds": [0]},
        },
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    results = tmp_path / "results" / "grid.jsonl"

    def resume(only):
        output = run_study("--resume", "--only", only)
        names = [line.split("] ")[1].partition(":")[0] for line in output.splitlines() if line.startswith("[")]
        return output, [name for name in names if name.startswith("label")]

    # Half of the tuning: written, and nothing that waits for the rest
    output, done = resume("label/troll/learning_rate=0.0001/")
    assert done == ["label/troll/learning_rate=0.0001/seed100"] and "2 runs wait" in output
    (record,) = read_records(results)
    assert record["studies"] == ["tuning"] and record["machine"]
    assert 0 < record["start_chance"] < 0.3

    # On another machine, where there are no folders of runs: TROLL's tuning is completed, and its headline run
    shutil.rmtree(tmp_path / "out")
    output, (tuning, headline) = resume("label/troll/")
    assert tuning == "label/troll/learning_rate=0.0002/seed100" and headline.endswith("/seed0")
    assert "1 runs wait" in output
    records = read_records(results)
    assert sorted(r["studies"][0] for r in records) == ["headline", "tuning", "tuning"] and record in records

    # What is no longer in the grid is kept
    del content["studies"]["headline"]
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    Runner(read_grid(tmp_path / "grid.yaml"), tmp_path / "out", workers=1, results=results).run([], retry=False)
    assert sorted(read_records(results), key=json.dumps) == sorted(records, key=json.dumps)


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
            make_start(tmp_path, task, 7, EVIDENCE / "eval-cpu.yaml")
        assert not (tmp_path / "model").exists()
    else:
        make_start(tmp_path, task, 7, EVIDENCE / "eval-cpu.yaml")
        torch.testing.assert_close(
            load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"], tried[-1]
        )
    assert len(tried) == min(stuck + 1, 3)
    assert all(not torch.equal(one, other) for one, other in pairwise(tried))


@pytest.mark.slow
def test_a_given_model_trains_on_what_it_solves_sometimes(tmp_path, run_study):
    start = tmp_path / "start"
    make_start(start, Task(**TASK, settings={}), 0, EVIDENCE / "eval-cpu.yaml")
    given = {"model": str(start / "model"), "dataset": str(start / "data"), "candidates": 40, "samples": 4, "test": 16}
    study = {"tasks": ["given"], "methods": ["troll"], "seeds": [0], "vary": [{"learning_rate": [1e-4]}]}
    content = {
        "training": str(EVIDENCE / "train-cpu.yaml"),
        "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
        "tuning": "tuning",
        "tasks": {"given": given | {"settings": SMALL | {"eval_steps": 2}}},
        "methods": {"troll": {}},
        "studies": {"tuning": study},
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert run_study().splitlines()[-2] == "1 runs, 0 of them failed."
    kept = (tmp_path / "out" / "starts" / "given" / "data" / "train.jsonl").read_text().splitlines()
    samples = tmp_path / "out" / "starts" / "given" / "samples" / "samples.jsonl"
    right = {}
    for sample in map(json.loads, samples.read_text().splitlines()):
        right.setdefault(sample["index"], []).append(sample["reward"])
    candidates = (start / "data" / "train.jsonl").read_text().splitlines()
    assert 0 < len(kept) < 40
    assert kept == [candidates[index] for index in sorted(right) if 0 < sum(right[index]) < 4 == len(right[index])]
    test = (start / "data" / "test.jsonl").read_text().splitlines()
    assert (tmp_path / "out" / "starts" / "given" / "data" / "test.jsonl").read_text().splitlines() == test[:16]


@pytest.mark.slow
def test_a_given_model_trains_on_generated_problems(tmp_path, run_study):
    start = tmp_path / "start"
    make_start(start, Task(**TASK, settings={}), 0, EVIDENCE / "eval-cpu.yaml")
    rewards = ["math_accuracy", "math_answers.answer_format_reward", "evidence.rewards.last_number_reward"]
    training = {"base": str(EVIDENCE / "train-cpu.yaml"), "reward_funcs": rewards, "reward_weights": [1.0, 0.0, 0.0]}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(training))
    generated = {"family": "sorting", "model": "on/a-hub", "train": 64, "test": 16}
    study = {"tasks": ["generated"], "methods": ["troll"], "seeds": [0], "vary": [{"learning_rate": [1e-4]}]}
    content = {
        "training": str(tmp_path / "train.yaml"),
        "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
        "tuning": [],
        "tasks": {"generated": generated | {"settings": SMALL | {"eval_steps": 2}}},
        "methods": {"troll": {}},
        "studies": {"only": study},
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert run_study("--model", str(start / "model")).splitlines()[-2] == "1 runs, 0 of them failed."
    (record,) = read_records(tmp_path / "results" / "grid.jsonl")
    assert record["others"].keys() == {"answer_format_reward", "last_number_reward"}
    steps, right = zip(*record["curve"], strict=True)
    for curve in record["others"].values():  # whoever is right has stated a number
        assert all(value >= both for (_, value), both in zip(curve, right, strict=True))
        assert [step for step, _ in curve] == list(steps) == [0, 2, 4]


@pytest.fixture
def run_study(tmp_path):
    def run(*flags: str) -> str:
        command = [sys.executable, "-m", "evidence.run", str(tmp_path / "grid.yaml"), "--output", str(tmp_path / "out")]
        done = subprocess.run([*command, *flags], cwd=EVIDENCE.parent, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_given_and_generated_tasks_are_told_apart():
    assert isinstance(grid_of("gsm8k").tasks["gsm8k"], GivenTask)
    assert all(isinstance(task, Task) for name in ("common", "smollm2") for task in grid_of(name).tasks.values())


@pytest.mark.parametrize("given", [{}, {"model": "m", "architecture": "llama", "start_success": 0.2}])
def test_a_task_has_a_given_model_or_one_to_warm_up(given):
    with pytest.raises(TypeError, match="either a `model`, or an `architecture` and a `start_success`"):
        Task("sums", 8, 8, {}, **given)


def test_the_last_number_counts_in_whatever_form():
    texts = ["So 3 * 4 = 12", "12 apples, not 13", r"\boxed{12}", "twelve", "12."]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert last_number_reward(chats, [r"\boxed{12}"] * 5) == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_folders_of_seeds_differ_in_their_last_part_alone():
    run = Run("sums", "troll", (("kl_bound", 0.25), ("learning_rate", 0.0004)), 3)
    assert run.folder == Path("sums/troll/kl_bound=0.25,learning_rate=0.0004/seed3")


# -- The bound and the age of the data --------------------------------------------------------------------------------


@functools.cache
def age_records(areas):
    """
    All runs of age.yaml and of the studies that follow from it: the area is `areas(task, n, method, rate)`, of the
    projection with a little noise. Round after round, since each stage's cells follow from the one before.
    """
    grid = grid_of("age")
    studies = {name: study for name, study in grid.studies.items() if name.startswith("bounds-")}
    for _ in range(4):
        records = []
        for run in dataclasses.replace(grid, studies=studies).all_runs({}):
            varied = dict(run.varied)
            area = areas(run.task, varied["steps_per_generation"], run.method, varied["learning_rate"])
            area += 0.001 * (run.seed % 3 - 1) * run.method.startswith("projection")
            records.append(describe(run) | {"area": area, "success": area})
        text = age.next_studies(age.Runs(records))
        studies |= {name: Study(**study) for name, study in yaml.safe_load(f"studies:\n{text}")["studies"].items()}
    return records


def wide_is_best(task, n, method, rate):
    """The projection at 0.8 or 0.5 is best at 32, at a rate of 2e-4 or beyond; others are 0.05 to 0.1 below."""
    geometry, _, bound = method.partition("-")
    if geometry == "projection":
        ideal = 0.05 * (n / 8) ** 2
        return 0.5 - 0.02 * abs(np.log(float(bound) / ideal)) - 0.01 * abs(np.log2(rate / 2e-4))
    return {"clip": 0.45, "tv": 0.42, "kl": 0.4}.get(geometry, 0.1) - (0.2 if task in age.COMMON else 0.0)


def test_the_rule_chooses_its_exponent_and_an_edge_gets_one_more_rate():
    runs = age.Runs(age_records(wide_is_best))
    assert runs.exponent() == 2
    assert [age.rule(n, 2) for n in age.AGES] == ["projection-0.05", "projection-0.2", "projection-0.8"]
    assert [age.rule(n, 1) for n in age.AGES] == ["projection-0.05", "projection-0.1", "projection-0.2"]
    for n in age.AGES:
        assert runs.choice("label-2", n, "rule") == (age.rule(n, 2), 2e-4)
        assert runs.area("label-2", n, age.Choice(age.rule(n, 2), 1e-4)) is not None, "the edge was run"
    narrow = age.Runs(age_records(lambda task, n, method, rate: 0.1 if method == "projection-0.8" else 0.2))
    assert narrow.exponent() == 1


def test_nothing_is_chosen_before_its_tuning_is_there():
    records = age_records(wide_is_best)
    lacking = [r for r in records if (r["method"], r["seed"], r["task"]) != ("projection-0.5", 103, "steps-2")]
    runs = age.Runs(lacking)
    assert runs.exponent() == 2 and runs.choice("steps-2", 32, "projection") is None
    assert runs.choice("label-2", 32, "projection") is not None and runs.common_bound(32, "projection") is None
    lacking = [r for r in records if not (r["method"] == "projection-0.2" and r["task"] == "label-2")]
    assert age.Runs(lacking).exponent() is None
    assert "deciding" not in age.next_studies(age.Runs([]))


@pytest.mark.usefixtures("few_flips")
def test_the_verdicts_are_those_that_were_written_down():
    rows = [row.strip("| ").split(" | ") for row in age.verdicts(age_records(wide_is_best)).splitlines()[2:]]
    assert [row[-1] for row in rows[:6]] == ["holds"] * 6 and [row[-1] for row in rows[6:9]] == ["holds"] * 3
    assert rows[0][1].startswith("+5.0 [")

    def behind(task, n, method, rate):
        return 0.6 if method.startswith("tv") and n == 32 else wide_is_best(task, n, method, rate)

    rows = [row.strip("| ").split(" | ") for row in age.verdicts(age_records(behind)).splitlines()[2:]]
    verdicts = {row[0]: row[-1] for row in rows}
    assert verdicts["1. 32 updates, rare: TROLL minus mask, total variation"] == "fails"
    assert verdicts["1. 16 updates, rare: TROLL minus mask, total variation"] == "holds"
    assert verdicts["3. 32 updates, common: mask, total variation minus TROLL"] == "fails"
    assert verdicts["3. 8 updates, common: mask, total variation minus TROLL"] == "holds"


@pytest.mark.usefixtures("few_flips")
def test_what_an_old_rollout_batch_costs_is_the_difference_of_the_choices():
    def older_is_worse(task, n, method, rate):
        lost = {"projection": 0.05, "clip": 0.1, "tv": 0.15, "kl": 0.2}.get(method.partition("-")[0], 0.0)
        return wide_is_best(task, n, method, rate) - lost * (n == 32)

    rows = [row.strip("| ").split(" | ") for row in age.costs(age_records(older_is_worse)).splitlines()[2:]]
    found = {(where, region): area.partition(" ")[0] for where, region, area, _ in rows}
    assert found[("rare", "TROLL, the rule")] == found[("common", "TROLL, the rule")] == "-5.0"
    assert found[("rare", "clip")] == found[("common", "clip")] == "-10.0" and found[("rare", "mask, KL")] == "-20.0"
    assert len(rows) == 9


@pytest.mark.usefixtures("few_flips")
def test_the_means_of_age_and_what_a_limit_gains():
    records = age_records(lambda task, n, method, rate: wide_is_best(task, n, method, rate) - 0.1 * (task == "steps-2"))
    rows_of = lambda text: {
        cells[0]: cells[1:] for row in text.splitlines()[2:] if (cells := row.strip("| ").split(" | "))
    }
    means, limits = rows_of(age.means(records)), rows_of(age.limits(records))
    # The mean over tasks of 0.45, 0.45 and 0.35; success is one and the same
    assert [text.partition(", ")[0] for text in means["clip"]] == ["41.7"] * 3
    assert len(limits) == 5 and limits["clip"][0].startswith("+35.0 [+35.0, +35.0]"), limits


@pytest.mark.parametrize(
    ("tasks", "n"), [(age.RARE, 8), (age.RARE, 16), (age.RARE, 32), (age.COMMON, 8), (age.COMMON, 32)]
)
def test_pairs_that_age_judges_are_of_one_machine_and_one_start(tasks, n):
    runs = age.Runs(read_records(EVIDENCE / "results" / "age.jsonl"))
    names = ("rule", *(age.GEOMETRIES if tasks == age.RARE else age.OTHERS))
    for of_task in zip(*(runs.cells(tasks, n, name) for name in names), strict=True):
        starts = [{record["seed"]: (record["start"], record["machine"]) for record in cell.records} for cell in of_task]
        assert all(start == starts[0] for start in starts), of_task[0].records[0]["task"]


def test_the_plan_of_age_has_as_many_runs_as_was_written_down():
    """Without edges: 294, at most 324, 144, 48 for no limits, 450 and 240 that decide."""
    flat = lambda task, n, method, rate: 0.5 if rate == 4e-4 else 0.1
    studies = age_records(flat)
    tuning = [r for r in studies if r["seed"] in age.TUNING_SEEDS and r["method"] != "none"]
    rare = [r for r in tuning if r["task"] in age.RARE]
    assert len([r for r in rare if r["varied"]["learning_rate"] == 4e-4]) == 294
    assert len([r for r in rare if r["varied"]["learning_rate"] != 4e-4]) <= 324
    assert len(tuning) - len(rare) == 144
    assert len([r for r in studies if r["method"] == "none"]) == 48
    deciding = [r for r in studies if r["seed"] in age.SEEDS and r["method"] != "none"]
    assert len([r for r in deciding if r["task"] in age.COMMON]) == 240
    assert len([r for r in deciding if r["task"] in age.RARE]) <= 450

"""The study in evidence/: grids, problems, variants, statistics and runner, and that its README is of its results."""

import json
import math
import re
import subprocess
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from trl import GRPOConfig, GRPOTrainer
from trl_comparison import assert_same_movement, logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.cli.evaluate import parse_evaluation_args
from troll_trl.cli.settings.parser import parse_training_args
from troll_trl.rewards import math_accuracy_reward

pytest.importorskip("matplotlib", reason="the starts are made by the quickstart, which draws with matplotlib")
from evidence import figures, report, tables
from evidence.grid import GivenTask, Run, Task, read_grid, tuned_rates
from evidence.problems import FAMILIES, make_problems
from evidence.results import DEFAULTS, read_records, run_of
from evidence.starts import make_start
from evidence.variants import FillTrainer, MeasuredClipTrainer, fill_rest

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
GRIDS = ["cpu", "gpu"]


# -- Grids ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=GRIDS)
def grid(request):
    return read_grid(EVIDENCE / f"{request.param}.yaml")


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
    grid = read_grid(EVIDENCE / "cpu.yaml")
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
        assert others <= {"method", "epsilon", "epsilon_high", "loss_type"}


def test_tuning_has_seeds_of_its_own(grid):
    tuning = set(grid.studies[grid.tuning].seeds)
    assert all(not tuning & set(study.seeds) for name, study in grid.studies.items() if name != grid.tuning)


def test_headline_compares_the_same_seeds_five_at_least():
    for name in GRIDS:
        assert len(set(read_grid(EVIDENCE / f"{name}.yaml").studies["headline"].seeds)) >= 5


def test_a_run_of_two_studies_is_run_once():
    grid = read_grid(EVIDENCE / "cpu.yaml")
    rates = dict.fromkeys(product(grid.tasks, grid.methods), 2e-4)
    both = [run for run, studies in grid.all_runs(rates).items() if {"headline", "equal-rate"} <= set(studies)]
    assert len(both) == len(grid.runs("headline", rates))


def change(tmp_path, **changes):
    content = yaml.safe_load((EVIDENCE / "cpu.yaml").read_text()) | changes
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
        ({"tasks": {"sums": {"family": "sums"}}}, "tasks: sums: .*architecture"),
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
    assert tuned_rates(records, "tuning") == {("sums", "clip"): 1e-4}
    assert tuned_rates([record(1e-4, 0.5), record(2e-4, 0.5)], "tuning") == {("sums", "clip"): 1e-4}


# -- Problems ---------------------------------------------------------------------------------------------------------


def independent_answer(problem: str) -> str:
    numbers = [int(text) for text in re.findall(r"\d+", problem)]
    if problem.startswith(("What is", "Add")):
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
    for task in read_grid(EVIDENCE / "cpu.yaml").tasks.values():
        assert len(FAMILIES[task.family]()) >= task.train + task.test


# -- Variants ---------------------------------------------------------------------------------------------------------


def test_fill_gives_1e_12_to_the_rest_and_renormalises():
    kept = np.log([0.5, 0.2, 0.1])
    filled = fill_rest(torch.tensor([*kept, math.log(0.2)], dtype=torch.float64))
    expected = np.array([0.5, 0.2, 0.1, 1e-12]) / (0.8 + 1e-12)
    np.testing.assert_allclose(filled.exp(), expected, rtol=1e-12)


def test_fill_keeps_unused_slots_out():
    filled = fill_rest(torch.tensor([math.log(0.5), -math.inf, math.log(0.5)]))
    assert filled[1] == -math.inf and filled[0].exp() == pytest.approx(1.0)


def test_fill_is_troll_where_every_token_is_kept(tmp_path):
    options = {"support_size": 100, "tail_mass": 0.0, "learning_rate": 2e-2}
    troll = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options)
    start = weights(troll)
    assert troll.model.config.vocab_size == 100
    troll.train()
    fill = make_trainer(FillTrainer, TrollGRPOConfig, tmp_path, **options)
    fill.train()
    assert max(logged(troll, "troll/projected_fraction")) > 0.1
    assert_same_movement(start, weights(troll), weights(fill))


def test_fill_differs_where_tokens_are_left_out_and_keeps_the_bound(tmp_path):
    fill = make_trainer(FillTrainer, TrollGRPOConfig, tmp_path, support_size=4, learning_rate=2e-2)
    fill.train()
    assert max(logged(fill, "troll/rest_mass_mean")) < 1e-11
    assert max(logged(fill, "troll/kl_max")) <= 0.05 * 1.001
    assert max(logged(fill, "troll/projected_fraction")) > 0.1


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


def test_the_p_value_of_many_pairs_is_drawn():
    pairs = np.random.default_rng(3).normal(0.01, 0.03, size=30)
    _, p_value = tables.difference(cell(*(0.5 + pairs)), cell(*[0.5] * 30))
    signs = np.random.default_rng(5).choice([-1, 1], size=(50_000, 30))
    assert 0.01 < p_value == pytest.approx(np.mean(np.abs(signs @ pairs) >= abs(pairs.sum())), abs=0.01)


def test_a_p_value_that_draws_cannot_tell_from_a_smaller_one_is_not_stated_as_equal():
    """Thirty pairs of one sign have a p-value of 2e-9, and of all draws none is as large."""
    assert tables.signed(*tables.difference(cell(*[0.6] * 30), cell(*[0.5] * 30))).endswith("p < 3.1e-05")
    assert tables.signed(*tables.difference(cell(*[0.6] * 16), cell(*[0.5] * 16))).endswith("p = 3.1e-05")  # exact


def test_an_interval_for_one_more_seed_is_students_t():
    values = np.array([0.5, 0.6, 0.55, 0.62, 0.58])
    low, high = tables.next_run(cell(*values))
    half = scipy.stats.t.ppf(0.975, 4) * values.std(ddof=1) * math.sqrt(1.2)
    assert [low, high] == pytest.approx([values.mean() - half, values.mean() + half], rel=1e-4)


def test_an_interval_for_one_more_seed_holds_95_of_100():
    generator = np.random.default_rng(0)
    draws = generator.normal(0.5, 0.05, size=(2000, 6))
    inside = [
        low <= draw[5] <= high
        for draw in draws
        if (limits := tables.next_run(cell(*draw[:5])))
        for low, high in [limits]
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


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


def test_runs_of_a_study_share_settings_and_differ_in_their_rates():
    successes = {("troll", 1e-4): 0.5, ("clip", 2e-4): 0.4}
    records = [
        record("s", "sums", method, seed, success, learning_rate=rate, max_steps=8)
        for (method, rate), success in successes.items()
        for seed in range(5)
    ]
    assert tables.settings_of(records, "s") == {"max_steps": 8}
    troll, clip = tables.comparison(records, "s").splitlines()[2:]
    assert troll.startswith("| sums | troll | 0.0001 |") and "+10.0 [+10.0, +10.0], p = 0.062" in troll
    assert clip.startswith("| sums | clip | 0.0002 |")


def test_an_option_is_compared_with_the_defaults_and_with_clip_on_each_task_and_on_all():
    records = []
    for seed, (task, troll, clip, changed) in product(range(5), [("a", 0.5, 0.6, 0.7), ("b", 0.2, 0.3, 0.8)]):
        records += [record("s", task, "troll", seed, troll), record("s", task, "clip", seed, clip)]
        records += [record("o", task, "troll", seed, changed, regression_coef=2.0)]
    rows = [row.strip("| ").split(" | ") for row in tables.options(records, "s", ["o"]).splitlines()[2:]]
    assert [row[:2] for row in rows[3:]] == [["α 2", "a"], ["α 2", "b"], ["α 2", "all"]]
    # The cells of the row for all tasks: no success of its own; less defaults, less clip, area less clip's
    assert [text.split(" ")[0] for text in rows[5][3:6]] == ["+40.0", "+30.0", "+15.0"]
    assert [text.split(" ")[0] for text in rows[2][3:6]] == ["", "-10.0", "-5.0"]


def test_every_figure_is_drawn_and_kept(records, tmp_path):
    for name, (draw, study) in figures.FIGURES.items():
        draw(records, study, tmp_path / f"{name}.png")
        assert (EVIDENCE / "figures" / f"cpu-{name}.png").exists()


# -- What was run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records():
    return read_records(EVIDENCE / "results" / "cpu.jsonl")


def test_every_run_of_the_grid_is_in_the_results_failed_ones_too(records):
    grid = read_grid(EVIDENCE / "cpu.yaml")
    wanted = grid.all_runs(tuned_rates(records, grid.tuning))
    assert {run_of(record): record["studies"] for record in records} == wanted


def test_readme_holds_the_tables_of_the_results(records):
    text = (EVIDENCE / "README.md").read_text()
    marks = re.findall(r"<!-- cpu ([\w-]+) -->", text)
    assert set(marks) == set(tables.TABLES)
    assert report.fill_in(text, "cpu", records) == text, "run: python -m evidence.report evidence/cpu.yaml"


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
            "fill": {"variant": "fill", "rate_of": "troll"},
        },
        "studies": {
            "tuning": {
                "tasks": ["sorting"],
                "methods": ["troll", "clip"],
                "seeds": [100],
                "vary": [{"learning_rate": [1e-4]}],
            },
            "headline": {"tasks": ["sorting"], "methods": ["troll", "broken", "fill"], "seeds": [0]},
        },
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert run_study("--workers", "2").splitlines()[-2].startswith("5 runs, 1 of them failed.")
    by_method = {
        r["method"]: r for r in read_records(tmp_path / "results" / "grid.jsonl") if "headline" in r["studies"]
    }
    assert "num_generations" in json.dumps(by_method["broken"])
    assert by_method["troll"]["kl_max"] <= 0.05 * 1.001 and 0 <= by_method["fill"]["success"] <= 1
    assert [step for step, _ in by_method["troll"]["curve"]] == [0, 2, 4]

    # An interruption before the last run ended: that one is run again, and nothing else
    (result,) = (tmp_path / "out" / "runs" / "sorting" / "fill").rglob("result.json")
    before, record = (tmp_path / "results" / "grid.jsonl").read_text(), result.read_text()
    result.unlink()
    lines = [line for line in run_study().splitlines() if line.startswith("[")]
    assert len(lines) == 2 and "start" in lines[0] and "fill" in lines[1]
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


@pytest.fixture
def run_study(tmp_path):
    def run(*flags: str) -> str:
        command = [sys.executable, "-m", "evidence.run", str(tmp_path / "grid.yaml"), "--output", str(tmp_path / "out")]
        done = subprocess.run([*command, *flags], cwd=EVIDENCE.parent, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_given_and_generated_tasks_are_told_apart():
    tasks = read_grid(EVIDENCE / "gpu.yaml").tasks
    assert isinstance(tasks["gsm8k"], GivenTask) and isinstance(tasks["sorting"], Task)


def test_folders_of_seeds_differ_in_their_last_part_alone():
    run = Run("sums", "troll", (("kl_bound", 0.25), ("learning_rate", 0.0004)), 3)
    assert run.folder == Path("sums/troll/kl_bound=0.25,learning_rate=0.0004/seed3")

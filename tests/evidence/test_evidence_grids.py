"""The grids of the study in evidence/: read strictly, and the runs that they ask for and have."""

from itertools import product
from pathlib import Path

import pytest
import yaml
from evidence_grids import EVIDENCE, grid_of
from training_args import parse_training_args

from evidence.grid import GivenTask, Run, Task, read_grid, tuned_rates
from evidence.results import DEFAULTS, read_records, run_of
from troll_trl.cli.evaluate import parse_evaluation_args


@pytest.fixture(params=["gsm8k", "smollm2-rate", "age", "rate", "peers", "curves"])
def grid(request):
    return grid_of(request.param)


def all_runs(grid):
    rates = dict.fromkeys(product(grid.tasks, grid.methods), 1e-05)
    return grid.all_runs(rates)


def test_every_cell_is_read_strictly_by_the_training_script(grid):
    runs = all_runs(grid)
    # Each method, each task, and each varied setting once
    cells = {run.method: run for run in runs} | {run.task: run for run in runs}
    cells |= {setting: run for run in runs for setting in run.varied}
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
    grid = grid_of("rate")
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
        assert others <= {"method", "epsilon", "epsilon_high", "loss_type", "kl_bound"} | {
            *("trust_region", "divergence_type", "divergence_bound")
        }


def test_tuning_has_seeds_of_its_own(grid):
    tuning = {seed for name in grid.tuning for seed in grid.studies[name].seeds}
    judged = [study for name, study in grid.studies.items() if name not in grid.tuning]
    assert all(not tuning & set(study.seeds) for study in judged)


CONTENT = {
    "training": str(EVIDENCE / "train-cpu.yaml"),
    "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
    "tuning": [],
    "tasks": {"sums": {"family": "sums", "train": 8, "test": 8, "settings": {}, "model": "m"}},
    "methods": {"troll": {}, "clip": {"settings": {"method": "clip"}}},
    "studies": {
        "one": {"seeds": [1, 2], "cells": [{"task": "sums", "methods": ["troll", "clip"], "learning_rate": [1e-4]}]},
        "other": {"seeds": [2, 3], "cells": [{"task": "sums", "method": "clip", "learning_rate": [1e-4, 2e-4]}]},
    },
}


def change(tmp_path, **changes):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(CONTENT | changes))
    return tmp_path / "grid.yaml"


def test_a_run_of_two_studies_is_run_once(tmp_path):
    studies_of = read_grid(change(tmp_path)).all_runs({})
    assert len(studies_of) == 4 + 4 - 1
    both = [run for run, studies in studies_of.items() if len(studies) > 1]
    assert both == [Run("sums", "clip", (("learning_rate", 1e-4),), 2)] and studies_of[both[0]] == ["one", "other"]


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


def test_given_and_generated_tasks_are_told_apart():
    assert isinstance(grid_of("gsm8k").tasks["gsm8k"], GivenTask)
    assert all(isinstance(task, Task) for name in ("rate", "smollm2-rate") for task in grid_of(name).tasks.values())


@pytest.mark.parametrize("given", [{}, {"model": "m", "architecture": "llama", "start_success": 0.2}])
def test_a_task_has_a_given_model_or_one_to_warm_up(given):
    with pytest.raises(TypeError, match="either a `model`, or an `architecture` and a `start_success`"):
        Task("sums", 8, 8, {}, **given)


def test_folders_of_seeds_differ_in_their_last_part_alone():
    run = Run("sums", "troll", (("kl_bound", 0.25), ("learning_rate", 0.0004)), 3)
    assert run.folder == Path("sums/troll/kl_bound=0.25,learning_rate=0.0004/seed3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-rate", "age", "rate", "async"])
def test_every_result_is_of_its_grid(name):
    records, grid = read_records(EVIDENCE / "results" / f"{name}.jsonl"), grid_of(name)
    every = grid.all_runs(tuned_rates(records, grid.tuning))
    assert {run_of(record) for record in records} <= set(every)
    assert len({run_of(record) for record in records}) == len(records)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-rate", "async"])
def test_runs_of_a_seed_have_one_start(name):
    """Pairs are of one start, which depends on the machine."""
    starts_of: dict[tuple[str, int], set[float]] = {}
    for record in read_records(EVIDENCE / "results" / f"{name}.jsonl"):
        starts_of.setdefault((record["task"], record["seed"]), set()).add(record["start"])
    assert {key for key, values in starts_of.items() if len(values) > 1} == set()

"""The runner of the study in evidence/: its grids, its records, interruptions and other machines."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import yaml

from evidence.grid import Run, read_grid
from evidence.results import describe, of_log, read_records, run_of, seconds_to_reward
from evidence.run import Runner
from evidence.tables import table_page
from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.support.training_args import parse_training_args
from troll_trl import small_models

EVIDENCE = ROOT / "evidence"
SMALL = {"max_completion_length": 12, "max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 16}
TASK = {"family": "sorting", "architecture": "llama", "start_success": 0.2, "train": 2048, "test": 64}
HELD_OUT = "eval_reward"


def write_grid(file, **changes):
    """A grid of one task, three methods of which one fails, and two studies that share a cell."""
    cells = [{"tasks": ["sorting"], "methods": ["troll", "ipo"], "learning_rate": [1e-4]}]
    broken = [*cells, {"tasks": ["sorting"], "methods": ["broken"], "learning_rate": [1e-4]}]
    content = {
        "training": str(EVIDENCE / "train-cpu.yaml"),
        "evaluation": str(EVIDENCE / "eval-cpu.yaml"),
        "tasks": {"sorting": TASK | {"settings": SMALL | {"eval_steps": 2}}},
        "methods": {
            "troll": {},
            "ipo": {"trust_region": "evidence.peer_methods.Ipo"},
            "broken": {"num_generations": 5},
        },
        "studies": {"first": {"seeds": [0], "cells": cells}, "second": {"seeds": [0], "cells": broken}},
    }
    file.write_text(yaml.safe_dump(content | changes))
    return file


@pytest.mark.parametrize("name", ["adaptive", "gsm8k", "reuse", "rollout-batch", "smollm2-public"])
def test_every_cell_is_read_by_the_training_command(name):
    grid = read_grid(EVIDENCE / f"{name}.yaml")
    runs = list(grid.runs())
    cells = {run.method: run for run in runs} | {run.task: run for run in runs}  # each once
    cells |= {setting: run for run in runs for setting in run.varied}
    paths = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "use_cpu": True, "bf16": False}
    for run in cells.values():
        flags = [text for key, value in (grid.settings(run) | paths).items() for text in (f"--{key}", str(value))]
        _, training_args, _ = parse_training_args(["--config", str(grid.training), *flags])
        assert training_args.learning_rate == dict(run.varied)["learning_rate"]
        assert training_args.seed == run.seed < 300, "seeds from 300 on are for whoever checks"
        uses = training_args.steps_per_generation * training_args.num_iterations  # in micro-batches
        updates = uses / training_args.gradient_accumulation_steps
        assert training_args.max_steps % updates == 0, "the last rollout batch is not whole"
        if name == "reuse" and run.method != "trl-8192":
            completions = (
                training_args.max_steps * training_args.per_device_train_batch_size / training_args.num_iterations
            )
            assert completions == {1: 2048, 4: 2048, 8: 1024}[training_args.num_iterations]
            assert training_args.get_warmup_steps(training_args.max_steps) == training_args.max_steps / 16
    named = [of["methods"] if isinstance(of, dict) else of for of in grid.tables["methods"].values()]
    assert {method for methods in named for method in methods} <= grid.methods.keys()


def test_a_cell_is_every_combination_and_a_run_of_two_studies_is_one(tmp_path):
    grid = read_grid(write_grid(tmp_path / "grid.yaml"))
    runs = grid.runs()
    assert [(run.method, studies) for run, studies in runs.items()] == [
        ("troll", ["first", "second"]), ("ipo", ["first", "second"]), ("broken", ["second"]),
    ]  # fmt: skip
    (run, *_) = runs
    assert run_of(json.loads(json.dumps(describe(run)))) == run
    assert grid.settings(run) == SMALL | {"eval_steps": 2, "learning_rate": 1e-4, "seed": 0}
    assert {run.seed for run in grid.runs([7, 8])} == {7, 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"studies": {"s": {"seeds": [0], "cells": [{"tasks": ["x"], "methods": [], "learning_rate": []}]}}}, "no 'x'"),
        ({"tuning": []}, "tuning"),
    ],
)
def test_a_wrong_grid_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_grid(write_grid(tmp_path / "grid.yaml", **changes))


def test_a_record_is_made_of_the_log(tmp_path):
    """Seconds counted by TRL leave out the optimizer, and rollout batches were taken to have eight updates each."""
    run, clock = Run("gsm8k", "troll", (("learning_rate", 1e-5),), 0), 0.0
    assert of_log(run, tmp_path) == {}
    log = [{"step": 0, HELD_OUT: 0.0, "eval_rewards/right/mean": 0.0, "eval_rewards/form/mean": 1.0, "seconds": clock}]
    log[0]["cost/completions"] = 0
    for step in range(1, 17):
        begins = step % 4 == 1  # a rollout batch of four updates; the first one is a warm-up
        clock += 99.0 if step == 1 else 9.0 if begins else 1.0
        log.append({"step": step, "loss": 0.1, "entropy": step - 1.0, "troll/kl_max": step / 100, "seconds": clock})
        log[-1]["cost/completions"] = made = 256 * math.ceil(step / 4)
        log[-1] |= {"reward": step / 16, "frac_reward_zero_std": 0.25} if begins else {}
        if step % 8 == 0:
            clock += 50.0  # of an evaluation
            log.append({"step": step, HELD_OUT: step / 32, "eval_rewards/right/mean": step / 32, "seconds": clock})
            log[-1] |= {"eval_rewards/form/mean": 1.0, "cost/completions": made}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    record = of_log(run, tmp_path)
    assert record["curve"] == [(0, 0.0), (8, 0.25), (16, 0.5)] and record["area"] == pytest.approx(0.25)
    assert record["seconds"] == [(0, 0.0), (8, 114.0), (16, 138.0)]
    assert record["seconds_per_update"] == pytest.approx(3.0) and record["seconds_without_generation"] == 1.0
    assert record["completions"] == [(0, 0), (8, 512), (16, 1024)]
    assert record["rollouts"] == [
        (1, 1 / 16, 0.75, 256, 99.0), (5, 5 / 16, 0.75, 512, 111.0),
        (9, 9 / 16, 0.75, 768, 123.0), (13, 13 / 16, 0.75, 1024, 135.0),
    ]  # fmt: skip
    # Means of the last two rollout batches, 512 completions, are 3, 7 and 11 sixteenths
    assert [seconds_to_reward(record, sixteenths / 16) for sixteenths in (1, 3, 3.1, 11, 12)] == [
        111.0, 111.0, 123.0, 135.0, None,
    ]  # fmt: skip
    assert record["entropy"] == 13.5 and record["kl_max"] == pytest.approx(0.16) and record["clip_fraction"] is None
    assert record["others"] == {"form": [(0, 1.0), (8, 1.0), (16, 1.0)]}


class Slow(Runner):
    """Writes half of a run's log, and does not end."""

    def _make_start(self, run):
        pass

    def train_and_evaluate(self, run, folder):
        log = [{"step": step, HELD_OUT: step / 16, "seconds": 0.0, "cost/completions": 0} for step in (0, 4)]
        log += [{"step": 1, "loss": 0.1, "seconds": 1.0}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        time.sleep(HANG)


class Quick(Slow):
    def train_and_evaluate(self, run, folder):
        if run.method == "broken":
            raise OSError("no space")
        return describe(run) | {"success": 0.5}


def test_a_stopped_study_continues_from_its_results_alone(tmp_path):
    grid, results = read_grid(write_grid(tmp_path / "grid.yaml")), tmp_path / "results.jsonl"
    runs = grid.runs()
    for seconds in (3, 30, HANG):  # a busy machine may not have begun
        Slow(grid, tmp_path / "one", results, 1, time.monotonic() + seconds).run(runs)
        if results.exists() and "curve" in read_records(results)[0]:
            break
        results.unlink(missing_ok=True)
    (stopped,) = read_records(results)
    assert stopped["error"] == "its time was up" and stopped["curve"] == [[0, 0.0], [4, 0.25]]
    assert stopped["machine"] and stopped["studies"] == ["first", "second"]
    # On another machine, where there are no folders of runs
    Quick(grid, tmp_path / "two", results, 2).run(runs)
    records = read_records(results)
    assert records[0] == stopped and len(records) == 3
    assert {r["method"]: r.get("error", "").partition(";")[0] for r in records[1:]} == {
        "ipo": "", "broken": "OSError: no space",
    }  # fmt: skip
    Quick(grid, tmp_path / "two", results, 2).run(runs, retry=True)
    failed = {r["method"]: "error" in r for r in read_records(results)}
    assert failed == {"troll": False, "ipo": False, "broken": True}


def run_study(folder, *flags):
    command = [sys.executable, "-m", "evidence.run", str(folder / "grid.yaml"), "--output", str(folder / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)
    logs = "".join(log.read_text()[-3000:] for log in folder.rglob("log.txt"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return [line for line in done.stdout.splitlines() if not line.startswith("[")], logs


@pytest.mark.slow
def test_a_study_runs_and_other_seeds_write_no_results(tmp_path):
    write_grid(tmp_path / "grid.yaml")
    (last,), logs = run_study(tmp_path, "--workers", "2")
    assert last.startswith("3 of 3 runs, 1 of them failed."), logs
    results = tmp_path / "results" / "grid.jsonl"
    records = {record["method"]: record for record in read_records(results)}
    assert "num_generations" in records["broken"]["error"] and records["troll"]["kl_max"] <= 0.05 * 1.001
    assert [step for step, _ in records["troll"]["curve"]] == [0, 2, 4] and 0 <= records["ipo"]["success"] <= 1
    assert records["troll"]["start_digest"] == records["ipo"]["start_digest"] and records["troll"]["start_chance"] > 0
    before = results.read_text()
    shown, _ = run_study(tmp_path, "--studies", "first", "--only", "sorting/troll/", "sorting/broken/", "--seeds", "7")
    assert (
        len(shown) == 2
        and shown[0].startswith("sorting/troll/learning_rate=0.0001/seed7: ")
        and results.read_text() == before
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("gsm8k", ["gsm8k/trl/learning_rate=2e-06/seed0", "gsm8k/troll-reuse/"]),
        ("rollout-batch", ["gsm8k/troll/"]),
        ("smollm2-public", ["gpu/trl/"]),
    ],
)
def test_the_plans_for_a_gpu_run_on_a_given_model_by_a_relative_path(tmp_path, name, only):
    """A run changed its working folder, did not find its model again, and was recorded as killed."""
    tokenizer = small_models.make_tokenizer()
    torch.manual_seed(0)
    for saved in (small_models.make_model(tokenizer, max_position_embeddings=1024), tokenizer):
        saved.save_pretrained(tmp_path / "model")
    if name == "smollm2-public":
        (tmp_path / "problems").mkdir()
        row = {"prompt": [{"role": "user", "content": "Calculate 2 + 3."}], "answer": "5"}
        for split, rows in (("train", 32), ("test", 2)):
            (tmp_path / "problems" / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * rows)
    else:
        shutil.copytree(ROOT / "tests" / "data" / "gsm8k", tmp_path / "problems")
    content = yaml.safe_load((EVIDENCE / f"{name}.yaml").read_text())
    content["training"] = str(EVIDENCE / content["training"])
    # Of the plan's settings, those that are for a GPU or take long
    for task in content["tasks"].values():
        task |= {"test": 2, "train": 32}
        task["settings"] |= {
            "use_cpu": True, "bf16": False, "use_vllm": False, "dataloader_pin_memory": False,
            "max_completion_length": 4, "max_steps": 2, "eval_steps": 1, "num_generations": 4,
            "per_device_train_batch_size": 4 if name == "smollm2-public" else 1,  # the others have four micro-batches
        }  # fmt: skip
    for study in content["studies"].values():
        study["seeds"] = [0]
        for cell in study["cells"]:
            cell["learning_rate"] = cell["learning_rate"][:1]
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    (last,), logs = run_study(tmp_path, "--model", "model", "--dataset", "problems", "--only", *only)
    records = read_records(tmp_path / "results" / "grid.jsonl")
    if name == "rollout-batch":
        schedules = [(of["varied"]["steps_per_generation"], of["varied"]["num_iterations"]) for of in records]
        assert sorted(schedules) == [(4, 1), (32, 1), (32, 4), (128, 1)]
    page = table_page("grid", records, content["tables"])
    assert {"gsm8k": "| GSM8K | TROLL 8x4 |", "rollout-batch": "| 8×4 | TROLL |"}.get(name, "") in page
    assert last == f"{len(records)} of {len(records)} runs, 0 of them failed. Results: {tmp_path}/results/grid.jsonl", (
        logs
    )
    for record in records:
        assert [step for step, _ in record["curve"]] == [0, 1, 2] and record["success"] == record["curve"][-1][1]
        assert [step for step, _ in record["seconds"]] == [0, 1, 2] and record["seconds"][-1][1] > 0
        every = record["method"] == "trl" or record["varied"].get("steps_per_generation") == 4
        assert [step for step, *_ in record["rollouts"]] == ([1, 2] if every else [1])
    taken = next((tmp_path / "out" / "starts").rglob("train.jsonl")).read_text()
    assert (tmp_path / "problems" / "train.jsonl").read_text().startswith(taken)

"""The runner of the study in evidence/: runs, interruptions, other machines and given models."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from evidence_grids import EVIDENCE, TASK
from limits import HANG

from evidence.grid import Task, read_grid
from evidence.results import read_records
from evidence.run import Runner
from evidence.starts import make_start

SMALL = {"max_completion_length": 12, "max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 16}


@pytest.fixture
def run_study(tmp_path):
    def run(*flags: str) -> str:
        command = [sys.executable, "-m", "evidence.run", str(tmp_path / "grid.yaml"), "--output", str(tmp_path / "out")]
        done = subprocess.run([*command, *flags], cwd=EVIDENCE.parent, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


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
            "broken": {"settings": {"num_generations": 5}},
            "share": {"variant": "share"},
        },
        "studies": {
            "tuning": {
                "tasks": ["sorting"],
                "methods": ["troll", "clip"],
                "seeds": [100],
                "vary": [{"learning_rate": [1e-4]}],
            },
            "headline": {
                "seeds": [0],
                "cells": [
                    {"task": "sorting", "method": "troll"},
                    {"task": "sorting", "methods": ["broken", "share"], "learning_rate": [1e-4]},
                ],
            },
        },
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    assert run_study("--workers", "2").splitlines()[-2].startswith("5 runs, 1 of them failed.")
    by_method = {
        r["method"]: r for r in read_records(tmp_path / "results" / "grid.jsonl") if "headline" in r["studies"]
    }
    assert "num_generations" in json.dumps(by_method["broken"])
    assert by_method["troll"]["kl_max"] <= 0.05 * 1.001 and 0 <= by_method["share"]["success"] <= 1
    assert 0 <= by_method["share"]["regression_share"] < 1
    assert [step for step, _ in by_method["troll"]["curve"]] == [0, 2, 4]

    # An interruption before the last run ended: that one is run again, and nothing else
    (result,) = (tmp_path / "out" / "runs" / "sorting" / "share").rglob("result.json")
    before, record = (tmp_path / "results" / "grid.jsonl").read_text(), result.read_text()
    result.unlink()
    lines = [line for line in run_study().splitlines() if line.startswith("[")]
    assert len(lines) == 2 and "start" in lines[0] and "share" in lines[1]
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


@pytest.mark.slow
def test_a_given_model_trains_on_generated_problems(tmp_path, run_study):
    start = tmp_path / "start"
    make_start(start, Task(**TASK, settings={}), 0)
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

"""The plan for minutes of a GPU (`evidence/gsm8k.yaml`): with a tiny model, its clock, and its weights in pieces."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from limits import HANG
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence import run as runner
from evidence import tables
from evidence.grid import GivenTask, Run, content_of, read_grid
from evidence.pack_weights import decode, encode, join, pack
from evidence.results import DEFAULTS, describe, machine, read_records
from troll_trl import small_models

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = ROOT / "tests" / "data" / "gsm8k"
# Of the plan's settings, those that are for a GPU or take long
SMALL = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False, "max_completion_length": 4, "max_steps": 8}
SMALL |= {"per_device_train_batch_size": 4, "eval_steps": 4, "num_generations": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_models.make_tokenizer()
    torch.manual_seed(0)
    for saved in (small_models.make_model(tokenizer, max_position_embeddings=1024), tokenizer):
        saved.save_pretrained(folder)
    return folder


def small_plan(file, **changes):
    content = yaml.safe_load((ROOT / "evidence" / "gsm8k.yaml").read_text()) | changes
    content |= {key: str(ROOT / "evidence" / content[key]) for key in ("training", "evaluation")}
    (task,) = content["tasks"].values()
    task |= {"test": 2, "candidates": 16}
    task["settings"] |= SMALL
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
def test_weights_and_problems_travel_and_the_results_come_back(tmp_path, model):
    """Pack, join, run and report with a tiny model, in a copy of the repository, as on a machine without a network."""
    copy, there, out = (tmp_path / name for name in ("copy", "there", "out"))
    for name in ("evidence", "math_answers", "scripts", "troll_trl"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("results", "tables"))
    shutil.copy(ROOT / "Makefile", copy)
    one, two = ({"tasks": ["gsm8k"], "methods": [name], "seeds": [0]} for name in ("troll", "binary-pull"))
    studies = {"a": one | {"vary": [{"learning_rate": [1e-5]}]}, "b": two | {"vary": [{"learning_rate": [3e-5]}]}}
    small_plan(copy / "evidence" / "gsm8k.yaml", studies=studies)
    lines = {split: (PROBLEMS / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
    packed = shutil.copytree(model, tmp_path / "model")
    for split in lines:
        shutil.copy(PROBLEMS / f"{split}.jsonl", packed)
    pack(packed, tmp_path / "pieces", 2**20)
    join(tmp_path / "pieces", there)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "evidence-gpu", f"MODEL={there}", f"DATASET={there}", "MINUTES=60", "RUNS=2", f"OUT={out}"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=HANG)
    logs = "".join(log.read_text() for log in copy.rglob("log.txt"))
    assert done.returncode == 0 and "2 runs, 0 of them failed." in done.stdout, done.stdout + done.stderr + logs
    records = {record["method"]: record for record in read_records(out / "gsm8k.jsonl")}
    assert records.keys() == {"troll", "binary-pull"}
    for record in records.values():
        assert [step for step, _ in record["curve"]] == [0, 4, 8] and record["success"] == 0
        assert record["others"].keys() == {"answer_format_reward"}
    assert (out / "gsm8k.md").read_text().count("| 0.0 at 0 ") == 2
    with tarfile.open(out / "gsm8k-logs.tgz") as archive:
        kept = [Path(name).name for name in archive.getnames()]
    assert sorted(kept) == ["log.txt", "log.txt", "trainer_state.json", "trainer_state.json"]
    runs = copy / "outputs" / "evidence" / "gsm8k"
    for split, count in (("train", 16), ("test", 2)):  # all candidates, whether the model solves them or not
        assert (runs / "starts" / "gsm8k" / "data" / f"{split}.jsonl").read_text().splitlines() == lines[split][:count]
    # Both had the instruction of the plan, in training and evaluation alike
    for settings in runs.glob("runs/*/*/*/seed0/config.yaml"):
        assert "\\boxed{}" in settings.read_text()


STAND_IN = """#!/bin/sh
case "$*" in
*evidence.run*) mkdir -p evidence/results; echo "$*" >evidence/results/gsm8k.jsonl; exec sleep 600;;
esac
"""


@pytest.mark.slow  # some seconds, in which nothing works
def test_results_of_a_machine_that_is_taken_away_are_there(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    command = ["make", "evidence-gpu", "MODEL=/m", "DATASET=/d", "MINUTES=7"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    results, deadline = tmp_path / "out" / "gsm8k.jsonl", time.monotonic() + HANG
    while not (results.exists() and results.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    flags = "--model /m --dataset /d --workers 3 --minutes 7 --resume"
    assert results.read_text() == f"-m evidence.run evidence/gsm8k.yaml {flags}\n"


def test_a_record_names_the_gpus(tmp_path, monkeypatch):
    assert machine().endswith(torch.__version__) or shutil.which("nvidia-smi")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine().endswith(f"{torch.__version__}, NVIDIA H100 80GB HBM3")


def test_updates_that_a_generation_precedes_are_told_apart(tmp_path):
    run = Run("gsm8k", "troll", (("learning_rate", 1e-5),), 0)
    log = [{"step": 0, "eval_rewards/math_accuracy_reward/mean": 0.0}]
    log += [{"step": i + 1, "loss": 0.1, "step_time": 9.0 if i % 8 == 0 else 1.0} for i in range(16)]
    log[1]["step_time"] = 99.0  # the first rollout batch is a warm-up
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    record = runner.of_log(run, tmp_path)
    assert record["seconds_per_update"] == pytest.approx(2.0) and record["seconds_without_generation"] == 1.0


def test_a_record_has_the_share_of_the_tokens_with_a_penalty(tmp_path):
    """`None` if the method logs none; records of earlier runs lack it."""
    log = [{"step": 0, "eval_rewards/math_accuracy_reward/mean": 0.0}]
    log += [{"step": i + 1, "loss": 0.1} for i in range(2)]
    for shares, expected in (((), None), ((0.0, 0.2), 0.1)):
        for line, share in zip(log[1:], shares, strict=False):
            line["troll/penalized_fraction"] = share
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        record = runner.of_log(Run("gsm8k", "binary-pull", (), 0), tmp_path)
        assert record["penalized_fraction"] == (None if expected is None else pytest.approx(expected))


def test_gsm8ks_table_has_every_run_the_stopped_ones_too():
    run = Run("gsm8k", "troll", (("learning_rate", 1e-5),), 0)
    log = {"curve": [[0, 0.125], [16, 0.25]], "length": 199.6, "seconds_per_update": 2.0}
    ended = describe(run) | log | {"success": 0.3125, "seconds_without_generation": 0.5, "area": 0.2}
    stopped = describe(replace(run, method="clip-0.2")) | log | {"error": "its time was up"}
    failed = describe(replace(run, varied=(("learning_rate", 3e-5),))) | {"error": "CUDA out of memory"}
    assert tables.every_gsm8k_run([failed, ended, stopped]).splitlines()[2:] == [
        "| troll | 1e-05 | 12.5 at 0 25.0 at 16 | 31.2 | 200 | 2.00 | 0.50 |",
        "| clip-0.2 | 1e-05 | 12.5 at 0 25.0 at 16 | its time was up | 200 | 2.00 |  |",
        "| troll | 3e-05 |  | CUDA out of memory |  |  |  |",
    ]


def test_the_plan_is_the_same_for_all_methods():
    grid = read_grid(ROOT / "evidence" / "gsm8k.yaml")
    (training, base) = sorted(content_of(grid.training), key=lambda content: "max_steps" not in content)
    content = base | training
    updates = content["steps_per_generation"] // content["gradient_accumulation_steps"]
    assert updates == DEFAULTS["steps_per_generation"] == 8, "`seconds_per_update` leaves out one rollout batch"
    assert content["max_steps"] == 32 and grid.tasks["gsm8k"].settings["max_completion_length"] == 256
    first, second, third = grid.studies.values()
    assert first.methods == second.methods and [*first.methods, *third.methods] == list(grid.methods)
    (low,), (high,), both = (
        alternative["learning_rate"] for study in (first, second, third) for alternative in study.vary
    )
    assert high == pytest.approx(3 * low) and both == [low, high]


# -- The clock --------------------------------------------------------------------------------------------------------


def test_no_job_runs_after_the_deadline(tmp_path, capsys):
    jobs = {"first": lambda: None, "long": partial(time.sleep, HANG), "never": lambda: (tmp_path / "never").touch()}
    saved = []
    log_of = lambda name: tmp_path / f"{name}.txt"
    left = runner.run_all(jobs.items(), 1, log_of, lambda: saved.append(1), time.monotonic() + 3)
    assert left == {"never"} and not (tmp_path / "never").exists() and len(saved) == 2
    said = capsys.readouterr().out
    assert "first: done" in said and "long: failed" in said and "never" not in said


def test_without_a_deadline_all_jobs_run_and_after_it_none_begins(tmp_path):
    jobs = {name: (tmp_path / name).touch for name in "abc"}
    log_of = lambda name: tmp_path / f"{name}.txt"
    assert runner.run_all(jobs.items(), 2, log_of) == set()
    assert all((tmp_path / name).exists() for name in jobs)
    assert runner.run_all(jobs.items(), 2, log_of, deadline=time.monotonic()) == set(jobs)


class Slow(runner.Runner):
    """Writes half of a run's log, and does not end."""

    def train_and_evaluate(self, run, start, folder):
        log = [{"step": step, "eval_rewards/math_accuracy_reward/mean": step / 16} for step in (0, 4)]
        log += [{"step": step, "loss": 0.1, "step_time": 2.0} for step in range(1, 6)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        self.end()

    def end(self):
        time.sleep(HANG)


class Broken(Slow):
    def end(self):
        raise OSError("no space")


def test_a_stopped_run_keeps_what_it_had_logged_and_the_others_wait(tmp_path):
    grid = read_grid(small_plan(tmp_path / "grid.yaml"))
    task = grid.tasks["gsm8k"]
    assert isinstance(task, GivenTask)
    grid = replace(grid, tasks={"gsm8k": replace(task, dataset=str(PROBLEMS))})
    results = tmp_path / "results.jsonl"
    runs = grid.runs("one-rate")
    Slow(grid, tmp_path / "out", 1, results, time.monotonic() + 4).run(runs, retry=False)
    (record,) = read_records(results)
    expected = describe(runs[0]) | {"error": "its time was up", "curve": [[0, 0.0], [4, 0.25]], "start": 0.0}
    assert record.items() >= expected.items() and record["studies"] == ["one-rate"]
    # A run that fails keeps it too
    Broken(grid, tmp_path / "broken", 1, tmp_path / "broken.jsonl").run(runs[1:2], retry=False)
    (record,) = read_records(tmp_path / "broken.jsonl")
    assert record["curve"] == [[0, 0.0], [4, 0.25]] and record["error"].startswith("OSError: no space")
    # Later the others run, and with `retry` the stopped one too
    wanted = []

    class Quick(runner.Runner):
        def train_and_evaluate(self, run, start, folder):
            (folder / "ran").touch()
            return describe(run) | {"success": 0.5}

    for retry in (False, True):
        Quick(grid, tmp_path / "out", 1, results).run(runs, retry)
        wanted.append({r["method"] for r in read_records(results) if "error" not in r})
    assert wanted == [{"clip-0.2", "binary-pull"}, {"troll", "clip-0.2", "binary-pull"}]


@pytest.mark.parametrize(("workers", "together"), [(2, [6] * 6), (6, [6] * 6), (18, [18, 18]), (20, [24, 12])])
def test_workers_do_not_wait_for_a_seed_with_fewer_runs(workers, together, tmp_path):
    """The loan for SmolLM2 has 18 workers and 6 runs of each seed."""
    grid = read_grid(ROOT / "evidence" / "smollm2-rate.yaml")
    runs = grid.runs("pull-fresh")
    groups = runner.Runner(grid, tmp_path, workers)._seeds_together(runs)
    assert list(map(len, groups)) == together
    assert [run.seed for group in groups for run in group] == sorted(run.seed for run in runs), "seed by seed"


# -- Weights in pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 32), (5, 7), (1, 1), (2, 3, 50), (128, 129), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_moves_by_a_level_at_most(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    joined = decode(encode(weight))
    assert joined.shape == weight.shape and joined.dtype == torch.float32
    exact = weight.double().flatten()
    for at in range(0, len(exact), 32):
        block, of_joined = exact[at : at + 32], joined.double().flatten()[at : at + 32]
        largest = block[block.abs().argmax()]
        level = largest.abs() / 16
        moves = (block - of_joined).abs()
        assert moves.max() <= level * 16 / 15
        most = block * largest.sign() >= -15.4 * level  # on the other side there are 15 levels
        assert moves[most].max() <= level / 2 * (1 + 2e-2)  # of the scale's rounding in float16


def test_weights_of_five_bits_stay_what_they_are():
    levels = torch.randint(-16, 16, (40, 32), generator=torch.Generator().manual_seed(0))
    levels[:, 3] = -16
    scales = torch.randn(40, 1, generator=torch.Generator().manual_seed(1)).half().float()
    torch.testing.assert_close(decode(encode(levels * scales)), levels * scales, rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-3, -3e4, 2.5])
def test_equal_weights_stay_what_they_are(value):
    weight = torch.full((2, 130), value)
    torch.testing.assert_close(decode(encode(weight)), weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_weight_without_a_scale_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        encode(torch.tensor([[1.0, value]]))


def test_a_model_is_packed_in_pieces_and_joined(tmp_path, model):
    count = pack(model, tmp_path / "pieces", 2**14)
    names = sorted(path.name for path in (tmp_path / "pieces").iterdir())
    assert names == [*(f"piece-{i:03d}" for i in range(count)), "pieces.json"] and count > 3
    sizes = [os.path.getsize(tmp_path / "pieces" / name) for name in names[:-1]]
    assert max(sizes) <= 2**14 and sum(sizes) < 0.5 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    join(tmp_path / "pieces", tmp_path / "joined")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "joined"))
    assert after.keys() == before.keys() and all(weight.dtype == torch.float32 for weight in after.values())
    for name, weight in before.items():
        largest = weight.abs().max().item()
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0 if weight.dim() == 1 else largest / 15)
    text = "What is 3 + 4?"
    tokens = [AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (model, tmp_path / "joined")]
    assert tokens[0] == tokens[1]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "joined")]
    logits = [m(input_ids=torch.tensor([tokens[0]])).logits for m in models]
    torch.testing.assert_close(*logits, rtol=0, atol=0.2 * logits[0].abs().max().item())


def test_exact_weights_stay_what_they_are(tmp_path, model):
    pack(model, tmp_path / "pieces", 2**20, exact=True)
    join(tmp_path / "pieces", tmp_path / "joined")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "joined"))
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_of_several_files_in_half_precision_becomes_float32(tmp_path):
    (tmp_path / "model").mkdir()
    for i in range(2):
        weights = {f"w{i}": torch.ones(3, 200, dtype=torch.bfloat16), f"norm{i}": torch.ones(5, dtype=torch.bfloat16)}
        save_file(weights, tmp_path / "model" / f"model-{i}.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"dtype": "bfloat16"}')
    pack(tmp_path / "model", tmp_path / "pieces", 2**20)
    join(tmp_path / "pieces", tmp_path / "joined")
    for i in range(2):
        weights = load_file(tmp_path / "joined" / f"model-{i}.safetensors")
        assert weights.keys() == {f"w{i}", f"norm{i}"}
        assert all(weight.dtype == torch.float32 and (weight == 1).all() for weight in weights.values())
    assert json.loads((tmp_path / "joined" / "config.json").read_text())["dtype"] == "float32"


def test_missing_and_damaged_pieces_are_named(tmp_path, model):
    pack(model, tmp_path / "pieces", 2**14)
    (tmp_path / "pieces" / "piece-001").unlink()
    damaged = tmp_path / "pieces" / "piece-002"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"2 of \d+ pieces: piece-001 is missing, piece-002 is damaged\. Send them"):
        join(tmp_path / "pieces", tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_folder_without_weights_cannot_be_packed(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        pack(tmp_path, tmp_path / "pieces", 2**20)

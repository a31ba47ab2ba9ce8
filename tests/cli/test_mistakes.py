"""A mistake that is found before training ends with one line. The user's code, and a bug of ours, keep a traceback."""

import sys

import pytest

from tests.tiny import saved_model
from troll_trl.cli import check, train

RUN = """
model_name_or_path: model
dataset_name: problems.jsonl
output_dir: out
use_cpu: true
bf16: false
report_to: none
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 4
max_steps: 1
save_strategy: "no"
reward_funcs: [rewards_of_mistakes.ones]
"""
REWARDS = """
def ones(completions, **kwargs): return [1.0] * len(completions)
def bug(completions, **kwargs): return int("one")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train with some flags, in a folder with a model, prompts and rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    saved_model(tmp_path / "model")
    (tmp_path / "problems.jsonl").write_text("".join(f'{{"prompt": "w{n} w5"}}\n' for n in range(8)))
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rewards_of_mistakes.py").write_text(REWARDS)
    return lambda *flags: train.main(["--config", "run.yaml", *flags])


def refused(capsys, command, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        command(*words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in said
    return said.rpartition(" error: ")[2]


def test_a_model_that_is_missing_or_incomplete_is_named(run, capsys, tmp_path):
    """Its tokenizer, half of its weights, or all of it: "couldn't connect"."""
    assert "there is no folder runs/model " in refused(capsys, run, "--model_name_or_path", "runs/model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model/model.safetensors is incomplete" in refused(capsys, run)
    assert "model/model.safetensors is incomplete" in refused(capsys, check.main, ["--model", "model"])
    for file in (tmp_path / "model").glob("token*"):
        file.unlink()
    weights.unlink()
    assert "model has no tokenizer" in refused(capsys, run)


def test_the_users_code_and_a_bug_of_ours_keep_their_traceback(run, monkeypatch):
    with pytest.raises(ValueError, match="'one'"):
        run("--reward_funcs", "rewards_of_mistakes.bug")
    monkeypatch.setattr("troll_trl.cli.make_trainer.load_datasets", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run()

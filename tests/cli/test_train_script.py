"""scripts/train.py from the command line to a saved model, on a tiny random Qwen3."""

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForSequenceClassification

from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.support.thoughts import OPENED, thinking_tokenizer
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer
from troll_trl.cli import check
from troll_trl.cli.folder_lock import LOCK, locked
from troll_trl.cli.train import train as train_with

SCRIPT = ROOT / "scripts" / "train.py"
SETTINGS = """
model_name_or_path: model
dataset_name: problems.jsonl
instruction: w1 w2
reward_funcs: [math_accuracy, my_rewards.share_of_low_tokens]
output_dir: out
use_cpu: true
bf16: false
report_to: none
gradient_checkpointing: false
accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}  # transformers writes into it
per_device_train_batch_size: 8
num_generations: 4
steps_per_generation: 2  # the second update of a rollout batch is off-policy
max_completion_length: 6
max_steps: 2
save_steps: 1
logging_steps: 1
learning_rate: 1e-2
kl_bound: 0.001
seed: 3
"""
REWARDS = """
def share_of_low_tokens(completion_ids, **kwargs):
    return [sum(token < 50 for token in ids) / len(ids) for ids in completion_ids]
def bug(**kwargs):
    return int("one")
"""


@pytest.fixture
def workplace(tmp_path):
    """A folder with a model, problems, a reward function and a config."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"a sum\n#### {n}"} for n in range(16)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(SETTINGS)
    return tmp_path


def in_a_process(folder: Path, *flags: str) -> str:
    """What the script prints, started as a user does."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), "--config", "run.yaml", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def run(workplace, monkeypatch, capsys, caplog):
    """The script in this process, where torch and TRL are imported already; its exit code, and what it says."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("sys.path", [*sys.path])  # the script adds to it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*flags: str, config: str = "run.yaml") -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["train.py", "--config", config, *flags])
        sys.modules.pop("my_rewards", None)  # of another run
        caplog.clear()
        code = 0
        with warnings.catch_warnings(record=True) as warned:
            try:
                runpy.run_path(str(SCRIPT), run_name="__main__")
            except SystemExit as stop:
                code = stop.code
        shown = capsys.readouterr()
        return code, "\n".join([shown.out, shown.err, caplog.text, *(str(warning.message) for warning in warned)])

    return run


@pytest.fixture
def train(run):
    def train(*flags: str, **options):
        code, said = run(*flags, **options)
        assert code == 0, said

    return train


def log_of(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_troll_trains_saves_and_resumes(workplace, train):
    progress = in_a_process(workplace, "--top_k", "50", "--resume")  # from nothing: it starts
    out = workplace / "out"
    first, second = [line for line in log_of(out) if "loss" in line]

    assert first["troll/projected_fraction"] == 0  # the weights of the rollout
    assert second["troll/projected_fraction"] > 0
    assert second["troll/kl_max"] <= 0.001 * 1.001 < second["troll/policy_kl_max"]
    assert 0 < first["memory/cpu_peak_gib"] <= second["memory/cpu_peak_gib"]
    assert first["cost/completions"] == second["cost/completions"] == 16  # of one generation
    assert 0 < first["cost/minutes"] < second["cost/minutes"]
    assert re.search(r"step 1/2, \d+:\d\d < \d+:\d\d: reward", progress)
    assert f"projected {second['troll/projected_fraction']:.2%}" in progress

    # What is saved loads, and has moved
    assert len(AutoTokenizer.from_pretrained(out)) == 100
    model, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, workplace / "model"))
    assert (model.lm_head.weight - start.lm_head.weight).abs().max() > 5e-3

    # The settings in force were saved, and repeat the run
    settings = yaml.safe_load((out / "config.yaml").read_text())
    set_by_flags = {"top_k": 50, "resume": True, "algorithm": "grpo"}
    assert settings == yaml.safe_load(SETTINGS) | {"learning_rate": 0.01} | set_by_flags
    train("--output_dir", "again", config="out/config.yaml")
    weights, again = (load_file(folder / "model.safetensors") for folder in (out, workplace / "again"))
    assert all(torch.equal(weights[name], again[name]) for name in weights)

    # Resuming takes up at the last checkpoint: one more update, not three
    before = log_of(out)
    train("--resume", "--max_steps", "3")
    assert [line for line in log_of(out) if "loss" in line][:2] == [line for line in before if "loss" in line]
    third = log_of(out)[-2]
    assert [line["step"] for line in log_of(out) if "loss" in line] == [1, 2, third["step"]] == [1, 2, 3]
    assert third["cost/completions"] == 32 and third["cost/minutes"] > second["cost/minutes"]
    assert (out / "checkpoint-3").is_dir()

    # A resume that fails leaves the options of the run
    (workplace / "my_rewards.py").write_text("def share_of_low_tokens(**kwargs):\n    raise ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        train("--resume", "--max_steps", "4", "--temperature", "0.5")  # generates anew
    assert yaml.safe_load((out / "config.yaml").read_text())["max_steps"] == 3


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_without_checkpoints_is_not_replaced(workplace, train, run):
    """The guard looked for checkpoints alone: another seed or method trained over the model in silence."""
    train("--save_strategy", "no", "--max_steps", "1")
    before = contents(workplace / "out")
    assert (workplace / "out" / "README.md").is_file()
    for flags, expected in (
        (("--seed", "4"), "out holds a run (trainer_state.json)"),
        (("--method", "clip"), "out holds a run (trainer_state.json)"),
        (("--resume",), "no checkpoint to resume from"),
    ):
        code, said = run("--save_strategy", "no", *flags)
        assert code == 2 and expected in said.replace("\n", " ")
    (workplace / "out" / "trainer_state.json").unlink()  # TRL's own script saves the model alone
    code, said = run()
    assert code == 2 and "out holds a run (config.json)" in said
    assert contents(workplace / "out").items() == before.items() - {
        (path, text) for path, text in before.items() if path.name == "trainer_state.json"
    }


def test_a_folder_that_the_run_reads_or_that_another_run_writes_is_refused(workplace, run):
    """A run overwrote its start model, and two runs in one folder mixed their files."""
    (workplace / "data").mkdir()
    (workplace / "problems.jsonl").rename(workplace / "data" / "train.jsonl")
    data = ("--dataset_name", "data")
    before = contents(workplace)
    for flags, expected in (
        (("--output_dir", "model"), "`output_dir` and `model_name_or_path` are the same folder"),
        (("--output_dir", "./model/", "--resume"), "`output_dir` and `model_name_or_path` are the same folder"),
        (("--output_dir", "data"), "`output_dir` and `dataset_name` are the same folder"),
        (("--output_dir", ""), "`output_dir` is empty"),
        (("--output_dir", "run.yaml"), "The output folder run.yaml cannot be written to: File exists"),
    ):
        code, said = run(*data, *flags)
        assert code == 2 and expected in said.replace("\n", " "), said
    with locked(workplace / "out"):
        code, said = run(*data)
    assert code == 2 and "Another process is writing a run into out" in said.replace("\n", " ")
    assert contents(workplace) == before | {workplace / "out" / LOCK: b""}


def checkpoint(folder: Path, step: int, torn: bool = False):
    (path := folder / f"checkpoint-{step}").mkdir(parents=True)
    for name in ("config.json",) if torn else ("config.json", "trainer_state.json"):
        (path / name).write_text("{}")


@pytest.mark.parametrize(
    ("method", "flags", "expected"),
    [
        ("troll", (), "out holds a run (checkpoint-10), which this one would replace"),
        (None, ("--method", "clip", "--resume"), "`method` is clip"),
        ("clip", ("--resume_from_checkpoint", "out/_saving/checkpoint-12"), "`method` is troll"),
        ("troll", ("--algorithm", "rloo", "--resume"), "`algorithm` is rloo"),
        ("troll", ("--optim", "sgd", "--resume"), "`optim` is sgd"),
        ("[", ("--resume",), "out/config.yaml cannot be read"),
    ],
)
def test_no_run_replaces_another_or_goes_on_with_what_it_did_not_train(method, flags, expected, run):
    """A clip's run in the folder of TROLL's rotated its checkpoints away, or saved its weights as the clip's."""
    for step in (2, 10):
        checkpoint(Path("out"), step)
    checkpoint(Path("out/_saving"), 12)
    named = "" if method is None else f"method: {method}\n"  # the default is in no file
    Path("out/config.yaml").write_text(f"learning_rate: 1.0e-6\n{named}")
    code, said = run(*flags)
    assert code == 2 and expected in said.replace("\n", " ")
    assert {path.name for path in Path("out").iterdir()} == {"_saving", "checkpoint-2", "checkpoint-10", "config.yaml"}


def test_a_clips_run_goes_on_from_what_was_saved_whole(workplace, train):
    """The Trainer writes `trainer_state.json` last; without it `resume` ended in a traceback."""
    checkpoint(workplace / "out", 9, torn=True)
    train("--method", "clip", "--save_steps", "1", "--learning_rate", "1e-3")
    line = next(line for line in log_of(workplace / "out") if "loss" in line)
    assert "clip_ratio/region_mean" in line
    assert not any(name.startswith("troll/") for name in line)
    train("--method", "clip", "--save_steps", "1", "--learning_rate", "1e-3", "--resume", "--max_steps", "3")
    assert [line["step"] for line in log_of(workplace / "out") if "loss" in line] == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--model_name_or_path", "outputs/no/model"), "there is no folder outputs/no/model"),
        (("--model_name_or_path", "adapter"), "adapter is an adapter"),
        (("--report_to", "azure_ml"), "`report_to`"),
        (("--max_steps", "0"), "`max_steps` is 0"),
        (("--max_steps", "-1", "--num_train_epochs", "0"), "`num_train_epochs` is 0"),
        (("--max_train_samples", "3"), "3 prompts, and a rollout batch takes 4"),
        (("--resume_from_checkpoint", "model/checkpoint-4"), "there is no checkpoint in model/checkpoint-4"),
    ],
)
def test_a_mistake_stops_before_training_with_one_paragraph(workplace, flags, expected, run):
    (workplace / "adapter").mkdir()
    (workplace / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "model"}')
    code, said = run(*flags)
    message = said.rpartition("train.py: error: ")[2].rstrip()
    assert code == 2 and expected in message and len(message.splitlines()) < 4
    assert not (workplace / "out" / "config.yaml").exists()  # that of an earlier run would stay as it was


def test_a_model_that_is_missing_or_incomplete_is_named(workplace, run, capsys):
    """Its tokenizer, half of its weights, or all of it: "couldn't connect"."""
    weights = workplace / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    code, said = run()
    assert code == 2 and "model/model.safetensors is incomplete" in said.replace("\n", " ") and "Traceback" not in said
    with pytest.raises(SystemExit, match="2"):
        check.main(["--model", "model"])
    assert "model/model.safetensors is incomplete" in capsys.readouterr().err.replace("\n", " ")
    for file in [*(workplace / "model").glob("token*"), weights]:
        file.unlink()
    code, said = run()
    assert code == 2 and "model has no tokenizer" in said.replace("\n", " ")


def test_the_users_code_and_a_bug_of_ours_keep_their_traceback(run, monkeypatch):
    with pytest.raises(ValueError, match="'one'"):
        run("--reward_funcs", "my_rewards.bug")
    monkeypatch.setattr("troll_trl.cli.make_trainer.load_datasets", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run("--output_dir", "other")


def test_its_reward_reads_the_tags_of_thoughts(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    tokenizer = thinking_tokenizer(opens="<think>")
    tokenizer.save_pretrained("model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained("model")
    options = {"reward_funcs": ["math_accuracy"], "max_steps": 1, "gradient_checkpointing": False}
    trainer = train_with(yaml.safe_load(SETTINGS) | options)
    texts = [text for text, _ in OPENED]
    given = {"completions": texts, "completion_ids": tokenizer(texts).input_ids, "solution": ["4"] * len(texts)}
    assert trainer.reward_funcs[0](prompts=[""] * len(texts), **given) == [reward for _, reward in OPENED]


def test_yaml_of_a_trl_grpo_command_with_a_mixture_and_a_reward_model(workplace, train):
    for name in ("one", "two"):
        (workplace / f"{name}.jsonl").write_text("".join(f'{{"prompt": "w{i} w5"}}\n' for i in range(8)))
    Qwen3ForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(workplace / "reward_model")
    tiny_tokenizer().save_pretrained(workplace / "reward_model")
    kept = [line for line in SETTINGS.splitlines() if not line.startswith(("dataset", "reward", "instruction"))]
    mixture = """
datasets: [{path: json, data_files: one.jsonl}, {path: json, data_files: two.jsonl}]
test_split_size: 0.25
eval_strategy: steps
eval_steps: 2
reward_model_name_or_path: reward_model
reward_funcs: [get_soft_overlong_punishment, my_rewards.share_of_low_tokens]
"""
    (workplace / "run.yaml").write_text("\n".join(kept) + mixture)
    train("--save_strategy", "no")
    lines = log_of(workplace / "out")
    trained, evaluated = (next(line for line in lines if name in line) for name in ("loss", "eval_reward"))
    for name in ("soft_overlong_punishment_reward", "share_of_low_tokens"):
        assert f"rewards/{name}/mean" in trained and f"eval_rewards/{name}/mean" in evaluated
    assert sum(name.startswith("rewards/") and name.endswith("/mean") for name in trained) == 3


def test_bad_numbers_and_sigterm_end_with_a_code_and_no_traceback(workplace, run):
    (workplace / "my_rewards.py").write_text("def share_of_low_tokens(completion_ids, **kwargs):\n" + BAD_REWARD)
    code, said = run("--max_skipped_updates", "2")
    assert code == 1 and "share_of_low_tokens" in said.rpartition("train.py: error: ")[2]
    (workplace / "my_rewards.py").write_text(
        "import os, signal\ndef share_of_low_tokens(completion_ids, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n" + BAD_REWARD.replace("nan", "0")
    )
    code, _ = run("--output_dir", "stopped", "--max_steps", "4")
    assert code == 143
    assert (workplace / "stopped" / "checkpoint-1" / "complete.json").is_file()
    assert not (workplace / "stopped" / "model.safetensors").exists(), "it is not finished"


BAD_REWARD = "    return [float('nan')] + [0.0] * (len(completion_ids) - 1)\n"


def test_an_adapter_has_no_dropout_by_default(workplace, train):
    """With TRL's 0.05, the trust region takes the dropout for a step of the policy."""
    train("--use_peft", "--max_steps", "1")
    assert json.loads((workplace / "out" / "adapter_config.json").read_text())["lora_dropout"] == 0.0


def test_a_token_is_written_into_no_file_of_a_run(workplace, train, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_before")
    (workplace / "run.yaml").write_text(f"{SETTINGS}hub_token: hf_secret\nenv: {{WANDB_API_KEY: key_secret}}\n")
    monkeypatch.setenv("WANDB_API_KEY", "before")
    train("--hub_token=hf_secret")
    assert os.environ["HF_TOKEN"] == "hf_secret" and os.environ["WANDB_API_KEY"] == "key_secret"
    files = [file for file in (workplace / "out").rglob("*") if file.is_file()]
    assert {"training_args.bin", "config.yaml"} <= {file.name for file in files}
    assert [file for file in files if b"secret" in file.read_bytes()] == []

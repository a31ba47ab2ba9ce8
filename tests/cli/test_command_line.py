"""What files and flags mean: values, `base`, `env`, names of configs, and what goes to `accelerate launch`."""

import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from tests.support.limits import HANG
from tests.support.training_args import parse_training_args
from troll_trl import TrollGRPOConfig
from troll_trl.cli import configs, train
from troll_trl.cli.arguments import training_parser
from troll_trl.cli.command_line import config_names, configs_folder, read_command, read_config

ENOUGH = "model_name_or_path: some/model\ndataset_name: problems.jsonl\nuse_cpu: true\nbf16: false\noutput_dir: out\n"


@pytest.fixture
def options(tmp_path, monkeypatch):
    """The options that a file with some more lines, and flags, set."""
    monkeypatch.chdir(tmp_path)

    def options(text: str = "", *flags: str) -> dict:
        (tmp_path / "run.yaml").write_text(f"{ENOUGH}{text}\n")
        return train.read_options(["--config", "run.yaml", *flags], "train.py")

    return options


# A field, its value in a file, the words after its flag that say the same, and what both mean
VALUES = [
    ("learning_rate", "1e-6", ["1e-6"], 1e-6),  # PyYAML reads it as text
    ("max_grad_norm", "3", ["3"], 3.0),
    ("run_name", "'007'", ["007"], "007"),
    ("weight_decay", "-1e-5", ["-1e-5"], -1e-5),  # argparse takes it for a flag
    ("use_vllm", "'true'", [], True),
    ("system_prompt", "'--- begin'", None, "--- begin"),
    ("resume_from_checkpoint", "true", None, True),
    ("scale_rewards", "false", None, False),
    ("reward_weights", "[1, 2.5]", ["1", "2.5"], [1.0, 2.5]),
    ("reward_funcs", "one.alone", ["one.alone"], ["one.alone"]),
    ("report_to", "[wandb, tensorboard]", None, ["wandb", "tensorboard"]),
    ("datasets", "[{path: a/b}]", ["a/b"], [{"path": "a/b"}]),
    ("model_init_kwargs", "{a: 'off', b: [1, null]}", ['{"a": "off", "b": [1, null]}'], {"a": "off", "b": [1, None]}),
    ("dataset_config", "null", None, None),
]


@pytest.mark.parametrize(("name", "text", "words", "expected"), VALUES)
def test_a_value_means_in_a_file_what_it_means_as_a_flag(options, name, text, words, expected):
    given = [options(f"{name}: {text}")[name]]
    given += [] if words is None else [options("", f"--{name}", *words)[name]]
    assert given == [expected] * len(given) and {type(value) for value in given} == {type(expected)}


def test_options_are_what_was_set_with_flags_over_files(options):
    given = options("max_steps: 5\nseed: 3", "--max_steps=7", "--no_shuffle_dataset", "--reward_funcs", "a.b", "c.d")
    expected = {"max_steps": 7, "seed": 3, "shuffle_dataset": False, "reward_funcs": ["a.b", "c.d"]}
    assert given == yaml.safe_load(ENOUGH) | expected | {"algorithm": "grpo"}


def test_env_is_set_before_torch_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text("env: {HF_HOME: here, COUNT: 3}\nmax_steps: 1")
    code = "import os, sys\nfrom troll_trl.cli.command_line import read_command\n"
    code += "read_command(['--config', 'run.yaml'], 'x')\n"
    code += "print(os.environ['HF_HOME'], os.environ['COUNT'], {'torch', 'huggingface_hub'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "here 3 set()\n", done.stderr


def test_every_option_of_trls_own_commands_is_known():
    shared = (ModelConfig, DatasetMixtureConfig)
    theirs = {"grpo": (GRPOScriptArguments, GRPOConfig, *shared), "rloo": (RLOOScriptArguments, RLOOConfig, *shared)}
    for algorithm, kinds in theirs.items():
        names = {field.name for kind in kinds for field in fields(kind)}
        assert names - training_parser(algorithm, "x").hints.keys() == set()


@pytest.mark.parametrize(
    ("text", "flags", "config"),
    [
        ("method: clip\nkl_bound: 0.1\nloss_type: cispo", (), GRPOConfig),
        ("algorithm: rloo", ("--method", "clip"), RLOOConfig),
        ("algorithm: rloo", ("--algorithm", "grpo"), TrollGRPOConfig),
    ],
)
def test_algorithm_and_method_decide_the_config(options, text, flags, config):
    options(text)
    assert type(parse_training_args(["--config", "run.yaml", *flags])[1]) is config


def test_a_reward_model_takes_the_place_of_the_default_reward(options):
    options("reward_model_name_or_path: m")
    assert parse_training_args(["--config", "run.yaml"])[0].reward_funcs == []


def test_no_pickle_of_a_config_has_the_token():
    args = TrollGRPOConfig(output_dir="out", use_cpu=True, bf16=False, hub_token="hf_secret")
    assert args.hub_token == "hf_secret" and b"hf_secret" not in pickle.dumps(args)


# -- Files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> Path:
    """Files of the given names and texts; the path of the last one."""
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return path


def test_later_bases_replace_earlier_ones_and_the_file_replaces_all(tmp_path):
    write(
        tmp_path / "base",
        zero="seed: 0\ntop_k: 5",
        one="max_steps: 1\nseed: 1\nmodel_init_kwargs: {a: 1, b: 2}",
        two="base: zero.yaml\nseed: 2",
    )
    text = "base: [../base/one.yaml, ../base/two.yaml]\nmax_steps: 3\nmodel_init_kwargs: {b: 3}"
    path = write(tmp_path / "runs", run=text)
    assert read_config(path) == {"max_steps": 3, "seed": 2, "model_init_kwargs": {"b": 3}, "top_k": 5}


def test_env_adds_up_and_the_replacing_of_another_mapping_is_printed(tmp_path, monkeypatch, capsys):
    """A child's `env` replaced its base's, and half of a mapping went without a word."""
    monkeypatch.setattr("os.environ", {"A": "0"})
    write(tmp_path, base="env: {A: 1, B: 2}\nmodel_init_kwargs: {a: 1, b: 2}")
    child = write(tmp_path, child="base: base.yaml\nenv: {B: 3, C: 4}\nmodel_init_kwargs: {b: 3}")
    other = write(tmp_path, other="env: {C: 5}\nmodel_init_kwargs: {c: 6}")
    values, *_ = read_command(["--config", str(child), "--config", str(other)], "x")
    assert os.environ == {"A": "1", "B": "3", "C": "5"} and values == {"model_init_kwargs": {"c": 6}}
    assert capsys.readouterr().err.splitlines() == [
        f"{child}: `model_init_kwargs` {{'b': 3}} replaces all of {{'a': 1, 'b': 2}}.",
        f"{other}: `model_init_kwargs` {{'c': 6}} replaces all of {{'b': 3}}.",
    ]


def test_a_config_is_found_by_name_and_a_path_in_the_working_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = read_config("qwen3-8b/dapo")
    assert shipped["output_dir"] == "outputs/qwen3-8b-dapo" and shipped["model_name_or_path"] == "Qwen/Qwen3-8B"
    assert shipped == read_config("qwen3-8b/dapo.yaml") == read_config(configs_folder() / "qwen3-8b" / "dapo.yaml")
    assert read_config(write(tmp_path, mine="base: qwen3-8b/dapo\nseed: 5")) == shipped | {"seed": 5}
    write(tmp_path / "qwen3-8b", dapo="seed: 1")
    assert read_config("qwen3-8b/dapo") == {"seed": 1}


def test_configs_are_listed_shown_and_copied_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    configs.main([])
    assert capsys.readouterr().out.split() == config_names() and "eval/base" not in config_names()  # a part
    configs.main(["show", "qwen3-8b/dapo"])
    assert yaml.safe_load(capsys.readouterr().out) == read_config("qwen3-8b/dapo")
    configs.main(["copy", *config_names()])
    assert [name for name in config_names() if read_config(f"configs/{name}.yaml") != read_config(name)] == []
    with pytest.raises(SystemExit):
        configs.main(["copy", "qwen3-0.6b/gsm8k"])
    assert "already exists" in capsys.readouterr().err


# -- The launcher -----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(options, monkeypatch):
    """What `troll grpo` starts: a run in this process with these options, or the launcher with its own."""
    calls = []
    monkeypatch.setattr(train, "_train_or_stop", lambda given, program: calls.append(given))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    monkeypatch.setattr(train, "_one_process_is_enough", lambda: True)
    monkeypatch.setenv("HF_TOKEN", "before")
    options()

    def started(*flags: str, algorithm: str = "grpo"):
        train.launch(["--config", "run.yaml", *flags], f"troll {algorithm}")
        return calls.pop()

    return started


def test_without_flags_for_the_launcher_this_process_trains(started):
    assert started("--max_steps", "3") == yaml.safe_load(ENOUGH) | {"max_steps": 3, "algorithm": "grpo"}
    assert started(algorithm="rloo")["algorithm"] == "rloo"


def test_flags_that_only_the_launcher_knows_go_to_it_and_all_others_to_the_run(started):
    run = ["--max_steps=3", "--reward_funcs", "a.b", "c.d", "--debug", "underflow_overflow"]
    launcher = ["--accelerate_config", "fsdp2", "--num_processes", "4", "--main-process-port=29501", "--multi_gpu"]
    options = started(*launcher[:2], *run[:1], *launcher[2:], *run[1:4], "--hub_token", "hf_secret", *run[4:])
    assert options.config_file == str(configs_folder() / "accelerate" / "fsdp2.yaml")
    assert (options.num_processes, options.main_process_port, options.multi_gpu) == (4, 29501, True)
    assert options.module and options.training_script == "troll_trl.cli.train"
    assert options.training_script_args == ["--algorithm", "grpo", "--config", "run.yaml", *run]
    assert started("--accelerate_config", "zero2").config_file.endswith("trl/accelerate_configs/zero2.yaml")

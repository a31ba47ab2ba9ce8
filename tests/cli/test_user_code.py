"""Whose code runs: a model's only with `trust_remote_code`, the working directory's only by a path that names it."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
from repository import ROOT
from tiny import tiny_model, tiny_tokenizer

from troll_trl.cli import evaluate
from troll_trl.cli.reward_functions import REWARD_FUNCTIONS, load_reward_function
from troll_trl.fields import imported

# -- A model's code ---------------------------------------------------------------------------------------------------

OWN_CODE = """
from pathlib import Path
Path({ran!r}).write_text("ran")
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config): model_type = "own"
class Own(Qwen3ForCausalLM): config_class = OwnConfig
"""
OWN_MODEL = {"AutoModelForCausalLM": "own.Own"}
CODE = {"model_type": "own", "auto_map": OWN_MODEL | {"AutoConfig": "own.OwnConfig"}}


@pytest.fixture
def yes(monkeypatch):
    """Whoever is asked on the terminal agrees."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    for part in (tokenizer, tiny_model(max_position_embeddings=64)):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CODE))
    (tmp_path / "one.jsonl").write_text('{"question": "w1", "answer": "#### 1"}\n')
    return tmp_path


@pytest.mark.usefixtures("yes")
def test_the_command_refuses_a_models_code_and_runs_it_with_the_flag(place, capsys):
    options = ["--model", "model", "--benchmarks", "one=one.jsonl", "--output", "out", "--max_new_tokens", "4"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main(options, "troll eval")
    assert stop.value.code == 2 and "trust_remote_code" in capsys.readouterr().err
    assert not (place / "ran").exists()
    evaluate.main([*options, "--trust_remote_code"], "troll eval")
    assert (place / "ran").read_text() == "ran"


def test_every_automatic_class_of_transformers_is_told_whether_to_run_code():
    """Without the argument, it asks on the terminal."""
    given = {}
    for path in [path for package in ("math_answers", "troll_trl") for path in (ROOT / package).rglob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                given |= {(path.name, line): names for line, names in arguments_of_automatic_classes(function)}
    assert given and [place for place, names in given.items() if "trust_remote_code" not in names] == []


def arguments_of_automatic_classes(function):
    """Each call's line and the names it hands on; a `**` counts as each string of its function."""
    strings = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
            names = {keyword.arg for keyword in node.keywords}
            yield node.lineno, names | strings if None in names else names


# -- The working directory's code -------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with modules that say that they were run, on no import path."""
    for name in ("wandb", "math_verify", "json", "my_helper", "trackio"):
        (tmp_path / f"{name}.py").write_text(f"import pathlib; pathlib.Path('ran-{name}').touch()")
    (tmp_path / "my_reward.py").write_text("import my_helper\ndef reward(**_): return [1.0]")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("def reward(**_): return [1.0]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    yield tmp_path
    for name in ("my_reward", "my_helper"):
        sys.modules.pop(name, None)


def ran(here: Path) -> set[str]:
    return {path.name.removeprefix("ran-") for path in here.glob("ran-*")}


def test_built_in_rewards_leave_the_import_path_as_it_is(here):
    before = [*sys.path]
    for name in (*REWARD_FUNCTIONS, "trl.rewards.accuracy_reward", "json.dumps"):
        load_reward_function(name)
    assert sys.path == before and ran(here) == set()


def test_a_users_own_module_is_found_last(here):
    before = [*sys.path]
    assert load_reward_function("my_reward.reward")() == [1.0]
    assert sys.path == [*before, str(here)] and ran(here) == {"my_helper"}
    load_reward_function("my_reward.reward")
    assert sys.path == [*before, str(here)]


def test_a_module_that_hides_a_users_own_is_named(here):
    with pytest.raises(AttributeError, match=r"peft/__init__\.py comes before peft of the working directory: rename"):
        imported("peft.reward")
    with pytest.raises(ModuleNotFoundError, match=r"peft/__init__\.py comes before peft of the working"):
        imported("peft.rewards.reward")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'nowhere'$"):
        imported("nowhere.reward")


def test_a_folder_without_code_hides_no_module(here, tmp_path_factory, monkeypatch):
    """A namespace package, such as what an uninstalled package leaves behind."""
    left = tmp_path_factory.mktemp("left")
    (left / "my_reward").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(left)])
    assert imported("my_reward.reward")() == [1.0]

"""Whose code runs: a model's only with `trust_remote_code`, the working directory's only by a path that names it."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from tests.tiny import saved_model
from troll_trl.cli import evaluate
from troll_trl.cli.reward_functions import REWARD_FUNCTIONS, load_reward_function


def test_a_models_code_runs_with_the_flag_alone(tmp_path, monkeypatch):
    """Without it nobody is asked on the terminal, where this one would agree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", "modules")
    saved_model("model")
    config = json.loads(Path("model/config.json").read_text())
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    Path("model/config.json").write_text(json.dumps(config | code))
    # A class of its own: transformers marks the one that it loads, for all later tests
    source = "open('ran', 'w')\nfrom transformers import Qwen3Config\nclass OwnConfig(Qwen3Config): pass"
    Path("model/own.py").write_text(source)
    Path("one.jsonl").write_text('{"question": "w1", "answer": "#### 1"}\n')
    options = ["--model", "model", "--benchmarks", "one=one.jsonl", "--output", "out", "--max_new_tokens", "4"]
    for flags in ([], ["--trust_remote_code"]):
        with suppress(SystemExit):
            evaluate.main([*options, *flags])
        assert Path("ran").exists() == bool(flags)


def test_the_working_directorys_code_runs_for_a_path_that_names_it(tmp_path, monkeypatch):
    for name in ("wandb", "math_verify", "json", "my_helper", "trackio"):
        (tmp_path / f"{name}.py").write_text(f"import pathlib; pathlib.Path('ran-{name}').touch()")
    (tmp_path / "my_reward.py").write_text("import my_helper\ndef reward(**_): return [1.0]")
    monkeypatch.chdir(tmp_path)
    before = [path for path in sys.path if path not in ("", os.getcwd())]
    monkeypatch.setattr(sys, "path", [*before])
    for name in (*REWARD_FUNCTIONS, "trl.rewards.accuracy_reward", "json.dumps"):
        load_reward_function(name)
    assert sys.path == before and not [*tmp_path.glob("ran-*")]
    assert load_reward_function("my_reward.reward")() == [1.0]
    assert sys.path == [*before, str(tmp_path)] and [*tmp_path.glob("ran-*")] == [tmp_path / "ran-my_helper"]

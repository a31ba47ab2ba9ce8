"""The wheel is enough: built, installed into an empty environment without a checkout, and used there."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from repository import ROOT

CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# `make install` makes the environment of these tests out of `dev`, and vLLM fixes a torch of its own
ELSEWHERE = {"dev", "vllm", "async"}


class Environment:
    """An environment that holds the wheel and what it depends on, and an empty folder to work in."""

    def __init__(self, folder: Path):
        self.folder = folder
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.variables |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        (folder / "work").mkdir()
        wheels = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        subprocess.run([sys.executable, *wheels], env=self.variables, check=True)
        (self.wheel,) = map(str, folder.glob("troll_trl-*.whl"))
        venv.create(folder / "environment", with_pip=True)
        self.install(self.wheel)

    def install(self, what: str):
        self.call("python", "-m", "pip", "install", "--quiet", *CONSTRAINTS, what)

    def call(self, *command: str, code: int = 0) -> str:
        """What a program of the environment prints."""
        done = subprocess.run(
            [str(self.folder / "environment" / "bin" / command[0]), *command[1:]],
            cwd=self.folder / "work",
            env=self.variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(5400)  # the installation takes most of it, and only a hang all
def test_the_wheel(tmp_path):
    """One test, since several may run in several processes, each of which would install everything."""
    environment = Environment(tmp_path)
    check_package(environment.call)
    check_links_of_its_readme(environment.call)
    check_a_shipped_config_for_both_launchers(environment.call)
    check_quickstart_evaluation_and_plot(environment.call)
    for extra in sorted(EXTRAS.keys() - ELSEWHERE):
        check_extra(environment, extra)


def check_package(call):
    shown = call("python", "-c", "import troll_trl; print(troll_trl.__file__)")
    assert "site-packages" in shown and str(ROOT) not in shown
    names = call("troll", "configs").split()
    assert {"qwen3-0.6b/gsm8k", "qwen3-0.6b/gsm8k-one-gpu", "quickstart", "eval/paper"} <= {*names}
    assert "output_dir: outputs/qwen3-8b-dapo\n" in call("troll", "configs", "show", "qwen3-8b/dapo")
    reward = "from math_answers import math_accuracy_reward as reward; print(reward([r'\\boxed{x+x}'], ['2x']))"
    assert call("python", "-c", reward) == "[1.0]\n"


def check_links_of_its_readme(call):
    """They are absolute."""
    text = call("python", "-c", "import importlib.metadata as m; print(m.metadata('troll-trl').get_payload())")
    assert "](https://github.com/troll-trl/troll_trl/blob/main/" in text
    assert "](https://raw.githubusercontent.com/troll-trl/troll_trl/main/" in text
    assert "](docs/" not in text and "](evidence/" not in text


def check_a_shipped_config_for_both_launchers(call):
    """As far as the mistake in it, which names the shipped file's own neighbours."""
    flags = ("--config", "qwen3-0.6b/gsm8k", "--lerning_rate", "1")
    launcher = ("accelerate", "launch", "--cpu", "--num_processes", "1", "-m", "troll_trl.cli.train")
    for command, code in ((("troll", "grpo"), 2), (launcher, 1)):
        assert "Did you mean learning_rate?" in call(*command, *flags, code=code)


def check_quickstart_evaluation_and_plot(call):
    shown = call("troll", "quickstart", "--updates", "8", "--output", "quickstart")  # from the start of the package
    assert "step 8/8, " in shown and "of the held-out sums before the training" in shown
    settings = ["--instruction", "", "--max_problems", "16", "--max_new_tokens", "8", "--dtype", "float32"]
    benchmark = "sums=quickstart/data/test.jsonl"
    call("troll", "eval", "--model", "quickstart/run", "--benchmarks", benchmark, "--output", "eval", *settings)
    summary = json.loads(call("python", "-c", "print(open('eval/summary.json').read())"))
    assert summary["results"]
    assert "curves.png" in call("troll", "plot", "quickstart/run", "quickstart/clip")


def check_extra(environment, extra):
    """The pinned pillow kept new versions of trackio out, and the old one that pip took instead broke `import trl`."""
    environment.install(f"{environment.wheel}[{extra}]")
    environment.call("python", "-m", "pip", "check")
    modules = [requirement.partition(">=")[0] for requirement in EXTRAS[extra]]
    uses = f"import {', '.join(modules)}; from trl import GRPOTrainer; from troll_trl import TrollGRPOTrainer"
    environment.call("python", "-c", uses)

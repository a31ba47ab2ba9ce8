"""The wheel is enough: built, installed into an empty environment without a checkout, and used there."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.repository import ROOT


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
        [wheel] = folder.glob("troll_trl-*.whl")
        venv.create(folder / "environment", with_pip=True)
        # With an extra: a pinned pillow once kept new versions of trackio out, and an old one breaks `import trl`
        constraints = ("-c", str(ROOT / "constraints.txt"))
        self.call("python", "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[tracking]")

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
    call = Environment(tmp_path).call
    call("python", "-m", "pip", "check")
    call("python", "-c", "import trackio, wandb; from trl import GRPOTrainer; from troll_trl import TrollGRPOTrainer")
    assert str(ROOT) not in call("python", "-c", "import troll_trl; print(troll_trl.__file__)")
    reward = "from troll_trl.rewards import math_accuracy_reward as reward; print(reward([r'\\boxed{x+x}'], ['2x']))"
    assert call("python", "-c", reward) == "[1.0]\n"
    assert "qwen3-8b/dapo" in call("troll", "configs").split()
    # A shipped config, which names its own neighbours, as far as a mistake of the flags, for both launchers
    launcher = ("accelerate", "launch", "--cpu", "--num_processes", "1", "-m", "troll_trl.cli.train")
    for command, code in ((("troll", "grpo"), 2), (launcher, 1)):
        assert "lerning_rate" in call(*command, "--config", "qwen3-0.6b/gsm8k", "--lerning_rate", "1", code=code)
    call("troll", "quickstart", "--updates", "8", "--output", "quickstart")  # from the start of the package
    settings = ["--instruction", "", "--max_problems", "16", "--max_new_tokens", "8", "--dtype", "float32"]
    data = ["--benchmarks", "sums=quickstart/data/test.jsonl", "--output", "eval"]
    call("troll", "eval", "--model", "quickstart/run", *data, *settings)
    assert json.loads((tmp_path / "work" / "eval" / "summary.json").read_text())["results"]
    call("troll", "plot", "quickstart/run", "quickstart/trl", "--x", "completions", "--output", "curves.png")
    assert (tmp_path / "work" / "curves.png").is_file()

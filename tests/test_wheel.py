"""The wheel is enough: built, installed into an empty environment without a checkout, and used there."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]  # the installation takes most of it, and only a hang all


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Run a program of an environment that holds the wheel and what it depends on, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    (folder / "work").mkdir()

    def call(*command: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(folder / "environment" / "bin" / command[0]), *command[1:]],
            cwd=folder / "work",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    wheels = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY))
    subprocess.run([sys.executable, *wheels], env=environment, check=True)
    (wheel,) = folder.glob("troll_trl-*.whl")
    venv.create(folder / "environment", with_pip=True)
    call("python", "-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt"), str(wheel))
    return call


def test_the_package_is_that_of_the_wheel(call):
    shown = call("python", "-c", "import troll_trl; print(troll_trl.__file__)")
    assert "site-packages" in shown and str(REPOSITORY) not in shown
    assert "qwen3-0.6b/gsm8k" in call("troll", "configs").split()


def test_links_of_its_readme_are_absolute(call):
    text = call("python", "-c", "import importlib.metadata as m; print(m.metadata('troll-trl').get_payload())")
    assert "](https://github.com/troll-trl/troll_trl/blob/main/" in text
    assert "](https://raw.githubusercontent.com/troll-trl/troll_trl/main/" in text
    assert "](docs/" not in text and "](evidence/" not in text


def test_quickstart_evaluation_and_report(call):
    shown = call("troll", "quickstart", "--updates", "8", "--start_success", "0.02", "--output", "quickstart")
    assert "step 8/8, " in shown and "Projected tokens" in shown
    settings = ["--instruction", "", "--max_problems", "16", "--max_new_tokens", "8", "--dtype", "float32"]
    benchmark = "sums=quickstart/data/test.jsonl"
    call("troll", "eval", "--model", "quickstart/run", "--benchmarks", benchmark, "--output", "eval", *settings)
    summary = json.loads(call("python", "-c", "print(open('eval/summary.json').read())"))
    assert summary["results"]
    assert "report.html" in call("troll", "report", "quickstart/run", "--output", "report")
    assert "<img" in call("python", "-c", "print(open('report/report.html').read())")


def test_a_shipped_config_is_read_by_the_launchers_module_too(call):
    """As far as the mistake in it, which names the shipped file's own neighbours."""
    flags = ("--config", "qwen3-0.6b/gsm8k", "--lerning_rate", "1")
    launcher = ("accelerate", "launch", "--cpu", "--num_processes", "1", "-m", "troll_trl.cli.train")
    for command, code in ((("troll", "grpo"), 2), (launcher, 1)):
        assert "The nearest valid name is --learning_rate." in call(*command, *flags, code=code)

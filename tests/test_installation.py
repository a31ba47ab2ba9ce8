"""Each extra installs with constraints.txt into an empty environment, and what it brings works beside TRL."""

import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

# `make install` makes the environment of these tests out of `dev`, and vLLM fixes a torch of its own
ELSEWHERE = {"dev", "vllm"}


def run(*command, cwd):
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - ELSEWHERE))
def test_an_extra_installs_with_the_constraints(extra, tmp_path, monkeypatch):
    """The pinned pillow kept new versions of trackio out, and the old one that pip took instead broke `import trl`."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", f"{ROOT}[{extra}]", cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    modules = [requirement.partition(">=")[0] for requirement in EXTRAS[extra]]
    uses = f"import {', '.join(modules)}; from trl import GRPOTrainer; from troll_trl import TrollGRPOTrainer"
    run(python, "-c", uses, cwd=tmp_path)

"""
A slow test runs the pages' commands that need no GPU, no hub and no registry, in a copy of the repository. Only the
benchmarks of a training step get smaller sizes. `test_commands.py` parses every command.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_commands import CASES, ROOT

EVERY_COMMAND = list(dict.fromkeys(" ".join(command.partition("  #")[0].split()) for _, command in CASES))
TO_RUN = {
    "make help",
    "troll configs",
    "troll env",
    "troll report TROLL=out/troll-0,out/troll-1 clip=out/clip-0,out/clip-1 --output out/report",
    "troll report outputs/clip outputs/troll --output outputs/report",
    "troll eval --samples their_samples.jsonl --output outputs/theirs",
    "troll eval --compare outputs/eval_a outputs/eval_b",
    "python benchmarks/reward_kinds.py --seed 11 --cases 40",
    "python benchmarks/step.py --trust_region mask --repeats 9",
    "python examples/simplex.py --output docs/figures/simplex.png",
    "python -m evidence.tables evidence/results/peers.jsonl",
}
RUN = [command for command in EVERY_COMMAND if command in TO_RUN]
# By what a command begins with: why it is not run here
NOT_RUN = {
    "pip install": "installs, as test_wheel.py does",
    "make install": "installs",
    "git clone": "clones what this is a copy of",
    "make test": "tests: CI runs them",
    "make lint": "CI runs it",
    "make docs": "CI runs it",
    "make check-gpu": "measures for ten minutes on a GPU; test_check_gpu.py tries it",
    "python benchmarks/step.py --completion": "minutes",
    "make bench": "measures for a quarter of an hour what benchmarks/step.py measures in a shorter way",
    "make .venv/vllm/installed": "installs",
    "make quickstart": "test_quickstart.py runs it",
    "troll quickstart": "test_quickstart.py runs it",
    "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= .venv/vllm/bin/python examples/asynchronous_cpu.py": "test_vllm_async.py",
    "python -m evidence.run evidence/newest.yaml": "a study, of hours",
    "python -m evidence.tables evidence/newest.yaml": "needs the study's results",
    "make evidence-gpu": "a real model on a GPU",
    "troll grpo --config": "a model of a hub",
    "troll eval --config": "a model of a hub",
    "troll eval --model": "a model of a hub",
    "python examples/": "a model of a hub",
    "python train_": "test_pages_to_copy.py runs it",
    "troll grpo --model_name_or_path": "a model of a hub",
    "python docs/hooks.py": "test_documentation.py compares what it writes",
    "accelerate launch": "GPUs",
    "CUDA_VISIBLE_DEVICES=": "GPUs",
    "vllm serve": "GPUs",
    "trl vllm-serve": "GPUs",
    "sbatch": "a cluster",
    "lm_eval": "is not installed",
    "# on node": "a comment",
}
# Of a program, in a sentence
NAMES = {"troll grpo", "troll rloo", "troll eval", "troll report", "troll grpo --method clip"}


def test_every_command_is_run_or_has_a_reason():
    left = [one for one in EVERY_COMMAND if one not in RUN and one not in NAMES and not one.startswith((*NOT_RUN,))]
    assert left == []
    assert TO_RUN - {*RUN} == set(), "no page has these commands"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository, with the runs and the samples that the commands name."""
    folder = tmp_path_factory.mktemp("copy")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, files.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name in ("out/troll-0", "out/troll-1", "out/clip-0", "out/clip-1", "outputs/clip", "outputs/troll"):
        write_run(folder / name)
    with (folder / "their_samples.jsonl").open("w") as file:
        for index in range(20):
            row = {"model": "theirs", "benchmark": "sums", "index": index, "problem": f"{index} + 1?"}
            row |= {"answer": str(index + 1), "completion": f"\\boxed{{{index + index % 2}}}"}
            file.write(json.dumps(row) + "\n")
    return folder


def write_run(folder):
    lines = [{"step": step, "loss": 0.1, "rewards/math_accuracy/mean": step / 8, "step_time": 1.0} for step in (1, 2)]
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": lines}))


@pytest.mark.slow
def test_the_commands_run(copy):
    """One after the other: some need what others have written."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}
    for command in RUN:
        line = f"{command} --repeats 1 --vocabulary 4096" if "benchmarks/step.py" in command else command  # or minutes
        done = subprocess.run(line, shell=True, cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if command.startswith("troll eval --samples"):
            for name in ("eval_a", "eval_b"):
                shutil.copytree(copy / "outputs" / "theirs", copy / "outputs" / name)

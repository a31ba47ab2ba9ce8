"""The trainer on a CUDA device that is not there (`fake_cuda.py`): no tensor on the wrong device, no race, and no wait
for the device that is not on the list."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import HANG
from repository import IMPORT_PATH, ROOT

from troll_trl.kernels.dispatch import TRITON_AVAILABLE

needed = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the fake CUDA device needs a compiler: g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has a CUDA of its own"),
    pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not installed (it exists for Linux only)"),
]
pytestmark = [pytest.mark.slow, *needed]
FOLDER = Path(__file__).parent
RUNS = ["on_the_cpu", "kernels", "torch", "nan_reward", "resume"]
MUTANTS = ["not_pinned", "host_positions", "host_metrics", "host_number"]
# The lines of this package that wait for the device, by a part of their text, and how often at most in `kernels`:
# two updates on one rollout batch of four micro-batches
BUDGET = {
    "positions = outputs = (flat != IGNORED_LABEL)": 9,  # live positions, in scoring, loss and the check of the head
    "if not (outside.any() | wrong.any())": 4,  # supports, in the loss
    "inside = (steps <= lengths": 4,  # packing the old policy of a scored chunk
    "slots = used.nonzero(": 4,
    "width=max(int(counts.max())": 4,
    "tensor.to(device, non_blocking": 20,  # its copy to the host
    "if not norm.isfinite()": 2,  # once in an update
    "counts = self.accelerator.gather(self._counts": 2,
    "self.accelerator.reduce(self._sums": 3,  # once in a line of the log
    "dict(zip(self._largest, largest.tolist()": 2,
    "difference = (sparse.sparse_log_probs": 2,  # the check of the head, once in a run
    "if difference > _TOLERANCE": 1,
    "trainers/arithmetic_check.py": 60,  # the check of TRL's arithmetic, once in a run
}


def build(folder: Path) -> Path:
    """Compile the library for the torch of this process."""
    library, root = folder / "fake_cuda.so", Path(torch.__file__).parent
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(FOLDER / "fake_cuda.cpp"), "-o", str(library)]
    command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", "-lc10"]
    call([*command, "-ltorch_cpu", "-Wl,--no-as-needed", f"-Wl,-rpath,{root}/lib"])
    return library


def call(command, **environment):
    path = os.pathsep.join([IMPORT_PATH, str(ROOT / "benchmarks")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_cuda")
    names = [*RUNS, *(f"mutant:{name}" for name in MUTANTS)]
    script = [sys.executable, str(FOLDER / "fake_cuda_runs.py"), str(folder)]
    call([*script, *names], FAKE_CUDA_LIBRARY=str(build(folder)))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def logged(run, key):
    return [line[key] for line in run["log"] if key in line]


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_on_the_wrong_device_or_read_too_early(runs, name):
    assert not runs[name]["error"] and not runs[name]["problems"]
    assert len(logged(runs[name], "grad_norm")) >= 2
    if name == "resume":
        return
    assert max(logged(runs[name], "troll/projected_fraction")) > 0.1, "nothing is projected"


def test_the_numbers_are_those_of_the_cpu(runs):
    for key in ("loss", "grad_norm", "troll/projected_fraction", "troll/policy_kl_mean"):
        expected = logged(runs["on_the_cpu"], key)
        for name in ("kernels", "torch"):
            actual = logged(runs[name], key)
            assert actual[:2] == pytest.approx(expected[:2], rel=1e-2, abs=1e-4), (name, key)


def test_a_reward_that_is_nan_skips_its_updates(runs):
    assert max(logged(runs["nan_reward"], "troll/skipped_updates")) > 0
    assert all(map(math.isfinite, logged(runs["nan_reward"], "grad_norm")[2:])), "the next rollout batch is sound"


def test_an_evaluation_on_the_device(runs):
    assert len(logged(runs["torch"], "eval_reward")) == 4


def test_waits_are_on_the_list(runs):
    found = dict.fromkeys(BUDGET, 0)
    for line, count in runs["kernels"]["waits"].items():
        allowed = [text for text in BUDGET if text in line]
        assert allowed, f"{line} waits for the device, {count} times"
        found[allowed[0]] += count
    assert {text: count for text, count in found.items() if count > BUDGET[text]} == {}
    assert all(found.values()), "a line on the list no longer waits"


SEEN = {
    "not_pinned": "takes pageable memory",
    "host_positions": "expected all tensors on one device",
    "host_metrics": "expected all tensors on one device",
}


@pytest.mark.parametrize("name", SEEN)
def test_a_mistake_is_seen(runs, name):
    run = runs[f"mutant:{name}"]
    assert SEEN[name] in " ".join([run["error"], *run["problems"]]), run


def test_a_number_copied_from_the_host_is_seen(runs):
    """The line is not in the budget."""
    assert any("log_probs[-1:] = 0.0" in line for line in runs["mutant:host_number"]["waits"])

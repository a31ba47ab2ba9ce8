"""Two processes on the CPU, DDP and FSDP2: a fault of one rank is handled, or ends the job, on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_faults
import pytest
import yaml
from limits import HANG
from ranks import in_two_ranks
from repository import IMPORT_PATH
from test_distributed import FSDP2

SCRIPT = Path(__file__).with_name("distributed_faults.py")


def launch(folder: Path, *names: str, fsdp: bool = False) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if fsdp:
        (folder / "fsdp2.yaml").write_text(yaml.safe_dump(FSDP2))
        environment |= {"ACCELERATE_USE_CPU": "true", "FORCE_FSDP": "1"}
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "fsdp2.yaml")]
        command += ["--main_process_port", "0"]
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), *names], env=environment, capture_output=True, text=True, timeout=HANG
    )


def results(folder: Path, done: subprocess.CompletedProcess, name: str) -> list[dict]:
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in files]


def check_faults(folder, done, same_weights):
    both = results(folder, done, "faults")
    for rank, result in enumerate(both):
        # Updates 1, 3, 5, 7 and 8; the last two in a row, which ends the run
        assert result["moved"] == [False, True, False, True, False, True, False], (rank, result)
        assert result["skipped"] == [1, 0, 1, 0, 1, 0, 1]
        assert "Stopped at update 8: 2 updates in a row" in result["stopped"] and "rank 1: loss" in result["stopped"]
        assert result["finite"]
    assert not same_weights or both[0]["weights"] == both[1]["weights"]
    for said in ("rank 1: loss", "rank 0: troll_old_log_probs", "rank 0: advantages", "gradient (its norm"):
        assert said in done.stderr, said


def check_resume(folder, done):
    files = [f"rollout-state-{rank}-of-2.pt" for rank in range(2)]
    expected = {"same_weights": True, "same_log": True, "files": files, "lines": 6}
    assert results(folder, done, "resume") == [expected, expected]


@pytest.mark.slow
def test_ddp(tmp_path):
    """A NaN on one rank used to raise there while the other waited for it."""
    done = launch(tmp_path, "faults", "bad_reward", "resume", "sigterm", "missing_file")
    check_faults(tmp_path, done, same_weights=True)
    for result in results(tmp_path, done, "bad_reward"):
        assert result["moved"] == [True, True, False]
        assert "reward 'spoiled' at row 15 of the rollout batch (rank 1, row 7 there)" in result["stopped"]
    check_resume(tmp_path, done)
    stopped = {"code": 143, "step": 3, "found": str(tmp_path / "sigterm" / "checkpoint-3")}
    assert results(tmp_path, done, "sigterm") == [stopped, stopped]
    assert results(tmp_path, done, "missing_file") == [{"step": 6}, {"step": 6}]
    assert "rollout-state-0-of-2.pt is not in" in done.stderr and "for every rank" in done.stderr


@pytest.mark.slow
def test_fsdp2(tmp_path):
    done = launch(tmp_path, "faults", "resume", fsdp=True)
    check_faults(tmp_path, done, same_weights=False)
    check_resume(tmp_path, done)


def test_what_one_rank_raises_ends_its_training(tmp_path):
    """No guard takes it for a fault that both ranks skip: rank 0 would wait for rank 1 for ever."""
    said = in_two_ranks(distributed_faults.main, tmp_path, ["raises"], log=tmp_path / "log.txt")
    assert "the answer column is missing" in said
    assert not [*tmp_path.glob("*.json")], "neither rank has finished"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job(tmp_path):
    done = launch(tmp_path, "dies")
    assert done.returncode != 0
    assert "Signal 9" in done.stderr

"""Two processes on the CPU: what is not finite on one rank is skipped by both, and both resume exactly."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import in_two_ranks
from tests.trl import faults_of_ranks
from tests.trl.test_distributed import launch_fsdp2


def check(folder: Path, said: str, *names: str):
    result = {}
    for name in names:
        files = [folder / f"{name}-{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), said[-4000:]
        result[name], other = (json.loads(file.read_text()) for file in files)
        assert result[name] == other
    faults, resume = result["faults"], result["resume"]
    # Updates 1, 3 and 5 are skipped, and 9 and 10, the first two of the third rollout batch
    assert faults["skipped"] == [1, 0, 1, 0, 1, 0, 0, 0, 1]
    assert [bool(skipped) for skipped in faults["skipped"]] == [not moved for moved in faults["moved"]]
    assert faults["finite"] and "Stopped at update 10: 2 updates in a row" in faults["stopped"]
    assert "reward 'reward' at row 31 of the rollout batch (rank 1, row 15 there)" in faults["stopped"]
    for cause in ("rank 1: loss", "rank 0: loss", "gradient (its norm"):
        assert cause in said, cause
    assert resume == {"same": True, "files": [f"rollout-state-{rank}-of-2.pt" for rank in range(2)], "lines": 6}
    return result


@pytest.mark.slow
def test_ddp(tmp_path):
    """A NaN on one rank used to raise there while the other waited for it."""
    names = ["faults", "resume", "sigterm"]
    said = in_two_ranks(faults_of_ranks.main, tmp_path, names, log=tmp_path / "log.txt")
    assert check(tmp_path, said, *names)["sigterm"] == {"code": 143, "found": "checkpoint-3", "step": 6}
    assert "lacks the file of at least one rank" in said and "a fresh one is generated" in said


@pytest.mark.slow
def test_fsdp2(tmp_path):
    said = launch_fsdp2(tmp_path, "no", ["faults", "resume"], script=faults_of_ranks.__file__)
    check(tmp_path, said, "faults", "resume")

"""`make check-gpu` (`benchmarks/check_gpu.py`): a part that fails or hangs does not stop the next one."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.limits import HANG, is_gone
from tests.support.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import check_gpu  # noqa: E402
import common  # noqa: E402


def test_a_part_ends_with_what_it_has_started(tmp_path):
    child = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    command = [sys.executable, "-c", f"{child}; print(child.pid, flush=True); time.sleep(600)"]
    for seconds in (3, 30, 300):  # a busy machine may not have begun
        hangs = check_gpu.run_part("hangs", seconds, command, tmp_path)
        assert hangs.startswith(f"## hangs: stopped at its limit of {seconds} s (")
        if started := (tmp_path / "hangs.log").read_text().strip():
            break
    assert started
    end = time.monotonic() + HANG
    while not is_gone(int(started)):  # a killed process may take a moment
        assert time.monotonic() < end, "what the part has started goes on"
        time.sleep(0.1)
    failed = check_gpu.run_part("fails", HANG, [sys.executable, "-c", "raise ValueError('too many warps')"], tmp_path)
    assert failed.startswith("## fails: failed with exit code 1") and "too many warps" in failed


def test_rows_of_one_key_replace_each_other_in_the_file(tmp_path, capsys):
    args = common.parser("").parse_args(["--device", "cpu", "--results", str(tmp_path / "r.json"), "--name", "n"])
    report = common.Report("step", args, {"a": "", "b": ""}, key=("a",))
    for a, b in ((1, 1), (2, 1), (1, 2)):
        report.add(a=a, b=b)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["n"]["rows"] == [{"a": 2, "b": 1}, {"a": 1, "b": 2}]
    assert capsys.readouterr().out.count("| 1 |") == 3, "every row is printed"


def test_the_parts_take_ten_minutes_and_name_files_that_exist():
    assert sum(limit for limit, _ in check_gpu.PARTS.values()) <= 600
    scripts = {line.split()[0] for _, line in check_gpu.PARTS.values()} - {"-m"}
    assert scripts and all((ROOT / script).exists() for script in scripts)


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "check_gpu.py"), "--device", "cpu", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    page = (tmp_path / "check-gpu.md").read_text()
    assert done.returncode == 0 and page.count(": done (") == len(check_gpu.TRY), page
    content = json.loads((tmp_path / "check-gpu.json").read_text())
    assert {row["trust region"] for row in content["step-4x24"]["rows"]} == {"projection"}
    assert content["step-4x24"]["rows"][0]["projected"] is not None and content["head"]["rows"]

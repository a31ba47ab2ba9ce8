"""The lines that say how far `make test` is, with xdist and without, where the output is no terminal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG


@pytest.mark.parametrize("flags", [(), ("-n", "2")], ids=["one_process", "xdist"])
def test_progress_is_said_in_plain_lines(tmp_path, flags):
    text = (Path(__file__).parent / "conftest.py").read_text()
    assert "INTERVAL = 30" in text
    (tmp_path / "conftest.py").write_text(text.replace("INTERVAL = 30", "INTERVAL = 0"))
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", *flags]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}  # of what conftest.py imports
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("tests ")]
    # Not the last one, which pytest's own summary follows
    assert len(lines) == 2 and all(re.fullmatch(r"tests [12]/3, \d+:\d\d < \d+:\d\d", line) for line in lines), (
        done.stdout
    )

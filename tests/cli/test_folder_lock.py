"""The lock of an output folder ends with the process that holds it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.repository import ROOT
from troll_trl.cli.folder_lock import locked

HOLDS = """
import os, sys, time
from pathlib import Path
from troll_trl.cli.folder_lock import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_killed_process_releases_the_lock_also_if_its_worker_lives(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"into {tmp_path}"), locked(tmp_path):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path):
            os.kill(worker, 0)  # it lives
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()

"""Where the repository is. With `ROOT` on its import path, a process that a test starts can import `tests`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

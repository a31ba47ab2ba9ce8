"""Where the repository is, and the import path of a process that a test starts."""

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

# pytest puts these folders on its own import path
_FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
IMPORT_PATH = os.pathsep.join(str(ROOT / folder) for folder in _FOLDERS)

"""Files that are replaced as a whole: if a process is killed, the old file or the new one is there."""

import json
import os
from pathlib import Path
from typing import Any


def unfinished(path: Path) -> Path:
    """The file next to `path` to write first. `os.replace` then moves it to `path`."""
    return path.with_name(f".{path.name}.unfinished")


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text."""
    unfinished(path).write_text(text, encoding="utf-8")
    os.replace(unfinished(path), path)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

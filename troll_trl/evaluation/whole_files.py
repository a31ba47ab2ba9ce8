"""Files that are replaced as a whole: if a process is killed, the old file or the new one is there."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

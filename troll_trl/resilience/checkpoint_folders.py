"""Folders of checkpoints: which are complete, which is the newest, and how one is published in a single step.

A checkpoint is written into the folder `_saving`. The folder is then flushed, marked with `complete.json` (every file
and its size) and renamed.
"""

import json
import os
import shutil
import zipfile
from pathlib import Path

from accelerate.logging import get_logger
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

logger = get_logger(__name__)

CHECKPOINT = "checkpoint-"  # prefix of transformers' folders, before the step
# A checkpoint is written into this folder of the output folder, where neither transformers nor an upload looks
SAVING = "_saving"
MARKER = "complete.json"


def checkpoints(folder: Path) -> list[Path]:
    """List the folders that are named as checkpoints, complete or not, in the order of their steps."""
    step = lambda path: path.name.removeprefix(CHECKPOINT)
    named = [path for path in folder.glob(f"{CHECKPOINT}*") if path.is_dir() and step(path).isdecimal()]
    return sorted(named, key=lambda path: int(step(path)))


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Find the newest complete checkpoint of a run, and the reason why each newer folder was skipped. Rename a folder
    that was complete but not yet renamed."""
    skipped = []
    for folder in checkpoints(output_dir / SAVING):
        reason = why_incomplete(folder)
        if reason is None:
            _move(folder, output_dir / folder.name)
        else:
            skipped.append(f"{SAVING}/{folder.name} ({reason})")
    for folder in reversed(checkpoints(output_dir)):
        reason = why_incomplete(folder)
        if reason is None:
            return folder, skipped
        skipped.append(f"{folder.name} ({reason})")
    return None, skipped


def why_incomplete(folder: Path) -> str | None:
    """Return why a checkpoint folder is not complete, or `None` if it is. Checks its marker and the structure of its
    files."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {MARKER}: it was cut off, or another program wrote it"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} cannot be read"
    if TRAINER_STATE_NAME not in files:
        return f"its {MARKER} does not list {TRAINER_STATE_NAME}: its files were removed while it was saved"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    return why_unreadable(folder)


def why_unreadable(folder: Path) -> str | None:
    """Name a file of a checkpoint whose structure does not match its suffix, if there is one. Reads no weights."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):  # as torch saves them
                raise ValueError
        except (SafetensorError, ValueError):
            return f"{path.relative_to(folder)} cannot be read"
    return None


def check_given(folder: Path) -> None:
    """Refuse a checkpoint that is known to be incomplete, and warn about one that may be."""
    if (reason := why_incomplete(folder)) is None:
        return
    damage = reason if (folder / MARKER).exists() or not folder.is_dir() else why_unreadable(folder)
    if damage:
        raise ValueError(f"The checkpoint {folder} is damaged or missing: {damage}. Name another one.")
    logger.warning(f"Resuming from {folder}, which may be incomplete: {reason}.")


def publish(folder: Path, destination: Path) -> None:
    """
    Mark a checkpoint in `_saving` as complete, and move it to its place on the same file system, over an older one.

    Every file is on disk before the marker, and the marker before the rename. If the process dies in between,
    [`newest_complete`] handles what is left.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    for path in paths:
        _sync(path)
    (folder / MARKER).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    _sync(folder / MARKER)
    _move(folder, destination)


def date_last(folder: Path) -> None:
    """Date a checkpoint at least two seconds after the others. transformers deletes the oldest by date, but a clock may
    have been set back, or a folder copied. If all dates are within a second, transformers ignores them."""
    others = [path.stat().st_mtime for path in folder.parent.glob(f"{CHECKPOINT}*") if path != folder]
    date = max([folder.stat().st_mtime, *(other + 2 for other in others)])
    os.utime(folder, (date, date))


def _move(folder: Path, destination: Path) -> None:
    # Remove an older checkpoint of the same step only now, because the new one is complete
    shutil.rmtree(destination, ignore_errors=True)
    os.rename(folder, destination)
    shutil.rmtree(destination.parent / SAVING, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

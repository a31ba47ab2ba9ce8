"""Checkpoint folders that are either complete or absent: written aside, marked, renamed; and the newest one."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

CHECKPOINT = "checkpoint-"  # transformers' name of a folder, before the step
# A checkpoint is written into this folder of the output folder, where neither `get_last_checkpoint` nor an upload looks
SAVING = "_saving"
# Written last: every file of the checkpoint, and its size
MARKER = "complete.json"


def publish(folder: Path, destination: Path) -> None:
    """
    Mark a checkpoint in `_saving` as complete, and move it to its place on the same file system, over an older one.

    Everything is on the disk before the marker is, and the marker before the rename. A process that dies on the way
    leaves what [`newest_complete`] can sort out.
    """
    paths = sorted(folder.rglob("*"))
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
    files.pop(MARKER, None)  # a checkpoint that was copied here has one
    for name in files:
        _sync(folder / name)
    marker = folder / MARKER
    marker.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    _sync(marker)
    for part in (folder, *(path for path in paths if path.is_dir())):
        _sync_entries(part)
    _move(folder, destination)


def why_incomplete(folder: Path) -> str | None:
    """Why a checkpoint folder is not complete, or `None` if it is. Reads its marker alone."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {MARKER}: it was cut off, or another program wrote it"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} cannot be read"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    return None


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and a line for every newer folder that was skipped. Puts one that was
    complete but not yet renamed in its place."""
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


def unmarked(output_dir: Path) -> Path | None:
    """The newest whole checkpoint that TRL's own trainer wrote, without our marker."""
    whole = [f for f in checkpoints(output_dir) if (f / TRAINER_STATE_NAME).is_file() and not (f / MARKER).exists()]
    return whole[-1] if whole else None


def checkpoints(folder: Path) -> list[Path]:
    """The folders that are named as checkpoints, complete or not, in the order of their steps."""
    step = lambda path: path.name.removeprefix(CHECKPOINT)
    named = [path for path in folder.glob(f"{CHECKPOINT}*") if path.is_dir() and step(path).isdecimal()]
    return sorted(named, key=lambda path: int(step(path)))


def _move(folder: Path, destination: Path) -> None:
    # An older checkpoint of the same step goes only now: the new one is complete, wherever it is
    if destination.exists():
        shutil.rmtree(destination)
    os.rename(folder, destination)
    _sync_entries(destination.parent)
    shutil.rmtree(folder.parent, ignore_errors=True)


def _sync_entries(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can wait for a folder
        _sync(folder)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The file of samples: appended batch by batch, repaired after a kill, read line by line, copied to Parquet."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from datasets import Dataset, Features, Value

logger = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"


class Sample(TypedDict):
    """A line of `samples.jsonl`: a completion and its scores."""

    model: str  # as it was given
    benchmark: str  # name
    problem: str  # id
    index: int  # row of the problem
    sample: int  # number among those of the problem, from 0
    gold: str
    completion: str
    tokens: int | None  # the end-of-sequence token included; None if not known
    truncated: bool | None  # at the token limit; None if not known
    # Filled in by `score_samples`
    reward: NotRequired[float | None]  # 1 or 0 by the training verifier, None for a gold answer that it cannot read
    answer: NotRequired[str | None]  # that the verifier read
    path: NotRequired[str]  # how the verifier decided
    strict: NotRequired[float]  # 1 or 0 by the strict comparison


_COLUMNS = {
    **{"model": "string", "benchmark": "string", "problem": "string", "index": "int64", "sample": "int64"},
    **{"gold": "string", "completion": "string", "tokens": "int64", "truncated": "bool", "reward": "float64"},
    **{"answer": "string", "path": "string", "strict": "float64"},
}
# Rows that are gathered for the Parquet copy: some 16 MB of the longest completions
_ROWS_IN_MEMORY = 64


class SampleWriter:
    """
    Appends samples to a file, for one process at a time. What [`append`] has returned from is on disk. A torn last
    line, which a killed run leaves, is cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"Another process is writing to {path}. Wait for it, or give another `output`.") from None
        _repair(self._file, path)

    def append(self, samples: Iterable[Sample]):
        # One write for the batch: a kill leaves whole lines and at most one torn one
        self._file.write("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode(*_UTF8))
        self._file.flush()
        os.fsync(self._file.fileno())

    def clear(self):
        self._file.truncate(0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()


# A lone surrogate, which JSON may hold and UTF-8 may not, becomes a question mark
_UTF8 = ("utf-8", "replace")


def _repair(file, path: Path):
    """Cut off a last line that is no JSON object, with or without its newline."""
    end = file.seek(0, os.SEEK_END)
    start = _line_start(file, end)
    if start == end:
        return
    file.seek(start)
    line = file.read(end - start)
    if _parse_line(line) is None:
        logger.warning(f"{path}: the last line is torn ({len(line)} bytes) and cut off. Its sample is made again.")
        file.truncate(start)
    elif not line.endswith(b"\n"):
        file.write(b"\n")


def _line_start(file, end: int, block: int = 2**16) -> int:
    """Where the last line of a file begins; a newline at the very end belongs to it."""
    start = max(end - 1, 0)
    while start > 0:
        begin = max(start - block, 0)
        file.seek(begin)
        newline = file.read(start - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        start = begin
    return 0


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time. A torn last line is left out, one before it is a ValueError."""
    torn: tuple[int, bytes] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if torn is not None:
                shown = torn[1][:60].decode(errors="replace").strip()
                raise ValueError(
                    f"{path}: line {torn[0]} is no JSON object, it begins with {shown!r}. Correct or remove the line."
                )
            row = _parse_line(line)
            if row is None:
                torn = (number, line)
            else:
                yield row
    if torn is not None:
        logger.warning(f"{path}: the last line (line {torn[0]}) is torn and left out.")


def write_parquet(source: Path, target: Path):
    """Copy a samples file to a Parquet file, which is replaced at once, when the copy is whole."""
    scratch = target.with_name(f".{target.name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    rows = Dataset.from_generator(
        read_lines,
        Features({name: Value(kind) for name, kind in _COLUMNS.items()}),
        cache_dir=str(scratch),
        gen_kwargs={"path": source},
        writer_batch_size=_ROWS_IN_MEMORY,
    )
    rows.to_parquet(scratch / target.name)
    os.replace(scratch / target.name, target)
    del rows  # it is read from the scratch folder
    shutil.rmtree(scratch)


def write_json(path: Path, content: Any):
    """Replace a file by JSON, at once, as [`write_text`]."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str):
    """Replace a file by a text, at once: a kill leaves the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)

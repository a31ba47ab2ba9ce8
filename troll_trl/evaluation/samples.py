"""The file of samples: appended batch by batch, repaired after a kill, read line by line, copied to Parquet."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

SAMPLES = "samples.jsonl"

# Bytes of text in a row group of the Parquet copy, about what the copy holds in memory
ROW_GROUP_BYTES = 16 * 2**20

Report = Callable[[str], None]  # is told what a user should know


class Sample(TypedDict):
    """
    A line of `samples.jsonl`.

    Args:
        model (`str`):
            Model, as it was given.
        benchmark (`str`):
            Name of the benchmark.
        problem (`str`):
            Id of the problem.
        index (`int`):
            Row of the problem.
        sample (`int`):
            Number of the sample of this problem, from 0.
        gold (`str`):
            Gold answer.
        completion (`str`):
            What the model wrote.
        tokens (`int` or `None`):
            Its tokens, the end-of-sequence token included; `None` if not known.
        truncated (`bool` or `None`):
            Whether it was cut at the token limit; `None` if not known.
        reward (`float` or `None`):
            1 or 0 by the training verifier, `None` for a gold answer that it cannot read.
        answer (`str` or `None`):
            Answer that the verifier read.
        path (`str`):
            How the verifier decided.
        strict (`float`):
            1 or 0 by the strict comparison.
    """

    model: str
    benchmark: str
    problem: str
    index: int
    sample: int
    gold: str
    completion: str
    tokens: int | None
    truncated: bool | None
    reward: float | None
    answer: str | None
    path: str
    strict: float


PARQUET_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("benchmark", pa.string()),
        ("problem", pa.string()),
        ("index", pa.int64()),
        ("sample", pa.int64()),
        ("gold", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.int64()),
        ("truncated", pa.bool_()),
        ("reward", pa.float64()),
        ("answer", pa.string()),
        ("path", pa.string()),
        ("strict", pa.float64()),
    ]
)


class SampleWriter:
    """
    Appends samples to a file, for one process at a time. What [`append`] has returned from is on disk.

    Args:
        path (`Path`):
            File. A torn last line, which a killed run leaves, is cut off.
        report (`Callable[[str], None]`):
            Told what was cut off.

    Raises:
        ValueError: another process writes to the file.
    """

    def __init__(self, path: Path, report: Report):
        self.path = path
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"Another process is writing to {path}. Wait for it, or give another `output`.") from None
        _repair(self._file, path, report)

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


def _repair(file, path: Path, report: Report):
    """Cut off a last line that is no JSON object, with or without its newline."""
    end = file.seek(0, os.SEEK_END)
    start = _line_start(file, end)
    if start == end:
        return
    file.seek(start)
    line = file.read(end - start)
    if _parse_line(line) is None:
        report(f"{path}: the last line is torn ({len(line)} bytes); it is cut off, and what it lacks is made again.")
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


def read_lines(path: Path, report: Report) -> Iterator[dict[str, Any]]:
    """
    Read JSON lines one at a time.

    Args:
        path (`Path`):
            File.
        report (`Callable[[str], None]`):
            Told of a torn last line, which is left out.

    Yields:
        `dict[str, Any]`: a line.

    Raises:
        ValueError: a line before the last one is no JSON object.
    """
    bad: tuple[int, bytes] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if bad is not None:
                break
            row = _parse_line(line)
            if row is None:
                bad = (number, line)
            else:
                yield row
        else:
            if bad is not None:
                report(f"{path}: the last line (line {bad[0]}) is torn and left out.")
            return
    assert bad is not None
    shown = bad[1][:60].decode(errors="replace").strip()
    raise ValueError(f"{path}: line {bad[0]} is no JSON object, it begins with {shown!r}. Correct or remove the line.")


def write_parquet(source: Path, target: Path, report: Report):
    """
    Copy a samples file to Parquet, a row group at a time.

    Args:
        source (`Path`):
            `samples.jsonl`.
        target (`Path`):
            Parquet file. It is replaced at once, when the copy is whole.
        report (`Callable[[str], None]`):
            Told of a torn last line.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    with pq.ParquetWriter(unfinished, PARQUET_SCHEMA, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        size = 0
        for row in read_lines(source, report):
            rows.append(row)
            size += len(row["completion"]) + 500  # the other columns, roughly
            if size > ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema=PARQUET_SCHEMA))
                rows, size = [], 0
        writer.write_table(pa.Table.from_pylist(rows, schema=PARQUET_SCHEMA))
    os.replace(unfinished, target)


def write_text(path: Path, text: str):
    """Replace a file by a text, at once: a kill leaves the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)

"""Rows of a local file or folder, or of the hub, read by `datasets`; and which line of a file it cannot read."""

import csv
import glob
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

# Builder of `datasets` for each kind of local file
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# The bytes of a JSON-lines file from which `datasets` infers the type of each column: its builder's `chunksize`
TYPED_BYTES = 10 << 20


def load_rows(
    name: str, split: str, config_name: str | None = None, streaming: bool = False
) -> tuple[datasets.Dataset | datasets.IterableDataset, list[Path]]:
    """
    Load rows of a local file, of a local folder as `datasets` reads it, or of the hub.

    A single file is one split, under any name. The `config_name` of a folder is a subfolder. Also returns the local
    files, for [`naming_bad_lines`]. Raises a `ValueError` or an `OSError` for what cannot be read.
    """
    path = Path(name).expanduser()
    files: list[Path] = []
    source: dict[str, Any] = {"path": name, "name": config_name}
    if path.is_dir():
        files = sorted(file for suffix in FILE_BUILDERS for file in path.rglob(f"*{suffix}"))
        source = {"path": str(path), "data_dir": config_name}
    elif path.is_file():
        if path.suffix not in FILE_BUILDERS:
            raise ValueError(f"Cannot read {path}: its name must end in one of {', '.join(FILE_BUILDERS)}.")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty.")
        files = [path]
        only_split = re.match(r"\w*", split)[0]  # type: ignore[index]
        source = {"path": FILE_BUILDERS[path.suffix], "data_files": {only_split: glob.escape(str(path))}}
        if path.suffix == ".csv":  # as text: otherwise, the first rows would decide a column's type
            with path.open(newline="", encoding="utf-8-sig") as file:
                header = next(csv.reader(file))
            source["features"] = datasets.Features({column: datasets.Value("string") for column in header})
    elif path.suffix in FILE_BUILDERS or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"No such file or folder: {path} (working folder: {Path.cwd()}).")
    with naming_bad_lines(name, files):
        rows = datasets.load_dataset(**source, split=split, streaming=streaming)
    if files:
        rows.info.dataset_name = name  # for messages of the trainer; by default it is the builder's name
    return rows, files


@contextmanager
def naming_bad_lines(name: str, files: list[Path]) -> Iterator[None]:
    """Name the file and the line on which reading failed. Text that is not UTF-8 fails only when it is used."""
    try:
        yield
    except (DatasetGenerationError, ValueError) as error:
        typed = isinstance(error, DatasetGenerationError)
        reasons = (bad_line(file, typed) for file in files if file.suffix in (".jsonl", ".json"))
        reason = next(filter(None, reasons), None)
        if reason is None and type(error) is ValueError:  # ours: readers raise subclasses
            raise
        raise ValueError(f"Cannot read {name}: {reason or error.__cause__ or error}") from error


def bad_line(file: Path, typed: bool) -> str | None:
    """Describe the first line of a JSON-lines file that is not a JSON object, or with `typed` the first that changes a
    column's type; `None` if there is none, or if the file is one array."""
    kinds: dict[str, set[str]] = {}
    read = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # a UnicodeDecodeError is one, too
                if number == 1 and line.lstrip()[:1] == b"[":
                    return None
                return f"line {number} of {file} is not a JSON object in UTF-8 ({error}): {shortened(line)}."
            if not isinstance(row, dict):
                return None if number == 1 else f"line {number} of {file} is not a JSON object: {shortened(row)}."
            for column, value in _values(row) if typed else ():
                kind = type(value).__name__
                if read < TYPED_BYTES:
                    kinds.setdefault(column, set()).add(kind)
                elif kind not in kinds.get(column, ()) and not (kind == "int" and "float" in kinds.get(column, ())):
                    before = " and ".join(sorted(kinds.get(column, ()))) or "no value"
                    return (
                        f"line {number} of {file}: the column {column!r} has {shortened(value)} ({kind}), but {before} "
                        f"in the first {TYPED_BYTES >> 20} MB of the file, which give the column its type. Write all "
                        "values of a column in one type."
                    )
            read += len(line)
    return None


def _values(value: Any, column: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number and text in a row with its column; one in a mapping has a dotted column."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _values(inner, f"{column}.{name}" if column else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, column)
    elif value is not None:
        yield column, value


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

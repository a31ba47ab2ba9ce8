"""Where rows come from: local files, folders with a file per split, and the hub; and what is wrong with a file."""

import glob
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

# Builder of `datasets` for each kind of local file.
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(
    name: str, split: str, config_name: str | None, streaming: bool = False
) -> tuple[datasets.Dataset, list[Path]]:
    """A dataset, an iterable one with `streaming`, and the local files that it was read from."""
    path = Path(name).expanduser()
    if path.exists():
        split_name, bracket, part = split.partition("[")  # train[:10%]
        if "+" in split or (bracket and streaming):
            raise ValueError(
                f"The split {split!r} of {name}: "
                + ("a stream cannot be cut" if bracket and streaming else "`+` joins splits of hub datasets alone")
                + f". Give one split, such as {split_name.partition('+')[0]}."
            )
        if path.is_dir():
            files = _files_of_split(path, split_name, config_name)
        elif config_name is not None:
            raise ValueError(f"The single file {path} has no configuration {config_name!r}. Leave that out.")
        else:
            files = [path]
        # A builder calls the split of its files "train"
        return _load_files(files, f"train{bracket}{part}", streaming), files
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in FILE_BUILDERS:
        raise FileNotFoundError(f"No such file or folder: {path} (working folder: {Path.cwd()}).")
    config_names = [None] if config_name is None else [part.strip() for part in config_name.split(",")]
    try:
        parts = [datasets.load_dataset(name, config, split=split, streaming=streaming) for config in config_names]
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{name!r} is not a local file or folder (working folder: {Path.cwd()}), and the hub did not provide it: "
            f"{error}"
        ) from error
    return (datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]), []


def _files_of_split(folder: Path, split: str, config_name: str | None) -> list[Path]:
    if config_name is not None:
        folder = folder / config_name
        if not folder.is_dir():
            raise FileNotFoundError(
                f"The configuration {config_name!r} of a local folder is a subfolder, and {folder} does not exist; "
                f"{folder.parent} holds {_names(folder.parent)}. Leave the configuration out if the files are there."
            )
    found = [path for suffix in FILE_BUILDERS if (path := folder / f"{split}{suffix}").is_file()]
    shards = sorted(folder.glob(f"{glob.escape(split)}-*.parquet"))
    if len(found) + bool(shards) > 1:
        raise ValueError(
            f"{folder} holds split {split!r} more than once: {', '.join(path.name for path in found + shards)}. Give "
            "the path of one file."
        )
    if not found and not shards:
        raise FileNotFoundError(
            f"No split {split!r} in {folder}: looked for {split}.jsonl, {split}.json, {split}.parquet and "
            f"{split}-*.parquet, found {_names(folder)}."
        )
    return found or shards


def _names(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def _load_files(files: list[Path], split: str, streaming: bool) -> datasets.Dataset:
    builder = FILE_BUILDERS.get(files[0].suffix)
    if builder is None:
        raise ValueError(f"Cannot read {files[0]}: its name must end in one of {', '.join(FILE_BUILDERS)}.")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty.")
    patterns = [glob.escape(str(file)) for file in files]  # a builder takes patterns, not paths
    try:
        return datasets.load_dataset(builder, data_files=patterns, split=split, streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:
        reason = find_bad_line(files) or error.__cause__ or error
        raise ValueError(f"Cannot read {', '.join(map(str, files))}: {reason}") from error


@contextmanager
def naming_bad_lines(name: str, files: list[Path]) -> Iterator[None]:
    """Name the line that is not UTF-8. The JSON reader does not look at the bytes of a text: only its user fails."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {find_bad_line(files) or error}") from error


def find_bad_line(files: list[Path]) -> str | None:
    """What is wrong with the first line of JSON-lines files that cannot be read; `None` if all can."""
    for file in files:
        if file.suffix not in (".jsonl", ".json"):
            continue
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and file.suffix == ".json" and line.lstrip()[:1] == b"[":
                    break  # one array over many lines
                if reason := _reason_of_bad_line(line):
                    return f"line {number} of {file.name} {reason}"
    return None


def _reason_of_bad_line(line: bytes) -> str | None:
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text) if text.strip() else {}
        json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair
    except UnicodeError as error:
        return f"is not UTF-8 ({error}). Save the file as UTF-8."
    except ValueError as error:
        return f"is not complete JSON ({error}): {shortened(text)}. Was the file cut or its download interrupted?"
    return None if isinstance(row, dict) else f"is not a JSON object: {shortened(row)}."


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

"""Where rows come from: local files, folders with a file per split, and the hub; and what is wrong with a file."""

import glob
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from pandas.io.json import ujson_loads

# Builder of `datasets` for each kind of local file.
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Sixteen digits, or an exponent: every number of a JSON file that float64 may not hold has one of these
_LONG_NUMBER = re.compile(rb"[0-9][0-9.]{15}|[0-9][eE]")


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
        dataset = datasets.load_dataset(builder, data_files=patterns, split=split, streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:
        reason: Any = find_bad_line(files)
        if reason is None:
            check_numbers(files, None)
            reason = error.__cause__ or error
        raise ValueError(f"Cannot read {', '.join(map(str, files))}: {reason}") from error
    check_numbers(files, dataset.features)
    dataset.info.dataset_name = ", ".join(map(str, files))  # the builder's name, for messages of the trainer
    return dataset


def check_numbers(files: list[Path], features: datasets.Features | None) -> None:
    """
    Raise a `ValueError` for the first number of JSON files that `datasets` would change. It reads fractions, integers
    beyond 63 bits (64 beside texts) and all integers of a column with fractions as float64. If a file is one array, or
    has a column of several types, it first writes all rows again with ten decimals. It reads texts in a column of
    several types as JSON.

    Args:
        files (`list[Path]`):
            Those that are not JSON are skipped.
        features (`datasets.Features`, *optional*):
            The features of the dataset that was read. Without them, any column may have fractions.
    """
    for file in files:
        if file.suffix == ".parquet":
            continue
        for place, row, again in _rows_to_check(file, "Json" in str(features)):
            for name, value in row.items():
                for written, column in _scalars(value, "float" if features is None else features.get(name)):
                    read = _as_read(written, column, again)
                    if read != written:
                        shown = f"text {written!r}" if isinstance(written, str) else f"number {written}"
                        raise ValueError(
                            f"{place} of {file.name}: {name!r} has the {shown}, which would become {read!r}. Write all "
                            "values of the column as text, in quotes: then they stay as they are."
                        )


def _as_read(written: Decimal | str, column: str, again: bool) -> Any:
    """What `datasets` makes of a number, or of a text in a column of several types; the same object if nothing
    changes."""
    if isinstance(written, str):
        try:
            read = ujson_loads(written)
        except ValueError:
            return written
        digits = f"{read:.15g}" if type(read) is float else str(read)
        return written if type(read) in (int, float) and Decimal(written) == Decimal(digits) else read
    bits = 0 if "float" in column else 64 if "Json" in column else 63
    if written.as_tuple().exponent == 0 and abs(written) < 2**bits:
        return written
    read = round(float(written), 10) if again else float(written)
    # In a column of several types, `datasets` reads fractions with an error in the 16th digit, which `loading` removes
    return written if Decimal(f"{read:.15g}" if "Json" in column else repr(read)) == written else read


def _exact(written: str) -> Decimal:
    try:
        return Decimal(written)
    except InvalidOperation:  # is no ValueError
        raise ValueError(f"the number {written[:40]} is beyond all that can be computed with") from None


def _rows_to_check(file: Path, again: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Place and content of the rows that may have a number that `datasets` changes, and whether it writes them `again`.
    Numbers are `Decimal`."""
    read = json.JSONDecoder(parse_int=Decimal, parse_float=_exact).decode
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                line += lines.read()
                again = True
            if not again and not _LONG_NUMBER.search(line) and number > 1:
                continue
            try:
                content = read(line.decode("utf-8-sig"))
            except ValueError as error:
                if line.lstrip()[:1] == b"{":  # pandas reads it, and changes numbers
                    reason = f"is not a whole JSON object: {error}."
                    if isinstance(error, UnicodeDecodeError):
                        reason = f"is not UTF-8 ({error}). Save the file as UTF-8."
                    raise ValueError(f"line {number} of {file.name} {reason}") from None
                continue  # the reader itself complains of any other bad JSON
            for index, row in enumerate(content) if isinstance(content, list) else [(number, content)]:
                if isinstance(row, dict):
                    yield f"{'row' if isinstance(content, list) else 'line'} {index}", row, again


def _scalars(value: Any, feature: Any) -> Iterator[tuple[Decimal | str, str]]:
    """The numbers in a value, and a text in a column of several types, each with the feature of its column, as text."""
    if isinstance(value, Decimal) or (isinstance(value, str) and isinstance(feature, datasets.Json)):
        yield value, str(feature)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _scalars(inner, feature.get(name) if isinstance(feature, dict) else str(feature))
    elif isinstance(value, list):
        for inner in value:
            yield from _scalars(inner, getattr(feature, "feature", str(feature)))


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

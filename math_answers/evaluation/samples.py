"""Samples of an evaluation: a file with one per line, read one by one, and its Parquet copy."""

import json
import logging
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from math_answers.whole_files import unfinished

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


_KINDS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
# Rows in memory for the Parquet copy: 8 MB of the longest completions
_ROWS_IN_MEMORY = 32


def read_lines(path: Path, **options: Any) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time. A torn last line is left out, one before it is a ValueError.
    `options` go to `json.loads`."""
    return (row for row, _ in read_with_ends(path, **options))


def read_with_ends(path: Path, **options: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """[`read_lines`], each object with the position in the file at which its line ends."""
    end, torn = 0, None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if not line.strip():
                continue
            if torn is not None:
                shown = torn[1][:60].decode(errors="replace").strip()
                raise ValueError(
                    f"{path}: line {torn[0]} is not a JSON object, it begins with {shown!r}. Correct or remove it."
                )
            try:
                row = json.loads(line, **options)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row, end
            else:
                torn = number, line
    if torn is not None:
        logger.warning(f"{path}: the last line (line {torn[0]}, {len(torn[1])} bytes) is torn and left out.")


def write_parquet(source: Path, target: Path):
    """Copy a samples file to a Parquet file, which is replaced as a whole."""
    kinds = {name: (get_args(hint) or (hint,))[0] for name, hint in get_type_hints(Sample).items()}  # without `| None`
    schema, rows = pa.schema((name, _KINDS[kind]) for name, kind in kinds.items()), read_lines(source)
    with pq.ParquetWriter(unfinished(target), schema) as writer:
        while batch := list(islice(rows, _ROWS_IN_MEMORY)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
    os.replace(unfinished(target), target)

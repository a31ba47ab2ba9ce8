"""Samples of an evaluation: a file with one per line, to which a second call adds those that a stopped call lacks."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from troll_trl.evaluation.whole_files import write_json, write_text

SAMPLES, SUMMARY = "samples.jsonl", "summary.json"


class Sample(TypedDict):
    """A line of `samples.jsonl`: a completion and its score."""

    benchmark: str  # name
    problem: str  # its text
    sample: int  # number among those of the problem, from 0
    gold: str
    completion: str
    tokens: int | None  # the end-of-sequence token included; None if not known
    truncated: bool | None  # at the token limit; None if not known
    digest: NotRequired[str]  # of the prompt; only of samples that were generated here
    # Filled in by `score`
    reward: NotRequired[float | None]  # 1 or 0; None if the verifier could not decide
    answer: NotRequired[str | None]  # that the verifier read
    decided_by: NotRequired[str]  # how the verifier decided


Key = tuple[str, str, int]


def key_of(sample: Sample) -> Key:
    return sample["benchmark"], sample["problem"], sample["sample"]


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a file, except an incomplete last line. Raises a `ValueError` for a line that is no scored
    sample."""
    samples: dict[Key, Sample] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if _is_cut(line):
                break
            try:
                sample = json.loads(line)
                sample["reward"], sample["answer"]
                samples[key_of(sample)] = sample
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: line {number} is no scored sample ({error!r}). To score a file with a column "
                    "`completion`, use `samples`."
                ) from None
    return list(samples.values())


def check_output(folder: Path) -> None:
    """Refuse a folder in which no file can be made, before a model is loaded."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "is read-only" if there.is_dir() else "is a file"
        raise ValueError(f"`output`: {there} {reason}, so {folder} cannot be written. Give another folder.")


def read_finished(folder: Path, settings: dict[str, Any], overwrite: bool) -> list[Sample]:
    """Read the samples that a stopped evaluation has left in a folder. Raises a `ValueError` if other `settings` made
    them."""
    path = folder / SAMPLES
    if overwrite or not path.is_file() or not (samples := read_samples(path)):
        return []
    earlier = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["settings"]
    different = [
        f"`{name}` was {earlier.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted(earlier.keys() | settings.keys())
        if earlier.get(name) != settings.get(name)
    ]
    if different:
        raise ValueError(
            f"{folder} has samples made with other settings: {'; '.join(different)}. Restore them to continue, give "
            "another `output`, or set `overwrite` to discard the samples."
        )
    return samples


def begin(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Make the folder ready for more samples: with the settings that make them, and without a line that was cut."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SAMPLES
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() and not overwrite else []
    with path.open("ab") as file:
        file.truncate(sum(len(line) for line in lines if not _is_cut(line)))
        if lines and not _is_cut(lines[-1]) and not lines[-1].endswith(b"\n"):
            file.write(b"\n")
    write_json(folder / SUMMARY, {"settings": settings})


def _is_cut(line: bytes) -> bool:
    """Return whether a line is incomplete: a process killed during a write leaves such a last line."""
    try:
        return not line.endswith(b"\n") and not isinstance(json.loads(line), dict)
    except ValueError:
        return True


def append(folder: Path, samples: Iterable[Sample]) -> None:
    """Append scored samples in one write: if the process is killed, only the last line may be incomplete."""
    with (folder / SAMPLES).open("ab") as file:
        file.write(_lines(samples).encode("utf-8", "replace"))  # a tokenizer may give half of a surrogate pair


def replace(folder: Path, samples: Iterable[Sample]) -> None:
    """Replace all samples of a folder."""
    write_text(folder / SAMPLES, _lines(samples))


def _lines(samples: Iterable[Sample]) -> str:
    return "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)

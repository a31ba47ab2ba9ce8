"""Output: the folder of an evaluation, begun or resumed. `run.json` says how its samples were made."""

import contextlib
import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import torch

from math_answers.evaluation.samples import SAMPLES, Sample, read_with_ends
from math_answers.whole_files import write_json

logger = logging.getLogger(__name__)

PROVENANCE = "run.json"
VERSIONS = ("troll-trl", "torch", "transformers", "vllm", "peft", "datasets", "math-verify", "numpy")

Key = tuple[Any, ...]  # a sample's model, benchmark, problem and number


def key_of(sample: Any) -> Key:
    """The key of a sample, which no other sample of its file has."""
    return tuple(map(sample.get, ("model", "benchmark", "problem", "sample")))


class Output:
    """
    The folder of an evaluation, as [`open_output`] yields it; `done` holds the keys of its samples.

    A run resumes only with the settings, models and benchmarks that made its samples. It may add models and benchmarks,
    and raises a `ValueError` for changed ones. With `overwrite`, [`begin`] discards the samples.
    """

    def __init__(self, file: BinaryIO, wanted: dict[str, Any], overwrite: bool):
        self.samples = Path(file.name)
        self.folder = self.samples.parent
        self._path, self._file, self._wanted, self._overwrite = self.folder / PROVENANCE, file, wanted, overwrite
        self.content: dict[str, Any] = {"settings": {}, "models": {}, "benchmarks": {}, "first_prompts": {}}
        self.done: set[Key] = set()
        if not overwrite:
            self._read()

    def begin(self) -> None:
        """Discard samples if `overwrite` is set, and write `run.json`. Call it after all other checks."""
        if self._overwrite:
            if self._file.seek(0, os.SEEK_END):
                logger.warning(f"`overwrite`: the samples in {self.folder} are discarded.")
            self._file.truncate(0)
        self.content["settings"] = self._wanted["settings"]
        for kind in ("models", "benchmarks"):
            self.content[kind] = self._wanted[kind] | self.content[kind]
        self.save()

    def append(self, samples: Iterable[Sample]):
        """Append scored samples. They are on disk when this returns."""
        # One write for the batch: a kill leaves whole lines and at most one torn one. A lone surrogate, which JSON may
        # hold and UTF-8 may not, becomes a question mark
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        self._file.write(text.encode("utf-8", "replace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def save(self) -> None:
        """Write `run.json`."""
        write_json(self._path, self.content)

    def _read(self) -> None:
        """Fill `done`, cut off a torn last line, and compare what is wanted with what made the samples."""
        end = 0
        for row, position in read_with_ends(self.samples):
            key, end = key_of(row), position
            if key in self.done:
                raise ValueError(f"{self.samples} holds {key} twice. Remove one, or give another `output`.")
            self.done.add(key)
        self._file.truncate(end)
        self._file.seek(max(end - 1, 0))
        if self._file.read(1) not in (b"", b"\n"):
            self._file.write(b"\n")
        # Without a sample there is nothing to resume, and an earlier run.json does not count: that run may have failed
        # because of the setting that has now changed
        if self.done:
            self._compare()

    def _compare(self) -> None:
        try:
            self.content |= json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path} cannot be read: {error}. Give another `output`, or `overwrite`.") from None
        settings = self.content["settings"]
        differences = [
            f"`{name}` was {settings[name]!r} and is {value!r}"
            for name, value in self._wanted["settings"].items()
            if settings.get(name, value) != value
        ]
        differences += [
            f"the {kind.removesuffix('s')} {name} has changed since"
            for kind in ("models", "benchmarks")
            for name, entry in self._wanted[kind].items()
            if self.content[kind].get(name, entry)["digest"] != entry["digest"]
        ]
        if differences:
            raise ValueError(
                f"{self.folder} holds samples made otherwise: {'; '.join(differences)}. Set it as it was to "
                "continue, give another `output`, or `overwrite` to discard them."
            )


@contextlib.contextmanager
def open_output(folder: Path, wanted: dict[str, Any], overwrite: bool) -> Iterator[Output]:
    """Open the folder of an evaluation, for one process at a time. Raises a `ValueError` as [`Output`]."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SAMPLES).open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another process is writing to {file.name}. Wait, or give another `output`.") from None
        yield Output(file, wanted, overwrite)


def describe_device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions

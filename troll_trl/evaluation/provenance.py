"""Output: the folder of an evaluation, its samples and `run.json`, what they were made with; begun anew or resumed."""

import json
import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from troll_trl.evaluation.samples import SAMPLES, SampleWriter, read_lines, write_json

logger = logging.getLogger(__name__)

PROVENANCE = "run.json"
VERSIONS = ("troll-trl", "torch", "transformers", "vllm", "peft", "datasets", "math-verify", "numpy")


class Output:
    """
    The folder of an evaluation, for one process at a time.

    A run resumes only with the settings, models and benchmarks that made its samples; others are a `ValueError`, and
    new ones welcome. With `overwrite`, [`begin`] discards the samples that are there.
    """

    def __init__(self, folder: Path, wanted: dict[str, Any], overwrite: bool):
        self.folder, self.samples = folder, folder / SAMPLES
        self._path, self._wanted, self._overwrite = folder / PROVENANCE, wanted, overwrite
        self.content: dict[str, Any] = {"settings": {}, "models": {}, "benchmarks": {}, "first_prompts": {}}
        self.content["sessions"] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SampleWriter(self.samples)
        self.append = self._writer.append

    def __enter__(self) -> "Output":
        # Without a sample there is nothing to resume, and an earlier run.json counts for nothing: that run may have
        # failed for the very setting that is changed now
        if not self._overwrite and self.samples.stat().st_size:
            self._read()
            self._check(self._wanted)
        return self

    def __exit__(self, *exception):
        self._writer.__exit__()

    def _read(self) -> None:
        if not self._path.is_file():
            raise ValueError(
                f"{self.folder} holds a {SAMPLES}, but no {PROVENANCE} that says how it was made. Give another "
                "`output`, or `overwrite` to discard it."
            )
        try:
            before = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(before, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise ValueError(f"{self._path} cannot be read: {error}. Give another `output`, or `overwrite`.") from None
        self.content |= before

    def begin(self) -> None:
        """Discard what is to be overwritten, and note what is wanted; when everything else has been checked."""
        if self._overwrite:
            if discarded := sum(1 for _ in read_lines(self.samples)):
                logger.warning(f"`overwrite`: the {discarded} samples in {self.folder} are discarded.")
            self._writer.clear()
        self.content["settings"] = self._wanted["settings"]
        for kind in ("models", "benchmarks"):
            for name, entry in self._wanted[kind].items():
                self.content[kind].setdefault(name, entry)
        self.save()

    def save(self) -> None:
        write_json(self._path, self.content)

    def _check(self, wanted: dict[str, Any]) -> None:
        differences = [
            f"`{name}` was {self.content['settings'][name]!r} and is {value!r}"
            for name, value in wanted["settings"].items()
            if name in self.content["settings"] and self.content["settings"][name] != value
        ]
        for kind, what in (("models", "model"), ("benchmarks", "benchmark")):
            for name, entry in wanted[kind].items():
                before = self.content[kind].get(name)
                if before is not None and before["digest"] != entry["digest"]:
                    then, now = before.get("problems"), entry.get("problems")
                    count = f" ({then} problems then, {now} now)" if now is not None else ""
                    differences.append(f"the {what} {name} has changed since{count}")
        if differences:
            raise ValueError(
                f"{self.folder} holds samples made otherwise: {'; '.join(differences)}. Set it as it was to "
                "continue, give another `output`, or `overwrite` to discard them."
            )


def describe_device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions

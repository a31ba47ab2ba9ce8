"""`run.json`: what the samples of a folder were made with."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from troll_trl.evaluation.samples import SAMPLES, write_text

PROVENANCE = "run.json"
VERSIONS = ("troll-trl", "torch", "transformers", "vllm", "peft", "datasets", "math-verify", "numpy")


class Provenance:
    """
    `run.json`: what the samples of an output folder were made with. A run goes on only with the same, unless
    `discard`ing them. Without a sample there is nothing to go on with, and an earlier file counts for nothing: that
    run may have failed for the very setting that is changed now.
    """

    def __init__(self, folder: Path, discard: bool = False):
        self._path = folder / PROVENANCE
        self.content: dict[str, Any] = {
            "settings": {},
            "models": {},
            "benchmarks": {},
            "first_prompts": {},
            "sessions": [],
        }
        if discard or not (folder / SAMPLES).stat().st_size:
            return
        if self._path.is_file():
            try:
                before = json.loads(self._path.read_text(encoding="utf-8"))
                if not isinstance(before, dict):
                    raise ValueError("it is no JSON object")
                self.content |= before
            except ValueError as error:
                raise ValueError(
                    f"{self._path} cannot be read: {error}. Give another `output`, or `overwrite`."
                ) from None
        else:
            raise ValueError(
                f"{folder} holds a {SAMPLES}, but no {PROVENANCE} that says how it was made. Give another `output`, or "
                "`overwrite` to discard it."
            )

    def check(self, wanted: dict[str, Any]):
        """
        Refuse by a ValueError to go on with other `settings`, or with `models` or `benchmarks` that are not the same
        any more. New models and benchmarks are welcome.
        """
        differences = [
            f"`{name}` was {self.content['settings'][name]!r} and is {value!r}"
            for name, value in wanted["settings"].items()
            if name in self.content["settings"] and self.content["settings"][name] != value
        ]
        for kind, what in (("models", "model"), ("benchmarks", "benchmark")):
            for name, entry in wanted[kind].items():
                before = self.content[kind].get(name)
                if before is not None and before["digest"] != entry["digest"]:
                    count = (
                        f" ({before['problems']} problems then, {entry['problems']} now)" if "problems" in entry else ""
                    )
                    differences.append(f"the {what} {name} has changed since{count}")
        if differences:
            raise ValueError(
                f"{self._path.parent} holds samples made otherwise: {'; '.join(differences)}. Set it as it was to "
                "continue, give another `output`, or `overwrite` to discard them."
            )

    def add(self, wanted: dict[str, Any]):
        self.content["settings"] = wanted["settings"]
        for kind in ("models", "benchmarks"):
            for name, entry in wanted[kind].items():
                self.content[kind].setdefault(name, entry)
        self.save()

    def save(self):
        write_text(self._path, json.dumps(self.content, indent=2, ensure_ascii=False) + "\n")


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

"""Benchmarks by name, from the hub or from local files, as problems with an id that does not depend on their order."""

import difflib
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets

from troll_trl.data import load_math_dataset


@dataclass(frozen=True)
class Source:
    """Where a benchmark is on the hub. Its columns are recognised as in local files."""

    path: str
    split: str = "test"
    config_name: str | None = None


# Names and splits may move on the hub. The error then says what was looked for, and `name=path` reads a local copy.
HUB = {
    "gsm8k": Source("openai/gsm8k", config_name="main"),
    "math": Source("DigitalLearningGmbH/MATH-lighteval", config_name="default"),
    "math500": Source("HuggingFaceH4/MATH-500"),
    "aime24": Source("HuggingFaceH4/aime_2024", split="train"),
    "aime25": Source("math-ai/aime25"),
    "amc23": Source("math-ai/amc23"),
    "minerva": Source("math-ai/minervamath"),
    "olympiadbench": Source("Hothan/OlympiadBench", split="train", config_name="OE_TO_maths_en_COMP"),
    "omni_math": Source("KbsdJames/Omni-MATH"),
}


@dataclass(frozen=True)
class Problem:
    """One problem: its id, its prompt as chat messages, its gold answer, and the options of a multiple choice."""

    id: str  # digest of the problem and its gold answer: it stays when rows are added or moved
    messages: list[dict[str, str]]
    gold: str
    options: list[str] | None = None


class Benchmark:
    """
    The problems of a benchmark, which stay on disk; memory holds only their ids. An id does not depend on the
    instruction at the end of a prompt: runs with other instructions have the same problems.
    """

    def __init__(self, name: str, source: str, dataset: datasets.Dataset, instruction: str | None = None):
        self.name = name
        self.source = source
        self._dataset = dataset
        self.ids = list(_unique_ids(dataset, instruction))
        self.digest = hashlib.sha256("\n".join(self.ids).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.ids)

    def problem(self, index: int) -> Problem:
        row = self._dataset[index]
        return Problem(self.ids[index], row["prompt"], row["solution"], row.get("options"))


def load_benchmark(
    spec: str,
    max_problems: int | None = None,
    instruction: str | None = None,
    system_prompt: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> Benchmark:
    """
    Load a name of `HUB`, or `name=path` for a local file or folder (its split `test`, else `train`). Column names apply
    to local files alone; the other arguments are as for [`~troll_trl.data.load_math_dataset`].
    """
    name, local, path = spec.partition("=")
    load = partial(load_math_dataset, instruction=instruction, system_prompt=system_prompt, max_samples=max_problems)
    if not local:
        if name not in HUB:
            raise ValueError(unknown_benchmark(name))
        hub = HUB[name]
        try:
            dataset = load(hub.path, hub.split, hub.config_name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"`benchmarks`: {error}. A local copy is given as {name}=path.") from None
        return Benchmark(name, f"{hub.path} ({hub.split})", dataset, instruction)
    if not name or not path:
        raise ValueError(f"`benchmarks`: {spec!r} must be `name=path`, with a name and the path of a file or folder.")
    split = _local_split(Path(path).expanduser())
    dataset = load(path, split, problem_column=problem_column, answer_column=answer_column)
    return Benchmark(name, path, dataset, instruction)


def unknown_benchmark(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), HUB, n=3, cutoff=0.4)
    said = f" The nearest names are {', '.join(nearest)}." if nearest else ""
    hint = " A local file or folder is given as name=path."
    if Path(name).exists():
        hint = f" For a file or folder, give it a name: {Path(name).stem or 'name'}={name}."
    return f"`benchmarks`: there is no benchmark {name!r}.{said} All of them: {', '.join(HUB)}.{hint}"


def _local_split(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"`benchmarks`: there is no file or folder {path} (working folder: {Path.cwd()}).")
    has_test = not path.is_dir() or any(path.glob("test.*")) or any(path.glob("test-*"))
    if not has_test:
        warnings.warn(f"{path} has no split test; its split train is evaluated.", stacklevel=3)
    return "test" if has_test else "train"


def _unique_ids(dataset: datasets.Dataset, instruction: str | None) -> Iterator[str]:
    seen: dict[str, int] = {}
    for row in dataset:
        user = [message["content"] for message in row["prompt"] if message["role"] != "system"]
        if instruction is not None:
            user[-1] = user[-1].removesuffix(instruction)
        user[-1] = user[-1].rstrip()
        digest = hashlib.sha256("\n".join([*user, row["solution"]]).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        yield digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"

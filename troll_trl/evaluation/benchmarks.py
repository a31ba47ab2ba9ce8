"""Benchmarks by name, from the hub or from local files, as problems with an id that does not depend on their order."""

import difflib
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets

from troll_trl.data import load_math_dataset


@dataclass(frozen=True)
class Source:
    """
    Where a benchmark is on the hub. Its columns are recognised, as those of local files.

    Parameters:
        path (`str`):
            Name of the dataset.
        split (`str`, *optional*, defaults to `"test"`):
            Split that holds the problems.
        config_name (`str`, *optional*):
            Configuration of the dataset; several, joined by commas, are concatenated.
    """

    path: str
    split: str = "test"
    config_name: str | None = None


# The tests load none of these from the hub. Where a name or a split has moved, the error says what was looked for, and
# `name=path` reads a local copy.
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
    """
    One problem.

    Parameters:
        id (`str`):
            Digest of the problem and its gold answer: it stays when rows are added or moved.
        messages (`list[dict[str, str]]`):
            Prompt as chat messages.
        gold (`str`):
            Gold answer.
    """

    id: str
    messages: list[dict[str, str]]
    gold: str


class Benchmark:
    """
    The problems of a benchmark. They stay on disk; only their ids are held in memory.

    Args:
        name (`str`):
            Name in tables.
        source (`str`):
            Where it came from, for the record.
        dataset ([`~datasets.Dataset`]):
            Columns `prompt` and `solution`, as [`~troll_trl.data.load_math_dataset`] returns them.
        instruction (`str`, *optional*):
            What the prompts end with, and the ids leave out: runs with other instructions have the same problems.
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
        return Problem(self.ids[index], row["prompt"], row["solution"])


def load_benchmark(
    spec: str,
    max_problems: int | None = None,
    instruction: str | None = None,
    system_prompt: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> Benchmark:
    """
    Load a benchmark.

    Args:
        spec (`str`):
            A name of `HUB`, or `name=path` for a local file or folder (its split `test`, else `train`).
        max_problems (`int`, *optional*):
            Take the first so many rows only.
        instruction (`str`, *optional*):
            Text behind every problem.
        system_prompt (`str`, *optional*):
            System message in front of every problem.
        problem_column (`str`, *optional*):
            Column of the problem in a local file, if it is not recognised.
        answer_column (`str`, *optional*):
            Column of the gold answer, likewise.

    Returns:
        [`Benchmark`]: with at least one problem.

    Raises:
        FileNotFoundError: the path, the hub dataset or the split does not exist.
        ValueError: no such benchmark (the nearest names are listed), columns that are not there, or no problem.
    """
    name, local, path = spec.partition("=")
    if not local:
        if name not in HUB:
            raise ValueError(unknown_benchmark(name))
        hub = HUB[name]
        try:
            dataset = load_math_dataset(
                hub.path, hub.split, hub.config_name, None, None, instruction, system_prompt, max_problems
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(f"`benchmarks`: {error}. A local copy is given as {name}=path.") from None
        return Benchmark(name, f"{hub.path} ({hub.split})", dataset, instruction)
    if not name or not path:
        raise ValueError(f"`benchmarks`: {spec!r} must be `name=path`, with a name and the path of a file or folder.")
    split = _local_split(Path(path).expanduser())
    dataset = load_math_dataset(
        path, split, None, problem_column, answer_column, instruction, system_prompt, max_problems
    )
    return Benchmark(name, path, dataset, instruction)


def unknown_benchmark(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), HUB, n=3, cutoff=0.4) or list(HUB)
    hint = f" For a file or folder, give it a name: {Path(name).stem or 'name'}={name}." if Path(name).exists() else ""
    return (
        f"`benchmarks`: there is no benchmark {name!r}. The nearest names are {', '.join(nearest)}; all of them: "
        f"{', '.join(HUB)}.{hint or ' A local file or folder is given as name=path.'}"
    )


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

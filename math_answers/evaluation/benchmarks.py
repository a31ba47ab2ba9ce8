"""Benchmarks by name, from the hub or from local files, as problems with an id that does not depend on their order."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import datasets

from math_answers.data import load_math_dataset


class Source(NamedTuple):
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


class Benchmark(NamedTuple):
    """A benchmark. Its problems stay on disk; memory holds only their ids."""

    name: str
    source: str
    problems: datasets.Dataset  # columns `prompt` (chat messages), `solution`, and `options` of multiple choices
    ids: list[str]  # digests of problem and gold answer: they stay if rows move, or with another instruction


def load_benchmark(
    spec: str,
    max_problems: int | None = None,
    instruction: str | None = None,
    system_prompt: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> Benchmark:
    """Load a name of `HUB`, or `name=path` for a local file or folder (its split `test`, else `train`). Column names
    apply to local files alone; the other arguments are as for [`~math_answers.load_math_dataset`]."""
    name, local, path = spec.partition("=")
    load = partial(load_math_dataset, instruction=instruction, system_prompt=system_prompt, max_samples=max_problems)
    if not local:
        if name not in HUB:
            raise ValueError(f"`benchmarks`: {name!r} is neither {', '.join(HUB)} nor name=path, for a local file.")
        problems = load(*HUB[name])
        source = f"{HUB[name].path} ({HUB[name].split})"
    else:
        split = _local_split(Path(path).expanduser())
        problems = load(path, split, problem_column=problem_column, answer_column=answer_column)
        source = path
    return Benchmark(name, source, problems, list(_unique_ids(problems, instruction or "")))


def _local_split(path: Path) -> str:
    has_test = not path.is_dir() or any(path.glob("test.*")) or any(path.glob("test-*"))
    if not has_test:
        warnings.warn(f"{path} has no split test; its split train is evaluated.", stacklevel=3)
    return "test" if has_test else "train"


def _unique_ids(problems: datasets.Dataset, instruction: str) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for row in problems:
        *earlier, last = (message["content"] for message in row["prompt"] if message["role"] != "system")
        texts = [*earlier, last.removesuffix(instruction).rstrip(), row["solution"]]
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
        seen[digest] += 1
        yield digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"

"""Benchmarks by name, from the hub or from local files: each problem once, however often its file has it."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from troll_trl.data import load_math_dataset
from troll_trl.evaluation.arguments import EvaluationArguments


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


@dataclass
class Problem:
    """A problem of a benchmark. Rows with the same text are one problem, with the gold answer of each row."""

    benchmark: str
    text: str
    prompt: list[dict[str, str]]
    golds: list[str]  # one for each row

    @property
    def digest(self) -> str:
        """Identify the prompt, even if two problems have the same text."""
        return hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]


def load_problems(args: EvaluationArguments) -> dict[str, list[Problem]]:
    """Load all problems of each benchmark, with the prompts that `args` asks for."""
    specs = (spec.partition("=") for spec in args.benchmarks)
    return {name: _load_benchmark(name, path if equals else None, args) for name, equals, path in specs}


def _load_benchmark(name: str, path: str | None, args: EvaluationArguments) -> list[Problem]:
    source, problem_column, answer_column = HUB.get(name), None, None
    if path is not None:
        source = Source(path, _local_split(Path(path).expanduser()))
        problem_column = args.problem_column
        answer_column = args.answer_column
    if source is None:
        raise ValueError(f"`benchmarks`: {name!r} is neither {', '.join(HUB)} nor name=path, for a local file.")
    rows = load_math_dataset(
        *source,
        problem_column=problem_column,
        answer_column=answer_column,
        instruction=args.instruction or None,
        system_prompt=args.system_prompt,
    )
    problems: dict[str, Problem] = {}
    for row in rows:
        text = problem_text(row["prompt"], args.instruction)
        problems.setdefault(text, Problem(name, text, row["prompt"], [])).golds.append(row["solution"])
    return list(problems.values())


def problem_text(prompt: Sequence[dict[str, str]], instruction: str = "") -> str:
    """Make the text that identifies a problem: its messages without the system message and the instruction."""
    messages = [message["content"] for message in prompt if message["role"] != "system"]
    messages[-1] = messages[-1].removesuffix(instruction)
    return "\n\n".join(message.strip() for message in messages)


def _local_split(path: Path) -> str:
    has_test = not path.is_dir() or any(path.glob("test*"))
    if not has_test:
        warnings.warn(f"{path} has no test split; its train split is evaluated.", stacklevel=2)
    return "test" if has_test else "train"

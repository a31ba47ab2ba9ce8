"""Problem texts: the instructions that public datasets wrap around them, and repeated problems."""

import os
import warnings
from collections.abc import Iterator

import datasets
import pandas as pd

# The instruction around every problem of DAPO-Math-17k.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
# The instruction after every math problem of Eurus-2-RL-Data.
EURUS_SUFFIX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"


def bare_problem(text: str) -> str:
    """A problem without the instruction that its dataset is known to wrap around it."""
    return text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).removesuffix(EURUS_SUFFIX)


def warn(message: str) -> None:
    """Warn in the first process of a training only: all of them read the same data."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=3)


def report_duplicates(dataset: datasets.Dataset, name: str) -> None:
    """Warn of rows that repeat an earlier problem. All are kept: a dataset may repeat problems on purpose."""
    rows = pd.DataFrame(_hashes(dataset), columns=["problem", "solution"])
    repeats = rows[rows.duplicated("problem")]
    if len(repeats):
        earlier = (rows["problem"] == repeats["problem"].iloc[0]).idxmax()
        contradicting = (rows.groupby("problem")["solution"].transform("first") != rows["solution"]).sum()
        warn(
            f"{len(repeats)} of the {len(rows)} rows of {name} repeat the problem of an earlier row (the first: rows "
            f"{earlier} and {repeats.index[0]}), {contradicting} of them with another gold answer. All are kept."
        )


def report_overlap(train_dataset: datasets.Dataset, eval_dataset: datasets.Dataset) -> int:
    """Count the evaluation problems that are trained on, whatever their case, spaces and known instructions, and warn
    of them. Both datasets come from [`~math_answers.load_math_dataset`]."""
    trained = {problem for problem, _ in _hashes(train_dataset)}
    rows = [index for index, (problem, _) in enumerate(_hashes(eval_dataset)) if problem in trained]
    if rows:
        warn(
            f"{len(rows)} of the {len(eval_dataset)} evaluation problems are in the training data too, the first in "
            f"row {rows[0]}: {eval_dataset[rows[0]]['prompt'][-1]['content'][:200]!r}. They measure memorisation."
        )
    return len(rows)


def _hashes(dataset: datasets.Dataset) -> Iterator[tuple[int, int]]:
    """Hashes of problem and solution of every row: of gigabytes of data they keep a few bytes a row."""
    for batch in dataset.select_columns(["prompt", "solution"]).iter(batch_size=1000):
        for prompt, solution in zip(batch["prompt"], batch["solution"], strict=True):
            yield hash("".join(bare_problem(prompt[-1]["content"]).casefold().split())), hash(solution)

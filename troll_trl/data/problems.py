"""Problem texts: the instructions that public datasets wrap around them, and problems that two datasets share."""

import os
import warnings
from collections.abc import Iterator

import datasets

# The instruction around every problem of DAPO-Math-17k.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
# The instruction after every math problem of Eurus-2-RL-Data.
EURUS_SUFFIX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"


def bare_problem(text: str) -> str:
    """Remove the instruction that a dataset is known to wrap around its problems."""
    return text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).removesuffix(EURUS_SUFFIX)


def warn(message: str) -> None:
    """Warn only in the first process of a training run: all processes read the same data."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=3)


def report_overlap(train_dataset: datasets.Dataset, eval_dataset: datasets.Dataset) -> int:
    """Count the evaluation problems that the training data has, too, ignoring case, spaces and known instructions, and
    warn about them. Both datasets come from [`~troll_trl.data.load_math_dataset`]."""
    trained = set(_hashes(train_dataset))
    rows = [index for index, problem in enumerate(_hashes(eval_dataset)) if problem in trained]
    if rows:
        warn(
            f"{len(rows)} of the {len(eval_dataset)} evaluation problems are in the training data too, the first in "
            f"row {rows[0]}: {eval_dataset[rows[0]]['prompt'][-1]['content'][:200]!r}. They measure memorisation."
        )
    return len(rows)


def _hashes(dataset: datasets.Dataset) -> Iterator[int]:
    """Yield a hash of every problem: a few bytes per row, even of gigabytes of data."""
    for batch in dataset.select_columns(["prompt"]).iter(batch_size=1000):
        for prompt in batch["prompt"]:
            yield hash("".join(bare_problem(prompt[-1]["content"]).casefold().split()))

"""Problem texts: the instructions that public datasets wrap around them, and repeated problems."""

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping

import datasets

# The instruction around every problem of DAPO-Math-17k.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
# And behind every math problem of Eurus-2-RL-Data.
EURUS_SUFFIX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"


def bare_problem(text: str) -> str:
    """A problem without the instruction that its dataset is known to wrap around it."""
    return text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).removesuffix(EURUS_SUFFIX)


def warn(message: str) -> None:
    """Warn in the first process of a training only: all of them read the same data."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=3)


def report_duplicates(dataset: datasets.Dataset, name: str) -> int:
    """Warn of problems that a dataset of [`~troll_trl.data.loading.load_math_dataset`] repeats, and count the rows that
    do. None is dropped: a dataset may repeat problems on purpose."""
    first: dict[bytes, tuple[int, bytes]] = {}
    repeated = contradicting = 0
    example = ""
    for index, row in enumerate(_rows(dataset)):
        key, solution = _problem_key(row["prompt"]), _digest(row["solution"])
        earlier = first.setdefault(key, (index, solution))
        if earlier[0] != index:
            repeated += 1
            contradicting += earlier[1] != solution
            example = example or f"rows {earlier[0]} and {index}"
    if repeated:
        warn(
            f"{repeated} of the {len(dataset)} rows of {name} repeat the problem of an earlier row "
            f"(the first: {example}), {contradicting} of them with another gold answer. All are kept."
        )
    return repeated


def report_overlap(train_dataset: datasets.Dataset, eval_dataset: datasets.Dataset) -> int:
    """Warn of evaluation problems that are trained on, whatever their case, spaces and known instructions, and count
    them. Both datasets come from [`~troll_trl.data.loading.load_math_dataset`]."""
    seen = {_problem_key(row["prompt"]) for row in _rows(eval_dataset)}
    seen &= {_problem_key(row["prompt"]) for row in _rows(train_dataset)}
    rows = [index for index, row in enumerate(_rows(eval_dataset)) if _problem_key(row["prompt"]) in seen]
    if rows:
        warn(
            f"{len(rows)} of the {len(eval_dataset)} evaluation problems are in the training data too, the first in "
            f"row {rows[0]}: {eval_dataset[rows[0]]['prompt'][-1]['content'][:200]!r}. What they measure is memory."
        )
    return len(rows)


def _rows(dataset: datasets.Dataset) -> Iterable[Mapping]:
    for batch in dataset.select_columns(["prompt", "solution"]).iter(batch_size=1000):
        yield from (
            {"prompt": prompt, "solution": solution}
            for prompt, solution in zip(batch["prompt"], batch["solution"], strict=True)
        )


def _problem_key(prompt: list[dict[str, str]]) -> bytes:
    # A digest, so that a dataset of gigabytes costs a few bytes a row
    return _digest("".join(bare_problem(prompt[-1]["content"]).casefold().split()))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()

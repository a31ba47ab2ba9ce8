r"""load_math_dataset: math problems of several public schemas as `prompt` and `solution` columns."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.fingerprint import generate_random_fingerprint

from troll_trl.data.columns import column_value
from troll_trl.data.files import load_rows, naming_bad_lines, shortened
from troll_trl.data.golds import solution_of
from troll_trl.data.problems import warn
from troll_trl.data.prompts import MESSAGES, PromptOptions, prompt_messages


class Schema(NamedTuple):
    """Where a dataset keeps its problems and gold answers. Dotted paths reach into nested columns."""

    problem: str  # text or chat messages
    answer: str
    worked: bool = False  # whether `answer` is always a worked solution, never the bare gold answer


# The first one whose columns are all there counts: an `answer` column is preferred to a worked `solution`.
SCHEMAS = (
    Schema("problem", "gold"),  # samples of an evaluation, whose `answer` is the model's
    Schema("question", "answer"),  # GSM8K
    Schema("prompt", "reward_model.ground_truth"),  # DAPO-Math-17k, Eurus-2-RL-Data
    Schema("problem", "answer"),  # MATH-500, AIME
    Schema("Problem", "Answer"),  # AIME 2024 of another hub account
    Schema("problem", "solution", worked=True),  # MATH, Minerva
    Schema("question", "final_answer"),  # OlympiadBench
    Schema("prompt", "solution"),  # TRL's own datasets
)

# Arguments of every reward function, which no column may be called
_TAKEN = ("prompts", "completions")


def load_math_dataset(
    name_or_path: str | Path,
    split: str = "train",
    config_name: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
    **options: Any,
) -> datasets.Dataset:
    r"""
    Load math problems with their gold answers. The result is for a trainer with
    [`~troll_trl.rewards.math_accuracy_reward`].

    The columns of GSM8K, MATH, MATH-500, AIME, DAPO-Math-17k and Eurus-2-RL-Data are recognised. A gold answer is what
    follows `####`, the last balanced `\boxed{...}`, or the whole text. The function drops rows without a problem or
    without a gold answer (`proof`, `notfound` and `nan` are none), and warns how many.

    Args:
        name_or_path: a `.jsonl`, `.json`, `.csv` or `.parquet` file; a folder, as `datasets.load_dataset` reads it; or
            a dataset on the hub.
        split: the split or a part of it, such as `train[:1000]`. A single file is one split, under any name.
        config_name: configuration on the hub (`main` for `openai/gsm8k`). For a folder, the subfolder.
        problem_column, answer_column: columns of problem (text or chat messages) and gold answer, if they are not
            recognised. A dotted path such as `reward_model.ground_truth` reaches into a nested column.
        instruction: text after every problem. It replaces the instruction in the prompts of DAPO-Math-17k and
            Eurus-2-RL-Data, because two formats would contradict each other.
        system_prompt: system message before every prompt. It replaces the data's; an empty one only removes the data's.
        max_samples: read only this many rows, the first ones that `row_filter` leaves.
        row_filter: `column=value`: use only rows with this text in this column, which may be a dotted path.
        max_prompt_tokens: drop longer prompts, counted by `tokenizer` with its chat template and
            `chat_template_kwargs`, and warn how many. No prompt is truncated.

    Returns:
        A dataset with the columns `prompt`, a list of chat messages, and `solution`, the gold answer as `\boxed{...}`.
        All other columns are kept for reward functions, except `prompts` and `completions`, which TRL's trainers cannot
        pass on.

    Raises:
        OSError: no such file, folder or hub dataset.
        ValueError: a file that cannot be read, with its line; columns that are not there, a prompt that is neither text
            nor chat messages, or no row left.
    """
    name = str(name_or_path)
    prompt_options = PromptOptions(**options)
    dataset, files = load_rows(name, split, config_name)
    with naming_bad_lines(name, files):
        return as_math_problems(dataset, name, prompt_options, problem_column, answer_column)


def as_math_problems(
    dataset: datasets.Dataset | datasets.IterableDataset,
    name: str,
    options: PromptOptions,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> datasets.Dataset:
    """[`load_math_dataset`] for rows that were loaded before; messages call them `name`."""
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"{name} is streamed, but the gold answers of all rows are read before training. Turn streaming off, or "
            "give a column `prompt` and rewards other than `math_accuracy`."
        )
    schema = _find_schema(dataset, problem_column, answer_column, name)
    dataset = options.choose_rows(dataset, name)
    converted = _drop_unusable_rows(_convert(dataset, schema, options), dataset, schema, name)
    return options.drop_long_prompts(converted, name)


def _find_schema(dataset: datasets.Dataset, problem_column: str | None, answer_column: str | None, name: str) -> Schema:
    candidates = [
        Schema(problem_column or known.problem, answer_column or known.answer, known.worked and not answer_column)
        for known in SCHEMAS
    ]
    for schema in candidates:
        if None not in (column_value(dataset.features, column) for column in (schema.problem, schema.answer)):
            return schema
    wanted = " or ".join(dict.fromkeys(f"({schema.problem}, {schema.answer})" for schema in candidates))
    raise ValueError(
        f"{name} has the columns {', '.join(dataset.column_names)}; a problem and its answer are expected in "
        f"{wanted}. Name them with `problem_column` and `answer_column`. (Without `math_accuracy` a column `prompt` is "
        "enough.)"
    )


def _convert(dataset: datasets.Dataset, schema: Schema, options: PromptOptions) -> datasets.Dataset:
    def to_prompt_and_solution(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            prompt = prompt_messages(column_value(row, schema.problem), options)
        except ValueError as error:
            raise ValueError(f"Row {index}: {error}") from None
        return {"prompt": prompt, "solution": solution_of(column_value(row, schema.answer), schema.worked)}

    written = {"prompt": MESSAGES, "solution": datasets.Value("string")}
    replaced = [name for name in dataset.column_names if name in (*written, *_TAKEN)]
    kept = {name: feature for name, feature in dataset.features.items() if name not in replaced}
    return dataset.map(
        to_prompt_and_solution,
        with_indices=True,
        remove_columns=replaced,
        features=datasets.Features(written | kept),
        # The cache does not notice a newer version of this package. Without a given fingerprint, `datasets` makes one
        # of all objects that the function can reach, which takes seconds
        load_from_cache_file=False,
        new_fingerprint=generate_random_fingerprint(),
        desc="Reading problems",
    )


def _drop_unusable_rows(
    converted: datasets.Dataset, source: datasets.Dataset, schema: Schema, name: str
) -> datasets.Dataset:
    usable = [
        bool(prompt and solution)
        for batch in converted.select_columns(["prompt", "solution"]).iter(batch_size=1000)
        for prompt, solution in zip(batch["prompt"], batch["solution"], strict=True)
    ]
    if not usable:
        raise ValueError(f"{name} has no rows.")
    if all(usable):
        return converted
    dropped = [index for index, kept in enumerate(usable) if not kept]
    golds = Counter(shortened(column_value(source[index], schema.answer)) for index in dropped)
    examples = ", ".join(f"{gold} ({count})" for gold, count in golds.most_common(5))
    first = f"row {dropped[0]} with {schema.problem}={shortened(column_value(source[dropped[0]], schema.problem))}"
    message = (
        f"{len(dropped)} of the {len(usable)} rows of {name} lack a problem, or their {schema.answer} is no answer"
    )
    if not any(usable):
        raise ValueError(
            f"{message}: {examples}; first {first}. Name the columns with `problem_column` and `answer_column`."
        )
    warn(f"Dropped rows: {message}: {examples}; first {first}.")
    return converted.select([index for index, kept in enumerate(usable) if kept])

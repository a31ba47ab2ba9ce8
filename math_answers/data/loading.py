r"""load_math_dataset: math problems of several public schemas as `prompt` and `solution` columns."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.fingerprint import generate_random_fingerprint

from math_answers.data.columns import column_value
from math_answers.data.files import load_rows, naming_bad_lines, shortened
from math_answers.data.problems import report_duplicates, warn
from math_answers.data.prompts import MESSAGES, PromptOptions, prompt_messages
from math_answers.rewards.answers import extract_answer, written_out
from math_answers.rewards.verifier import MAX_ANSWER_CHARACTERS, are_readable, normalised_gold
from math_answers.rewards.verifier.choices import LETTERS, options_by_letter
from math_answers.rewards.verifier.notation import normalise
from math_answers.rewards.verifier.quantities import read_quantity


class Schema(NamedTuple):
    """Where a dataset keeps its problems and gold answers. Dotted paths reach into nested columns."""

    problem: str  # text or chat messages
    answer: str
    worked: bool = False  # whether `answer` is always a worked solution, never the bare gold answer


# The first one whose columns are all there counts: an `answer` column is preferred to a worked `solution`.
SCHEMAS = (
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
    Load math problems with their gold answers, ready for a trainer and [`~math_answers.math_accuracy_reward`].

    The columns of GSM8K, MATH, MATH-500, AIME, DAPO-Math-17k and Eurus-2-RL-Data are recognised. A gold answer is what
    follows `####`, the last balanced `\boxed{...}`, or the whole text. The function drops, with a warning, rows without
    a problem or a readable gold answer, and reports repeated problems. Nothing that is downloaded is executed.

    Args:
        name_or_path: a `.jsonl`, `.json` or `.parquet` file; a folder with `{split}` as one of these, or as
            `{split}-*.parquet`; or a dataset on the hub.
        split: or a part of it, such as `train[:1000]`. A single file is one split, under any name.
        config_name: configuration on the hub (`main` for `openai/gsm8k`), or several, joined by commas, which are
            concatenated. For a folder, the subfolder.
        problem_column, answer_column: columns of problem (text or chat messages) and gold answer, if they are not
            recognised. A dotted path such as `reward_model.ground_truth` reaches into a nested column.
        instruction: text after every problem. It replaces the instruction in the prompts of DAPO-Math-17k and
            Eurus-2-RL-Data, because two formats would contradict each other.
        system_prompt: system message before every prompt. It replaces the data's; an empty one only removes the data's.
        max_samples: read only the first rows, this many of those that `row_filter` leaves.
        row_filter: `column=value`: use only rows with this text in this column, which may be a dotted path.
        max_prompt_tokens: drop longer prompts, counted by `tokenizer` with its chat template and
            `chat_template_kwargs`, and warn how many. No prompt is truncated.

    Returns:
        A dataset with the columns `prompt`, a list of chat messages; `solution`, the gold answer as `\boxed{...}`; and
        `options`, if the data list the texts of a multiple choice in it, in order or by letter. All other columns are
        kept for reward functions, except `prompts` and `completions`, which TRL's trainers cannot hand on.

    Raises:
        FileNotFoundError: no such file, folder, split of a folder, or hub dataset.
        ValueError: columns that are not there, a prompt that is neither text nor chat messages, an unreadable file, no
            row left, or a `max_samples` that is not positive.
    """
    name, prompt_options = str(name_or_path), PromptOptions(**options)
    dataset, files = load_rows(name, split, config_name)
    with naming_bad_lines(name, files):
        return as_math_problems(dataset, name, prompt_options, problem_column, answer_column)


def as_math_problems(
    dataset: datasets.Dataset,
    name: str,
    options: PromptOptions,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> datasets.Dataset:
    """[`load_math_dataset`] for rows that were loaded before; messages call them `name`."""
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"{name} is streamed, but gold answers are read before the training, in all rows. Leave streaming out, or "
            "give a column `prompt` and other rewards than `math_accuracy`."
        )
    schema = _find_schema(dataset, problem_column, answer_column, name)
    kind = getattr(column_value(dataset.features, schema.answer), "dtype", "")
    if kind.startswith("timestamp"):
        raise ValueError(
            f"{name}: the column {schema.answer!r} has dates ({kind}), and a gold answer is a text or a number. If the "
            'file has texts such as "2024-01-31", save it as Parquet: in a JSON file `datasets` reads them as dates.'
        )
    dataset = options.choose_rows(dataset, name)
    converted = _convert(dataset, schema, options)
    converted = _drop_unusable_rows(converted, dataset, schema, name)
    converted = options.drop_long_prompts(converted, name)
    report_duplicates(converted, name)
    return converted


def _convert(dataset: datasets.Dataset, schema: Schema, options: PromptOptions) -> datasets.Dataset:
    def to_prompts_and_solutions(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        prompts = []
        for row, index in zip(rows, indices, strict=True):
            try:
                prompts.append(prompt_messages(column_value(row, schema.problem), options))
            except ValueError as error:
                raise ValueError(f"Row {index}: {error}") from None
        converted: dict[str, list[Any]] = {
            "prompt": prompts,
            "solution": _solutions([as_written(column_value(row, schema.answer)) for row in rows], schema.worked),
        }
        if has_options:
            converted["options"] = [
                [texts.get(letter) for letter in LETTERS if letter <= max(texts, default="")] or None
                for texts in map(options_by_letter, batch["options"])
            ]
        return converted

    def as_written(answer: Any) -> Any:
        """An answer without the error in the last digit with which `datasets` reads a column of several types."""
        if isinstance(answer, list):
            return list(map(as_written, answer))
        return float(f"{answer:.15g}") if of_several_types and isinstance(answer, float) else answer

    text = datasets.Value("string")
    of_several_types = "Json" in str(column_value(dataset.features, schema.answer))
    has_options = isinstance(dataset.features.get("options"), (datasets.List, dict))
    written = {"prompt": MESSAGES, "solution": text} | ({"options": datasets.List(text)} if has_options else {})
    replaced = [name for name in dataset.column_names if name in (*written, "options", *_TAKEN)]
    kept = {name: feature for name, feature in dataset.features.items() if name not in replaced}
    return dataset.map(
        to_prompts_and_solutions,
        batched=True,
        with_indices=True,
        remove_columns=replaced,
        features=datasets.Features(written | kept),
        # The cache does not notice a newer version of this package or of math-verify. Without a given fingerprint,
        # `datasets` makes one of all objects that the function can reach, the whole verifier: ten seconds.
        load_from_cache_file=False,
        new_fingerprint=generate_random_fingerprint(),
        desc="Reading problems",
    )


def _find_schema(
    dataset: datasets.Dataset, problem_column: str | None, answer_column: str | None, name: str | Path
) -> Schema:
    candidates = [
        Schema(problem_column or known.problem, answer_column or known.answer, known.worked and not answer_column)
        for known in SCHEMAS
    ]
    for schema in candidates:
        if None not in (column_value(dataset.features, name) for name in (schema.problem, schema.answer)):
            return schema
    wanted = " or ".join(dict.fromkeys(f"({schema.problem}, {schema.answer})" for schema in candidates))
    raise ValueError(
        f"{name} has the columns {', '.join(dataset.column_names)}; a problem and its answer were looked for in "
        f"{wanted}. Name them with `problem_column` and `answer_column`. (Without `math_accuracy` a column `prompt` is "
        "enough.)"
    )


def _solutions(answers: list[Any], worked: bool) -> list[str]:
    """Gold answers in boxes; empty if there is none, or none that can be read."""
    solutions = [_solution(answer, worked) for answer in answers]
    readable = are_readable(normalised_gold(solution) for solution in solutions if solution)  # many at a time
    return [solution if solution and readable[normalised_gold(solution)] else "" for solution in solutions]


def _solution(answer: Any, worked: bool) -> str:
    """Gold answer in a box; empty if there is none."""
    if isinstance(answer, list):  # OlympiadBench has a list, mostly of one
        answer = ", ".join(written_out(item) if isinstance(item, (float, Decimal)) else str(item) for item in answer)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, Decimal)):
        return ""
    if isinstance(answer, (float, Decimal)):  # decimals are Parquet's
        if not math.isfinite(answer):
            return ""
        answer = written_out(answer)
    text = str(answer).strip()
    gold = extract_answer(text)
    if gold is None and not worked and "\n" not in text:
        gold = text.strip("$").strip()
    if not gold:
        return ""
    number = read_quantity(normalise(gold)) if len(gold) <= MAX_ANSWER_CHARACTERS else None
    if number is not None and number.numeral and number.unit in (None, "$^1"):
        gold = number.numeral  # some readers stumble over 1,\!234
    solution = f"\\boxed{{{gold}}}"
    # An unbalanced brace in the gold answer would end the box early, or never.
    return solution if extract_answer(solution) == gold else ""


def _drop_unusable_rows(
    converted: datasets.Dataset, source: datasets.Dataset, schema: Schema, name: str | Path
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
    row = source[usable.index(False)]
    example = (
        f"row {usable.index(False)}, {schema.problem}={shortened(column_value(row, schema.problem))}, "
        f"{schema.answer}={shortened(column_value(row, schema.answer))}"
    )
    if not any(usable):
        raise ValueError(
            f"None of the {len(source)} rows of {name} has a problem and a gold answer that can be read. The "
            f"first one: {example}. Name the right columns with `problem_column` and `answer_column`."
        )
    warn(
        f"Dropped {usable.count(False)} of the {len(source)} rows of {name}: they lack a problem, or a gold answer "
        f"that can be read. The first one: {example}."
    )
    return converted.select([index for index, kept in enumerate(usable) if kept])

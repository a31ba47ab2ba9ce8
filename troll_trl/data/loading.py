r"""load_math_dataset: math problems of several public schemas as `prompt` and `solution` columns."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets

from troll_trl.data.columns import column_value
from troll_trl.data.files import find_bad_line, load_rows, shortened
from troll_trl.data.problems import DAPO_PREFIX, DAPO_SUFFIX, EURUS_SUFFIX, bare_problem, report_duplicates, warn
from troll_trl.rewards.answers import extract_answer
from troll_trl.rewards.verifier import MAX_ANSWER_CHARACTERS, are_readable, normalised_gold
from troll_trl.rewards.verifier.notation import normalise
from troll_trl.rewards.verifier.quantities import read_quantity

__all__ = ["DAPO_PREFIX", "DAPO_SUFFIX", "EURUS_SUFFIX", "Schema", "load_math_dataset"]


@dataclass(frozen=True)
class Schema:
    """
    Where a dataset keeps its problems and gold answers.

    Parameters:
        problem (`str`):
            Column of the problem, text or chat messages. A dotted path reaches into a nested column.
        answer (`str`):
            Column of the gold answer, likewise.
        worked (`bool`, *optional*, defaults to `False`):
            Whether `answer` is always a worked solution that states the gold answer, never the bare gold answer.
    """

    problem: str
    answer: str
    worked: bool = False


# The first one whose columns are all there is used: an `answer` column is preferred to a worked `solution`.
SCHEMAS = (
    Schema("question", "answer"),  # GSM8K
    Schema("prompt", "reward_model.ground_truth"),  # DAPO-Math-17k, Eurus-2-RL-Data
    Schema("problem", "answer"),  # MATH-500, AIME
    Schema("Problem", "Answer"),  # AIME 2024 of another hub account
    Schema("problem", "solution", worked=True),  # MATH, Minerva
    Schema("question", "final_answer"),  # OlympiadBench
    Schema("prompt", "solution"),  # TRL's own datasets
)

# A word that stands outside of a command
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])")

FEATURES = datasets.Features(
    {
        "prompt": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "solution": datasets.Value("string"),
    }
)


def load_math_dataset(
    name_or_path: str | Path,
    split: str = "train",
    config_name: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
    instruction: str | None = None,
    system_prompt: str | None = None,
    max_samples: int | None = None,
    row_filter: str | None = None,
    tokenizer: Any = None,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> datasets.Dataset:
    r"""
    Load math problems with their gold answers, ready for a trainer and [`~troll_trl.rewards.math_accuracy_reward`].

    The columns of GSM8K, MATH, MATH-500, AIME, DAPO-Math-17k and Eurus-2-RL-Data are recognised. A gold answer is taken
    from behind `####`, from the last balanced `\boxed{...}`, or as it is. Rows without a problem, or without a gold
    answer that can be read, are dropped with a warning, and so are prompts above `max_prompt_tokens`; problems that
    stand twice are reported. Rows are read in batches from a memory-mapped file: the size of a dataset is a matter of
    disk, not of memory. Nothing that is downloaded is executed.

    Args:
        name_or_path (`str` or `Path`):
            A `.jsonl`, `.json` or `.parquet` file; a folder that holds `{split}` as one of these, or as
            `{split}-*.parquet`; or the name of a dataset on the hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split of the folder or the hub dataset. A single file is one split, whatever its name.
        config_name (`str`, *optional*):
            Configuration of the hub dataset (`main` for `openai/gsm8k`). Several, joined by commas, are concatenated:
            `EleutherAI/hendrycks_math` has one for each of its seven subjects. For a folder, the subfolder.
        problem_column (`str`, *optional*):
            Column of the problem, text or chat messages, if it is not recognised. A dotted path reaches into a nested
            column.
        answer_column (`str`, *optional*):
            Column of the gold answer (`reward_model.ground_truth`), likewise.
        instruction (`str`, *optional*):
            Text put behind every problem, after an empty line. It takes the place of the instruction that the prompts
            of DAPO-Math-17k ("The last line ... Answer: $Answer") and of Eurus-2-RL-Data ("Present the answer in LaTex
            format") hold, because two formats would contradict each other; without `instruction` those prompts stay as
            they are.
        system_prompt (`str`, *optional*):
            System message in front of every prompt. It takes the place of one that the data holds; an empty one leaves
            out that of the data.
        max_samples (`int`, *optional*):
            Read the first `max_samples` rows only (of those that `row_filter` leaves); rows that are dropped count.
        row_filter (`str`, *optional*):
            `column=value`: use only rows with this text in this column, such as `ability=math` for Eurus-2-RL-Data,
            half of which is code. A dotted path reaches into a nested column.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Counts the tokens of a prompt, chat template included; for `max_prompt_tokens`.
        max_prompt_tokens (`int`, *optional*):
            Drop prompts of more tokens, with a warning that counts them. None is cut.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            Arguments of the chat template, as those of the trainer.

    Returns:
        [`~datasets.Dataset`]:
            Columns `prompt`, a list of chat messages, and `solution`, the gold answer as `\boxed{...}`; `options` too,
            where the data has a column of this name that lists the texts of a multiple choice in order, or by letter.
            All other columns are left out.

    Raises:
        FileNotFoundError: the file, the folder or the hub dataset does not exist, or the folder has no such split.
        ValueError: columns that are not there, a prompt that is neither text nor chat messages, an unreadable file,
            no row left, or a `max_samples` that is not positive. The message lists what was found.
    """
    for argument, value in (("max_samples", max_samples), ("max_prompt_tokens", max_prompt_tokens)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ValueError(f"`{argument}` must be at least 1, got {value}. Leave it out to use all rows.")
    if max_prompt_tokens is not None and tokenizer is None:
        raise ValueError("`max_prompt_tokens` needs a `tokenizer` to count with.")
    dataset, files = load_rows(str(name_or_path), split, config_name)
    schema = _find_schema(dataset, problem_column, answer_column, name_or_path)
    try:
        if row_filter is not None:
            dataset = _filter_rows(dataset, row_filter, name_or_path)
        if max_samples is not None:
            dataset = dataset.select(range(min(max_samples, len(dataset))))
        converted = _convert(dataset, schema, instruction, system_prompt)
        converted = _drop_unusable_rows(converted, dataset, schema, name_or_path)
    except UnicodeDecodeError as error:  # the JSON reader does not look at the bytes of a text
        raise ValueError(f"{name_or_path} is not UTF-8: {find_bad_line(files) or error}") from error
    if max_prompt_tokens is not None:
        converted = _drop_long_prompts(
            converted, tokenizer, max_prompt_tokens, chat_template_kwargs or {}, name_or_path
        )
    report_duplicates(converted, str(name_or_path))
    return converted


def _convert(
    dataset: datasets.Dataset, schema: Schema, instruction: str | None, system_prompt: str | None
) -> datasets.Dataset:
    def to_prompts_and_solutions(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        prompts = []
        for row, index in zip(rows, indices, strict=True):
            try:
                prompts.append(_prompt(column_value(row, schema.problem), instruction, system_prompt))
            except ValueError as error:
                raise ValueError(f"Row {index}: {error}") from None
        converted: dict[str, list[Any]] = {
            "prompt": prompts,
            "solution": _solutions([column_value(row, schema.answer) for row in rows], schema.worked),
        }
        if has_options:
            converted["options"] = [_options(row["options"]) for row in rows]
        return converted

    has_options = isinstance(dataset.features.get("options"), (datasets.List, dict))
    features = datasets.Features(
        FEATURES | ({"options": datasets.List(datasets.Value("string"))} if has_options else {})
    )
    return dataset.map(
        to_prompts_and_solutions,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=features,
        # The cache does not notice a newer version of this package or of math-verify.
        load_from_cache_file=False,
        desc="Reading problems",
    )


def _filter_rows(dataset: datasets.Dataset, row_filter: str, name: str | Path) -> datasets.Dataset:
    column, equals, wanted = (part.strip() for part in row_filter.partition("="))
    if not equals or not column:
        raise ValueError(f"`row_filter` must be column=value, such as ability=math, got {row_filter!r}.")
    if column_value(dataset.features, column) is None:
        raise ValueError(f"`row_filter={row_filter!r}`: {name} has the columns {', '.join(dataset.column_names)}.")
    kept: list[int] = []
    others: set[str] = set()
    for index, row in enumerate(dataset.select_columns([column.partition(".")[0]])):
        value = str(column_value(row, column))
        if value == wanted:
            kept.append(index)
        elif len(others) < 10:
            others.add(value)
    if not kept:
        raise ValueError(f"`row_filter={row_filter!r}` leaves no row of {name}; the column holds {sorted(others)}.")
    return dataset.select(kept)


def _drop_long_prompts(
    dataset: datasets.Dataset, tokenizer: Any, limit: int, template_kwargs: dict[str, Any], name: str | Path
) -> datasets.Dataset:
    kept, longest = [], 0
    for batch in dataset.with_format(None).iter(batch_size=1000):
        texts = tokenizer.apply_chat_template(
            batch["prompt"], tokenize=False, add_generation_prompt=True, **template_kwargs
        )
        lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
        longest = max(longest, *lengths)
        kept += [length <= limit for length in lengths]
    dropped = kept.count(False)
    if dropped == len(kept):
        raise ValueError(f"All {dropped} prompts of {name} have more than `max_prompt_tokens={limit}` tokens.")
    if dropped:
        warn(
            f"Dropped {dropped} of the {len(kept)} prompts of {name}: more than `max_prompt_tokens={limit}` tokens, "
            f"the longest {longest}."
        )
    return dataset.select([index for index, keep in enumerate(kept) if keep]) if dropped else dataset


def _find_schema(
    dataset: datasets.Dataset, problem_column: str | None, answer_column: str | None, name: str | Path
) -> Schema:
    if problem_column is not None and answer_column is not None:
        candidates = [Schema(problem_column, answer_column)]
    else:
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
        f"{wanted}. Name them with `problem_column` and `answer_column`."
    )


def _prompt(problem: Any, instruction: str | None, system_prompt: str | None) -> list[dict[str, str]]:
    """Chat messages of one problem; none for a row without a problem."""
    if problem is None or problem in ("", []):
        return []
    if isinstance(problem, str):
        messages = [{"role": "user", "content": problem}]
    elif isinstance(problem, list) and all(_is_message(message) for message in problem):
        messages = [{"role": message["role"], "content": message["content"]} for message in problem]
    else:
        raise ValueError(
            f"A problem must be text or chat messages ({{'role': ..., 'content': ...}}, both text), got "
            f"{shortened(problem)}. Name its column with `problem_column`."
        )
    if instruction is not None:
        if messages[-1]["role"] != "user":
            raise ValueError(
                f"`instruction` is put behind the last user message, but a prompt ends with the role "
                f"{messages[-1]['role']!r}: {shortened(problem)}. Leave `instruction` out."
            )
        messages[-1]["content"] = f"{bare_problem(messages[-1]['content'])}\n\n{instruction}"
    if system_prompt is not None:
        conversation = messages[1:] if messages[0]["role"] == "system" else messages
        messages = [*([{"role": "system", "content": system_prompt}] if system_prompt else []), *conversation]
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _solutions(answers: list[Any], worked: bool) -> list[str]:
    """Gold answers in boxes; empty where there is none that can be read."""
    solutions = [_solution(answer, worked) for answer in answers]
    readable = are_readable(normalised_gold(solution) for solution in solutions if solution)  # many at a time
    return [solution if solution and readable[normalised_gold(solution)] else "" for solution in solutions]


def _solution(answer: Any, worked: bool) -> str:
    """Gold answer in a box; empty if there is none."""
    if isinstance(answer, list):  # OlympiadBench has a list, mostly of one
        answer = ", ".join(map(str, answer))
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return ""
    if isinstance(answer, float) and not math.isfinite(answer):
        return ""
    # A float is written out: other readers than ours would take the "e" of "1e+16" for Euler's number.
    text = format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer).strip()
    gold = extract_answer(text)
    if gold is None and not worked and "\n" not in text:
        gold = text.strip("$").strip()
    if not gold:
        return ""
    number = read_quantity(normalise(gold)) if len(gold) <= MAX_ANSWER_CHARACTERS else None
    if number is not None and number.numeral and number.unit in (None, "$^1"):
        gold = number.numeral  # for readers that stumble over 1,\!234
    solution = f"\\boxed{{{gold}}}"
    # An unbalanced brace in the gold answer would end the box early, or never.
    return solution if extract_answer(solution) == gold else ""


def _options(options: list | dict | None) -> list[str] | None:
    """The texts of a multiple choice in order; `None` for what is no such list."""
    if isinstance(options, dict):
        options = [options.get(letter) for letter in "ABCDEFGHIJ"[: len(options)]]
    return options if options and all(isinstance(option, str) for option in options) else None


def _why_unusable(row: Mapping, schema: Schema) -> str:
    """What is the matter with a row that is dropped."""
    if column_value(row, schema.problem) in (None, "", []):
        return "no problem"
    answer = column_value(row, schema.answer)
    if answer in (None, "", []):
        return "no gold answer"
    if isinstance(answer, list):
        answer = ", ".join(map(str, answer))
    if isinstance(answer, bool) or not isinstance(answer, str):
        return "a gold answer that is neither text nor a number"
    stated = extract_answer(answer)
    if stated is None and schema.worked:
        return "a solution that states no answer"
    if "\n" in (stated or answer.strip()):
        return "a gold answer of several lines"
    if len(stated or answer) > MAX_ANSWER_CHARACTERS:
        return f"a gold answer of more than {MAX_ANSWER_CHARACTERS} characters"
    prose = len(_PROSE.findall(stated or answer)) > 3
    return "a gold answer in prose" if prose else "a gold answer that is no mathematics"


def _drop_unusable_rows(
    converted: datasets.Dataset, source: datasets.Dataset, schema: Schema, name: str | Path
) -> datasets.Dataset:
    kept: list[int] = []
    dropped: list[int] = []
    for index, (prompt, solution) in enumerate(zip(converted["prompt"], converted["solution"], strict=True)):
        (kept if prompt and solution else dropped).append(index)
    if not dropped and kept:
        return converted
    if not source:
        raise ValueError(f"{name} has no rows.")
    row = source[dropped[0]]
    example = (
        f"row {dropped[0]}, {schema.problem}={shortened(column_value(row, schema.problem))}, "
        f"{schema.answer}={shortened(column_value(row, schema.answer))}"
    )
    if not kept:
        raise ValueError(
            f"None of the {len(source)} rows of {name} has a problem and a gold answer that can be read. The "
            f"first one: {example}. Name the right columns with `problem_column` and `answer_column`."
        )
    causes = Counter(_why_unusable(source[index], schema) for index in dropped).most_common()
    warn(
        f"Dropped {len(dropped)} of the {len(source)} rows of {name}: "
        f"{', '.join(f'{cause} ({count})' for cause, count in causes)}. The first one: {example}."
    )
    return converted.select(kept)

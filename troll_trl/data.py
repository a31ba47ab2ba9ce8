r"""load_math_dataset: math problems of several public schemas as `prompt` and `solution` columns."""

import glob
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from troll_trl.rewards import extract_answer, is_parsable, plain_number

# Builder of `datasets` for each kind of local file.
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

# The instruction around every problem of DAPO-Math-17k.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


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
    Schema("prompt", "reward_model.ground_truth"),  # DAPO-Math-17k
    Schema("problem", "answer"),  # MATH-500, AIME
    Schema("Problem", "Answer"),  # AIME 2024 of another hub account
    Schema("problem", "solution", worked=True),  # MATH, Minerva
    Schema("question", "final_answer"),  # OlympiadBench
)

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
) -> datasets.Dataset:
    r"""
    Load math problems with their gold answers, ready for a trainer and [`~troll_trl.rewards.math_accuracy_reward`].

    The columns of GSM8K, MATH, MATH-500, AIME and DAPO-Math-17k are recognised. A gold answer is taken from behind
    `####`, from the last balanced `\boxed{...}`, or as it is. Rows without a problem, or without a gold answer that
    math-verify can parse, are dropped with a warning.

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
            Text put behind every problem, after an empty line. It takes the place of the instruction ("The last line
            ... Answer: $Answer") that the prompts of DAPO-Math-17k hold, because two formats would contradict each
            other; without `instruction` those prompts stay as they are.
        system_prompt (`str`, *optional*):
            System message in front of every prompt. It takes the place of one that the data holds.
        max_samples (`int`, *optional*):
            Read the first `max_samples` rows only; rows that are dropped count.

    Returns:
        [`~datasets.Dataset`]:
            Columns `prompt`, a list of chat messages, and `solution`, the gold answer as `\boxed{...}`. All other
            columns are left out.

    Raises:
        FileNotFoundError: the file, the folder or the hub dataset does not exist, or the folder has no such split.
        ValueError: columns that are not there, a prompt that is neither text nor chat messages, an unreadable file,
            no row left, or a `max_samples` that is not positive. The message lists what was found.
    """
    if max_samples is not None and (isinstance(max_samples, bool) or max_samples < 1):
        raise ValueError(f"`max_samples` must be at least 1, got {max_samples}. Leave it out to use all rows.")
    dataset = _load(str(name_or_path), split, config_name)
    schema = _find_schema(dataset, problem_column, answer_column, name_or_path)
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))

    def to_prompt_and_solution(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt": _prompt(_value(row, schema.problem), instruction, system_prompt),
            "solution": _solution(_value(row, schema.answer), schema.worked),
        }

    converted = dataset.map(
        to_prompt_and_solution,
        remove_columns=dataset.column_names,
        features=FEATURES,
        # The cache does not notice a newer version of this package or of math-verify.
        load_from_cache_file=False,
        desc="Reading problems",
    )
    return _drop_unusable_rows(converted, dataset, schema, name_or_path)


def _load(name: str, split: str, config_name: str | None) -> datasets.Dataset:
    path = Path(name).expanduser()
    if path.is_file():
        if config_name is not None:
            raise ValueError(f"`config_name={config_name!r}` does not apply to the single file {path}. Leave it out.")
        return _load_files([path])
    if path.is_dir():
        return _load_files(_files_of_split(path, split, config_name))
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in FILE_BUILDERS:
        raise FileNotFoundError(f"No such file or folder: {path} (working folder: {Path.cwd()}).")
    config_names = [None] if config_name is None else [part.strip() for part in config_name.split(",")]
    try:
        parts = [datasets.load_dataset(name, config, split=split) for config in config_names]
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{name!r} is no local file or folder (working folder: {Path.cwd()}), and the hub did not give it: {error}"
        ) from error
    return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def _files_of_split(folder: Path, split: str, config_name: str | None) -> list[Path]:
    if config_name is not None:
        folder = folder / config_name
        if not folder.is_dir():
            raise FileNotFoundError(
                f"`config_name={config_name!r}` names a subfolder of a local folder, and {folder} does not exist; "
                f"{folder.parent} holds {_names(folder.parent)}. Leave `config_name` out if the files are there."
            )
    found = [path for suffix in FILE_BUILDERS if (path := folder / f"{split}{suffix}").is_file()]
    shards = sorted(folder.glob(f"{glob.escape(split)}-*.parquet"))
    if len(found) + bool(shards) > 1:
        raise ValueError(
            f"{folder} holds split {split!r} more than once: {', '.join(path.name for path in found + shards)}. Give "
            "the path of one file."
        )
    if not found and not shards:
        raise FileNotFoundError(
            f"No split {split!r} in {folder}: looked for {split}.jsonl, {split}.json, {split}.parquet and "
            f"{split}-*.parquet, found {_names(folder)}."
        )
    return found or shards


def _names(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def _load_files(files: list[Path]) -> datasets.Dataset:
    builder = FILE_BUILDERS.get(files[0].suffix)
    if builder is None:
        raise ValueError(f"Cannot read {files[0]}: its name must end in one of {', '.join(FILE_BUILDERS)}.")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty.")
    # A builder takes patterns, not paths, and its own name for the split of its files is "train".
    patterns = [glob.escape(str(file)) for file in files]
    try:
        return datasets.load_dataset(builder, data_files=patterns, split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"Cannot read {', '.join(map(str, files))}: {error.__cause__ or error}") from error


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
        if _has(dataset.features, schema.problem) and _has(dataset.features, schema.answer):
            return schema
    wanted = " or ".join(dict.fromkeys(f"({schema.problem}, {schema.answer})" for schema in candidates))
    raise ValueError(
        f"{name} has the columns {', '.join(dataset.column_names)}; a problem and its answer were looked for in "
        f"{wanted}. Name them with `problem_column` and `answer_column`."
    )


def _has(columns: Any, path: str) -> bool:
    if not isinstance(columns, Mapping):
        return False
    if path in columns:
        return True
    head, dot, rest = path.partition(".")
    return bool(dot) and _has(columns.get(head), rest)


def _value(row: Any, path: str) -> Any:
    if row is None or path in row:
        return row and row[path]
    head, _, rest = path.partition(".")
    return _value(row[head], rest)


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
            f"{_shortened(problem)}. Name its column with `problem_column`."
        )
    if instruction is not None:
        if messages[-1]["role"] != "user":
            raise ValueError(
                f"`instruction` is put behind the last user message, but a prompt ends with the role "
                f"{messages[-1]['role']!r}: {_shortened(problem)}. Leave `instruction` out."
            )
        text = messages[-1]["content"].removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
        messages[-1]["content"] = f"{text}\n\n{instruction}"
    if system_prompt is not None:
        conversation = messages[1:] if messages[0]["role"] == "system" else messages
        messages = [{"role": "system", "content": system_prompt}, *conversation]
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _solution(answer: Any, worked: bool) -> str:
    """Gold answer in a box; empty if there is none that math-verify can parse."""
    if isinstance(answer, list):  # OlympiadBench has a list, mostly of one
        answer = ", ".join(map(str, answer))
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return ""
    if isinstance(answer, float) and not math.isfinite(answer):
        return ""
    # A float is written out: math-verify would read the "e" of "1e+16" as Euler's number.
    text = format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer).strip()
    gold = extract_answer(text)
    if gold is None and not worked and "\n" not in text:
        gold = text.strip("$")
    if gold is None or not is_parsable(gold):
        return ""
    gold = plain_number(gold) or gold
    solution = f"\\boxed{{{gold}}}"
    # An unbalanced brace in the gold answer would end the box early, or never.
    return solution if extract_answer(solution) == gold else ""


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
        f"row {dropped[0]}, {schema.problem}={_shortened(_value(row, schema.problem))}, "
        f"{schema.answer}={_shortened(_value(row, schema.answer))}"
    )
    if not kept:
        raise ValueError(
            f"None of the {len(source)} rows of {name} has a problem and a gold answer that math-verify can parse. The "
            f"first one: {example}. Name the right columns with `problem_column` and `answer_column`."
        )
    warnings.warn(
        f"Dropped {len(dropped)} of the {len(source)} rows of {name}: no problem, or no gold answer that math-verify "
        f"can parse. The first one: {example}.",
        stacklevel=3,
    )
    return converted.select(kept)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

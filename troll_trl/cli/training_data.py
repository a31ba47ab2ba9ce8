"""Loads the training and evaluation data of a run: problems with gold answers, or other data that TRL trains on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer, set_seed
from trl import GRPOConfig, ModelConfig, RLOOConfig, get_dataset

from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.cli.reward_functions import is_math_accuracy
from troll_trl.data.columns import column_value
from troll_trl.data.files import FILE_BUILDERS, load_rows, naming_bad_lines
from troll_trl.data.loading import as_math_problems
from troll_trl.data.problems import report_overlap
from troll_trl.data.prompts import MESSAGES, PromptOptions, prepare_prompts


def load_datasets(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> tuple[Any, Any]:
    """
    Load the training set, and the evaluation set or `None`.

    Rows become problems with gold answers in three cases: `math_accuracy` is a reward; `answer_column` is set; or the
    data has no column `prompt` and `problem_column` names no other column. Raises a `FileNotFoundError` if there is no
    such file, folder or hub dataset, and a `ValueError` for data that cannot be trained on, or for incompatible
    settings.
    """
    columns = {"problem_column": script_args.problem_column, "answer_column": script_args.answer_column}
    math = bool(any(map(is_math_accuracy, script_args.reward_funcs)) or script_args.answer_column)
    mixture: Any = _mixture(script_args, training_args.seed) if script_args.mixture.datasets else None

    def load(name: str | None, split: str, config: str | None, columns: dict[str, Any], options: PromptOptions) -> Any:
        if name is not None:
            _check_config(name, config)
            rows, files = load_rows(name, split, config, script_args.dataset_streaming)
        elif split in mixture:
            name = "the mixture of `datasets`"
            rows = mixture[split]
            files = []
        else:
            raise ValueError(f"The mixture of `datasets` has no split {split!r}; it has {', '.join(mixture)}.")
        with naming_bad_lines(name, files):
            found: Mapping[str, Any] = rows.features or next(iter(rows), {})
            if name == script_args.eval_dataset_name:  # it may have other columns
                columns = {
                    key: column for key, column in columns.items() if column_value(found, column or "") is not None
                }
            prompt_column = columns.get("problem_column") or "prompt"
            if math or (prompt_column == "prompt" and "prompt" not in found):
                return as_math_problems(rows, name, options, **columns)
            if column_value(found, prompt_column) is None:
                raise ValueError(f"`problem_column`: {name} has no {prompt_column!r}; it has {', '.join(found)}.")
            return prepare_prompts(rows, name, options, prompt_column)

    name = None if mixture is not None else str(script_args.dataset_name)  # the parser requires it
    split, config = script_args.dataset_train_split, script_args.dataset_config or None  # a flag unsets it by ""
    _check_split("dataset_train_split", name, split)
    options = _prompt_options(script_args, training_args, model_args)
    train_dataset = load(name, split, config, columns, options)
    if training_args.eval_strategy == "no":
        return train_dataset, None
    options = replace(options, max_samples=script_args.max_eval_samples)
    same = script_args.eval_dataset_name in (None, name)
    config = script_args.eval_dataset_config or (config if same else None)
    if script_args.eval_dataset_name is not None:
        name = script_args.eval_dataset_name
        options = replace(options, row_filter=None)
    elif script_args.dataset_test_split is None and Path(str(name)).suffix in FILE_BUILDERS:
        raise ValueError(
            f"`eval_strategy` is set, but {name} has no split to evaluate on. Set `dataset_test_split`, such as "
            "`train[90%:]`, or `eval_dataset_name`."
        )
    else:
        _check_split("dataset_test_split", name, script_args.dataset_test_split)
    eval_dataset = load(name, script_args.dataset_test_split or "test", config, columns, options)
    if _are_problems(train_dataset) and _are_problems(eval_dataset):
        report_overlap(train_dataset, eval_dataset)
    return train_dataset, eval_dataset


def _check_split(option: str, name: str | None, split: str | None) -> None:
    """Refuse a split that a single file lacks: [`load_rows`] would read the whole file under any split name."""
    if name is not None and split and Path(name).expanduser().is_file() and split.partition("[")[0] != "train":
        raise ValueError(
            f"`{option}` is {split!r}, but the single file {name} has only the split `train`. Set the option to "
            "`train`, or to a part of it, such as `train[90%:]`."
        )


def _check_config(name: str, config: str | None) -> None:
    """Refuse a configuration that a local folder lacks, such as the `main` of a config for GSM8K on the hub."""
    folder = Path(name).expanduser()
    if config and folder.is_dir() and not (folder / config).is_dir():
        raise ValueError(
            f"`dataset_config` is {config!r}, but the folder {name} has no such subfolder. Set `dataset_config: null` "
            "in a file, or `--dataset_config ''`."
        )


def _mixture(script_args: TrollScriptArguments, seed: int) -> Any:
    """Load the splits of the mixture under `datasets`."""
    # TRL draws the test split from numpy's state, which must be the same in all processes, and in a resumed run
    set_seed(seed)
    return get_dataset(script_args.mixture)


def _are_problems(dataset: Any) -> bool:
    """Return whether [`as_math_problems`] has made the rows."""
    features = dataset.features or {}
    return isinstance(dataset, datasets.Dataset) and features.get("prompt") == MESSAGES and "solution" in features


def _prompt_options(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> PromptOptions:
    """Collect the options of the training set's prompts."""
    tokenizer = None
    if script_args.max_prompt_tokens is not None:
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
    same = ("instruction", "system_prompt", "row_filter", "max_prompt_tokens")
    return PromptOptions(
        **{name: getattr(script_args, name) for name in same},
        max_samples=script_args.max_train_samples,
        tokenizer=tokenizer,
        chat_template_kwargs=training_args.chat_template_kwargs,
    )

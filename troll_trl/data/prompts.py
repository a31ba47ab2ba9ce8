"""Rows of any kind, whole or streamed: which ones are used, and what is added to their prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets

from troll_trl.data.columns import column_value
from troll_trl.data.files import shortened
from troll_trl.data.problems import bare_problem, warn

MESSAGES = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
_BY_PROMPT: Any = {"batched": True, "batch_size": 100, "input_columns": ["prompt"]}  # a stream reads this far ahead


@dataclass(frozen=True)
class PromptOptions:
    """The options of [`~troll_trl.data.load_math_dataset`] that apply to prompts of any kind."""

    instruction: str | None = None
    system_prompt: str | None = None
    max_samples: int | None = None
    row_filter: str | None = None
    tokenizer: Any = None
    max_prompt_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        for name in ("max_samples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it out to use all rows.")
        if self.max_prompt_tokens is not None and self.tokenizer is None:
            raise ValueError("`max_prompt_tokens` needs a `tokenizer` to count with.")

    def choose_rows(self, dataset: Any, name: str) -> Any:
        """Take the first `max_samples` rows of those that `row_filter` leaves."""
        if self.row_filter is not None:
            dataset = _filter_rows(dataset, self.row_filter, name)
        if self.max_samples is None:
            return dataset
        whole = isinstance(dataset, datasets.Dataset)
        return dataset.take(min(self.max_samples, len(dataset)) if whole else self.max_samples)

    def drop_long_prompts(self, dataset: Any, name: str) -> Any:
        """Keep the rows whose prompts have at most `max_prompt_tokens` tokens, chat template included."""
        limit = self.max_prompt_tokens
        if limit is None:
            return dataset
        kept = dataset.filter(lambda prompts: [n <= limit for n in self._lengths(prompts)], **_BY_PROMPT)
        if isinstance(dataset, datasets.IterableDataset) or len(kept) == len(dataset):
            return kept
        if not len(kept):
            raise ValueError(f"All {len(dataset)} prompts of {name} have more than `max_prompt_tokens={limit}` tokens.")
        warn(
            f"Dropped {len(dataset) - len(kept)} of the {len(dataset)} prompts of {name}, which have more than "
            f"`max_prompt_tokens={limit}` tokens."
        )
        return kept

    def _lengths(self, prompts: list) -> list[int]:
        if not any(isinstance(prompt, str) for prompt in prompts):
            template = {"tokenize": False, "add_generation_prompt": True, **(self.chat_template_kwargs or {})}
            chats = [prompt or [{"role": "user", "content": ""}] for prompt in prompts]  # the trainer names empty rows
            prompts = self.tokenizer.apply_chat_template(chats, **template)
            encoded = self.tokenizer(prompts, add_special_tokens=False)
        else:
            encoded = self.tokenizer([prompt or "" for prompt in prompts])
        return [len(ids) for ids in encoded.input_ids]


def prepare_prompts(
    dataset: datasets.Dataset | datasets.IterableDataset,
    name: str,
    options: PromptOptions,
    prompt_column: str = "prompt",
) -> datasets.Dataset | datasets.IterableDataset:
    """
    Give rows a column `prompt` for a TRL trainer, and keep their other columns.

    An instruction, a system prompt or a `prompt_column` of another name turns plain text into a chat message. Raises a
    `ValueError` for a prompt of the wrong kind, or if no row is left; the rows of a stream are not counted.
    """
    dataset = options.choose_rows(dataset, name)
    if options.instruction is not None or options.system_prompt is not None or prompt_column != "prompt":
        features = dataset.features and datasets.Features(dataset.features | {"prompt": MESSAGES})

        def to_messages(row: dict[str, Any]) -> dict[str, list]:
            return {"prompt": prompt_messages(column_value(row, prompt_column), options)}

        dataset = dataset.map(to_messages, features=features)
    return options.drop_long_prompts(dataset, name)


def _filter_rows(dataset: Any, row_filter: str, name: str) -> Any:
    column, equals, wanted = (part.strip() for part in row_filter.partition("="))
    if not equals or not column:
        raise ValueError(f"`row_filter` must be column=value, such as ability=math, got {row_filter!r}.")
    kept = dataset.filter(lambda row: str(column_value(row, column)) == wanted)
    if isinstance(kept, datasets.Dataset) and not len(kept):
        raise ValueError(f"`row_filter={row_filter!r}` leaves no row of {name}. The first row is {dataset[:1]}.")
    return kept


def prompt_messages(problem: Any, options: PromptOptions) -> list[dict[str, str]]:
    """Make chat messages of one problem; none for a row without a problem."""
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
    if options.instruction is not None:
        if messages[-1]["role"] != "user":
            raise ValueError(
                f"`instruction` follows the last user message, but a prompt ends with the role "
                f"{messages[-1]['role']!r}: {shortened(problem)}. Leave `instruction` out."
            )
        messages[-1]["content"] = f"{bare_problem(messages[-1]['content'])}\n\n{options.instruction}"
    if options.system_prompt is not None:
        conversation = messages[1:] if messages[0]["role"] == "system" else messages
        system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
        messages = [*system, *conversation]
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))

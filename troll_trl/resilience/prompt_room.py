"""PromptRoom: names the first row of the data whose prompt is empty, or leaves no room for a completion."""

from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset

from troll_trl.context_length import context_length


def check_prompts(trainer: Any, length_of: Callable[[Any], int]) -> "PromptRoom | None":
    """Check the datasets of a trainer; `length_of` counts the tokens of a prompt. Returns `None` if the model does not
    read the text of the column `prompt`. A `ValueError` names the row whose prompt is empty or too long."""
    makers = (getattr(trainer, name, None) for name in ("environment_factories", "rollout_func"))
    if trainer._is_vlm or any(maker is not None for maker in makers):
        return None
    colocated = trainer.use_vllm and trainer.vllm_mode == "colocate"
    context = context_length(trainer.accelerator.unwrap_model(trainer.model).config)
    vllm_length = trainer.args.vllm_max_model_length if colocated else None
    room = PromptRoom(context, vllm_length, trainer.max_completion_length)
    evaluation = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    for name, dataset in {"train": trainer.train_dataset, **evaluation}.items():
        if isinstance(dataset, Dataset) and "prompt" in dataset.column_names:  # else the rollouts are checked
            room.check_dataset(name, dataset, length_of)
    return room


class PromptRoom:
    """
    Checks prompts: datasets that can be indexed at a trainer's construction, streamed ones a rollout batch at a time.
    `context` and `vllm_length`, of the model and of a colocated engine, are in tokens and may be unknown. Without a
    `max_completion_length`, a prompt must leave room for one token.
    """

    def __init__(self, context: int | None, vllm_length: int | None, max_completion_length: int | None):
        self.context = min(filter(None, (context, vllm_length)), default=None)
        of_vllm = self.context is not None and self.context == vllm_length
        self._limit = "`vllm_max_model_length` {:,}" if of_vllm else "the model's context of {:,}"
        self._completion = max_completion_length or 1

    def check_dataset(self, name: str, dataset: Dataset, length_of: Callable[[Any], int]) -> None:
        """Check the column `prompt` of a dataset."""
        sizes = [sum(len(text.encode()) for text in _texts(prompt)) for prompt in dataset["prompt"]]  # bytes
        if 0 in sizes:
            row = sizes.index(0)
            raise ValueError(
                f"Row {row} of the {name} dataset has an empty prompt: {dataset[row]['prompt']!r}. Remove the row, or "
                "look at how its prompt is built."
            )
        if self.context is None or not sizes:
            return
        # A token is at least one byte of text, and the first row shows what the chat template adds. Few rows, mostly
        # none, can be too long, and only these are tokenized.
        template = length_of(dataset[0]["prompt"])
        room = self.context - self._completion
        for row in [row for row, size in enumerate(sizes) if size + template > room]:
            self.check_length(length_of(dataset[row]["prompt"]), f"row {row} of {name}")

    def check_length(self, length: int, row: str) -> None:
        """Raise a `ValueError` if a prompt of `length` tokens leaves too little room for its completion."""
        if self.context is None or length + self._completion <= self.context:
            return
        limit = self._limit.format(self.context)
        if length >= self.context:
            raise ValueError(
                f"The prompt of {row} has {length:,} tokens, which leaves no room for a completion in {limit}. Remove "
                "or shorten it."
            )
        raise ValueError(
            f"The prompt of {row} has {length:,} tokens; with `max_completion_length` {self._completion:,} that "
            f"exceeds {limit}. Set `max_completion_length` to at most {self.context - length:,}, or remove the row."
        )


def _texts(prompt: Any) -> Iterable[str]:
    """The texts of a prompt: text itself, or a list of messages whose content is text or a list of blocks."""
    if isinstance(prompt, str):
        yield prompt.strip()
        return
    for message in prompt or ():
        content = message.get("content")
        blocks = [{"text": content}] if isinstance(content, str) else content or ()
        yield from (block["text"].strip() for block in blocks if block.get("text"))

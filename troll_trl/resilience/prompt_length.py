"""check_prompts(): names the first row of the data whose prompt is empty, or leaves no room for a completion.

Rows are counted from 0 after those that the loading has dropped; the beginning of a prompt finds it in its file.
"""

from collections.abc import Iterable
from typing import Any

from datasets import Dataset
from transformers import ProcessorMixin

from math_answers.context_length import context_length


def check_prompts(trainer: Any) -> None:
    """Raise a `ValueError` that names the first row of a trainer's datasets whose prompt is empty, or leaves less than
    `max_completion_length` (or one token) of the model's context. Streamed data is not checked, nor are prompts that
    a processor reads together with images."""
    args = trainer.args
    if isinstance(trainer.processing_class, ProcessorMixin):
        return
    colocated = args.use_vllm and args.vllm_mode == "colocate"
    context = context_length(trainer.accelerator.unwrap_model(trainer.model).config)
    limit = min(filter(None, (context, args.vllm_max_model_length if colocated else None)), default=None)
    completion = args.max_completion_length or 1
    evaluation = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    for name, dataset in {"train": trainer.train_dataset, **evaluation}.items():
        if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
            continue
        if dataset.info.dataset_name:  # a name on the hub, or what `math_answers.data` has read
            name += f" ({dataset.info.dataset_name})"
        sizes = []  # of each prompt, the bytes of each text
        for row, prompt in enumerate(dataset["prompt"]):
            if not isinstance(prompt, str | list | None):
                raise ValueError(
                    f"The prompt of row {row} of {name} is {prompt!r}. It must be a text or a list of messages."
                )
            sizes.append([len(text.encode()) for text in _texts(prompt)])
        lengths = list(map(sum, sizes))
        if 0 in lengths:
            raise ValueError(f"The prompt of row {lengths.index(0)} of {name} is empty. Remove the row.")
        if limit is None or not lengths:
            continue
        # A token is at least one byte of text, and the first row shows what the chat template adds to a message. Few
        # rows, mostly none, can be too long, and only these are tokenized.
        longest = limit - completion
        template = _tokens(trainer, dataset[0]["prompt"]) / len(sizes[0])
        bounds = [n + template * max(len(size), len(sizes[0])) for n, size in zip(lengths, sizes, strict=True)]
        for row in [row for row, bound in enumerate(bounds) if bound > longest]:
            if (tokens := _tokens(trainer, prompt := dataset[row]["prompt"])) > longest:
                drop = f", or drop long prompts with `--max_prompt_tokens {longest}`" if longest > template else ""
                raise ValueError(
                    f"The prompt of row {row} of {name} has {tokens:,} tokens; with `max_completion_length` "
                    f"{completion:,} that exceeds the context of {limit:,} (the model's, or `vllm_max_model_length`). "
                    f"Lower `max_completion_length`{drop}. It begins with {' '.join(_texts(prompt))[:80]!r}."
                )


def _tokens(trainer: Any, prompt: Any) -> int:
    return len(trainer._tokenize_prompts([prompt])[0][0])


def _texts(prompt: Any) -> Iterable[str]:
    """The texts of a prompt: text itself, or a list of messages whose content is text or a list of blocks."""
    if isinstance(prompt, str):
        yield prompt.strip()
        return
    for message in prompt or ():
        content = message.get("content") or ""  # the template adds to a message without a text, too
        blocks = [{"text": content}] if isinstance(content, str) else content
        yield from ((block.get("text") or "").strip() for block in blocks)

"""What a user may get wrong, checked before the first update: option ranges, empty prompts, prompts without room."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

from datasets import Dataset

if TYPE_CHECKING:  # what stands behind the mixin
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

_RANGES = {
    "positive and finite": (
        lambda x: 0 < x < math.inf,
        ("temperature", "repetition_penalty", "num_train_epochs", "adam_epsilon"),
    ),
    "positive": (lambda x: x > 0, ("vllm_importance_sampling_clip_max",)),  # inf means no clip
    "at least 0 and finite": (
        lambda x: 0 <= x < math.inf,
        (
            *("learning_rate", "weight_decay", "warmup_steps", "beta", "entropy_coef_delta"),
            *("vllm_importance_sampling_clip_min", "logging_steps", "save_steps"),
        ),
    ),
    # inf means no clip
    "at least 0": (lambda x: x >= 0, ("epsilon", "epsilon_high", "max_grad_norm", "off_policy_mask_threshold")),
    "-1, to vLLM all tokens, or a whole number of at least 0": (lambda x: x >= -1 and x == int(x), ("top_k",)),
    "in [0, 1)": (lambda x: 0 <= x < 1, ("adam_beta1", "adam_beta2")),
    "in (0, 1]": (lambda x: 0 < x <= 1, ("top_p",)),
    "in [0, 1]": (lambda x: 0 <= x <= 1, ("min_p", "top_entropy_quantile", "ref_model_mixup_alpha")),
    "finite": (math.isfinite, ("entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_target")),
    "a whole number of at least 1": (
        lambda x: x >= 1 and x == int(x),
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("steps_per_generation", "generation_batch_size", "num_iterations", "max_completion_length"),
            *("num_generations_eval", "ref_model_sync_steps", "max_skipped_updates"),
            *("max_prompt_tokens", "max_train_samples", "max_eval_samples"),
        ),
    ),
    "a whole number of at least 2": (lambda x: x >= 2 and x == int(x), ("num_generations",)),  # a group is compared
    "-1 (train for `num_train_epochs`) or a whole number of at least 1": (
        lambda x: x == -1 or (x >= 1 and x == int(x)),
        ("max_steps",),
    ),
}


def check_ranges(config: Any) -> None:
    """
    Check the numbers of a configuration, those included that TRL takes as they come and fails on late, or never.

    Args:
        config ([`~trl.GRPOConfig`], [`~trl.RLOOConfig`] or the arguments of a run):
            The configuration. Options that it does not have, or that are `None`, are not looked at.

    Raises:
        ValueError: an option outside of its range, with the value and the range.
    """
    for allowed, (inside, names) in _RANGES.items():
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not (is_number(value) and inside(value)):
                raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    for number, weight in enumerate(getattr(config, "reward_weights", None) or ()):
        if not (is_number(weight) and math.isfinite(weight)):
            raise ValueError(f"`reward_weights` must be finite numbers, got {weight!r} for reward function {number}.")


def context_length(config: Any) -> int | None:
    """
    Tokens that a model was made for, prompt and completion together.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Of the model.

    Returns:
        `int` or `None`: `None` if the config does not say. Scaled positions (YaRN and others) may reach further than
        its `max_position_embeddings`.
    """
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return max(context, int(original * factor)) if context and original and factor else context


def is_number(value: Any) -> bool:
    """Whether an option is a number, which NaN and booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


class InputChecksMixin(_Trainer):
    """
    Stands before a TRL trainer in the list of bases, and names the first row of its data that cannot be trained on.

    Datasets that can be indexed are checked at construction: prompts without text, and prompts that with
    `max_completion_length` exceed the model's context. Streamed ones are checked a rollout batch at a time, in
    `_tokenize_prompts`, which is overridden. Prompts with images, of an environment or of a `rollout_func` are not what
    stands in the data, and not checked.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._makes_prompts():
            return
        evaluation = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evaluation}.items():
            if isinstance(dataset, Dataset) and "prompt" in dataset.column_names:
                self._check_prompts(name, dataset)

    def _check_prompts(self, name: str, dataset: Dataset):
        sizes = []  # bytes
        for row, prompt in enumerate(dataset["prompt"]):
            sizes.append(sum(len(text.encode()) for text in _texts(prompt)))
            if sizes[-1] == 0:
                raise ValueError(
                    f"Row {row} of the {name} dataset has an empty prompt: {prompt!r}. Remove the row, or look at how "
                    "its prompt is built."
                )
        context, tokenize = self._context_length(), super()._tokenize_prompts
        if context is None or not sizes:
            return
        # A token is at least one byte of text; what the chat template adds, the first row shows. So few rows, mostly
        # none, can be too long, and only those are tokenized.
        length_of = lambda row: len(tokenize([dataset[row]["prompt"]])[0][0])
        template = length_of(0)
        room = context - (self.max_completion_length or 1)
        for row in [row for row, size in enumerate(sizes) if size + template > room]:
            self._check_length(length_of(row), context, f"row {row} of {name}")

    def _tokenize_prompts(self, prompts: list):
        tokenized = super()._tokenize_prompts(prompts)
        if (context := self._context_length()) is not None:
            where = f"of the rollout batch on rank {self.accelerator.process_index}"
            for row, ids in enumerate(tokenized[0]):
                self._check_length(len(ids), context, f"row {row} {where}")
        return tokenized

    def _context_length(self) -> int | None:
        if self._makes_prompts():
            return None
        context = context_length(self.accelerator.unwrap_model(self.model).config)
        return min(filter(None, (context, self._length_of_vllm())), default=None)

    def _length_of_vllm(self) -> int | None:
        return self.args.vllm_max_model_length if self.use_vllm and self.vllm_mode == "colocate" else None

    def _makes_prompts(self) -> bool:
        """Whether what the model reads is not the text of the column `prompt`."""
        made_by = (getattr(self, name, None) for name in ("environment_factories", "rollout_func"))
        return self._is_vlm or any(maker is not None for maker in made_by)

    def _check_length(self, length: int, context: int, row: str):
        completion = self.max_completion_length or 1  # without a limit, at least one token
        if length + completion <= context:
            return
        of_vllm = context == self._length_of_vllm()
        limit = f"`vllm_max_model_length` {context:,}" if of_vllm else f"the model's context of {context:,}"
        if length >= context:
            raise ValueError(
                f"The prompt of {row} has {length:,} tokens, which leaves no room for a completion in {limit}. Remove "
                "or shorten it."
            )
        raise ValueError(
            f"The prompt of {row} has {length:,} tokens; with `max_completion_length` {completion:,} that exceeds "
            f"{limit}. Set `max_completion_length` to at most {context - length:,}, or remove the row."
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

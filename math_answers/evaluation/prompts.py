"""From chat messages to the tokens of a prompt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from math_answers.models import adapter_settings, base_of

# A folder without any of these has no tokenizer; transformers may then make up an empty one
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model", "*.tiktoken")


def load_tokenizer(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. A LoRA adapter may have its own; otherwise it is the base model's."""
    folder = Path(model)
    if folder.is_dir() and not any(list(folder.glob(name)) for name in _TOKENIZERS):
        if adapter_settings(model):
            return load_tokenizer(*base_of(model, revision), trust_remote_code)
        raise ValueError(f"`model`: the folder {model} holds no tokenizer. Save it there: tokenizer.save_pretrained.")
    return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)


def check_thinking(tokenizers: Mapping[str, PreTrainedTokenizerBase], enable_thinking: bool | None):
    """
    Raise a `ValueError` if a thinking mode is set that no chat template of the models (by name) reads, or if none is
    set and a template reads it: a template's default is rarely what the model was trained with.
    """
    # A tokenizer has no template, one, or several by name
    reading = [model for model, tokenizer in tokenizers.items() if "enable_thinking" in str(tokenizer.chat_template)]
    if enable_thinking is None and reading:
        raise ValueError(
            f"`enable_thinking` is not set, and the chat template of {', '.join(reading)} reads it. Set it as in the "
            "training (the shipped configs have false). Set it to true if a model of the hub should think."
        )
    if enable_thinking is not None and not reading:
        raise ValueError(f"`enable_thinking` is set, but no chat template of {', '.join(tokenizers)} reads it.")


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], enable_thinking: bool | None = None
) -> list[int]:
    """
    Token ids of a prompt, up to where the answer begins.

    A chat template writes the messages and opens the assistant's turn. Without one, as for a base model, an empty line
    follows the text of each message, and the tokenizer adds its special tokens.
    """
    if tokenizer.chat_template is None:
        return tokenizer("".join(f"{message['content']}\n\n" for message in messages))["input_ids"]
    thinking: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **thinking)
    except jinja2.TemplateError as error:  # some take no system message
        raise ValueError(f"The chat template refuses a prompt: {error}.") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]

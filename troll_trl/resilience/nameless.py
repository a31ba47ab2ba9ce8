"""check_names(): refuses a model object without a name, if TRL would load a tokenizer or a reference by that name."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn


def check_names(arguments: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if TRL would load a reference model or a tokenizer from where a model object came from, and
    the object has no such place, or the folder is gone. `arguments` are a trainer's constructor's, by name."""
    model, beta = arguments["model"], arguments["args"].beta
    whole = isinstance(model, nn.Module) and not hasattr(model, "peft_config") and not arguments.get("peft_config")
    if beta != 0.0 and whole and (place := _lost_place(model)):
        raise ValueError(
            f"`beta` is {beta}, and TRL loads the reference model from where the model came from: {place}. Save the "
            "model with `save_pretrained` and give the trainer the folder, or set `beta=0.0`."
        )
    if isinstance(model, nn.Module) and arguments.get("processing_class") is None and (place := _lost_place(model)):
        raise ValueError(
            f"TRL loads the tokenizer from where the model came from: {place}. Give the trainer a `processing_class`."
        )
    rewards, tokenizers = arguments.get("reward_funcs"), arguments.get("reward_processing_classes")
    rewards = rewards if isinstance(rewards, list) else [rewards]
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(rewards)
    for number, (reward, tokenizer) in enumerate(zip(rewards, tokenizers, strict=False)):
        if isinstance(reward, nn.Module) and tokenizer is None and (place := _lost_place(reward)):
            raise ValueError(
                f"TRL loads the tokenizer of the reward model {number} of `reward_funcs` from where that model came "
                f"from: {place}. Give the trainer `reward_processing_classes`."
            )


def _lost_place(model: nn.Module) -> str | None:
    """Why a model object cannot be loaded once more, in words; `None` if it has a name that may be right."""
    name = getattr(model.config, "name_or_path", "")
    if not name:
        return "it has no name, since it was made from a config"
    is_path = os.path.isabs(name) or name.startswith(".") or name.count("/") > 1
    return f"the folder {name} is not there" if is_path and not os.path.isdir(name) else None

"""whole_reward_models(): reward models that are adapters, as TRL takes them: merged, or as the base with its layers."""

import json
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import find_adapter_config_file, is_peft_available


def whole_reward_models(reward_funcs: Any, args: Any) -> Any:
    """
    `reward_funcs` of a trainer, one or a list, with a plain model in the place of each adapter; all others stay as they
    are. A `ValueError` names an adapter that cannot be a reward model here. `args` is the trainer's config: TRL loads
    reward models with its `model_init_kwargs`.

    transformers loads an adapter by its own code, which drops DoRA's magnitudes, and a score head that neither the
    adapter nor its base model has is random. TRL passes over a `PeftModel`: it gets no tokenizer, and its dropout stays
    on.
    """
    if not isinstance(reward_funcs, list):
        return None if reward_funcs is None else whole_reward_models([reward_funcs], args)[0]
    return [_whole(function, args) for function in reward_funcs]


def _whole(function: Any, args: Any) -> Any:
    if isinstance(function, str):
        options = dict(args.model_init_kwargs or {})
        file = find_adapter_config_file(function, revision=options.get("revision"))
        return function if file is None else _merged(function, file, options, args.trust_remote_code)
    if isinstance(function, nn.Module) and is_peft_available():
        from peft import PeftModel

        if isinstance(function, PeftModel):
            _refuse_virtual_tokens(str(function.active_adapter), function.active_peft_config)
            return function.get_base_model().eval()  # it contains the adapter's layers
    return function


def _merged(adapter: str, file: str, options: dict[str, Any], trust_remote_code: bool) -> nn.Module:
    """The model of an adapter, a folder or a hub name, with the adapter merged into it."""
    from peft import PeftConfig, PeftModel

    with open(file, encoding="utf-8") as handle:
        settings = json.load(handle)
    revision = options.pop("revision", None)
    config = PeftConfig.from_pretrained(adapter, revision=revision)
    _refuse_virtual_tokens(adapter, config)
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            f"The reward model {adapter} is an adapter, and ZeRO-3 splits its base model before it can be merged. "
            "Merge it (`merge_and_unload` of PEFT), save it, and give that folder."
        )
    name = config.base_model_name_or_path
    options |= {"device_map": None}  # merged on the CPU; TRL moves it
    base, info = AutoModelForSequenceClassification.from_pretrained(
        name,
        revision=settings.get("revision"),
        num_labels=1,
        output_loading_info=True,
        trust_remote_code=options.pop("trust_remote_code", trust_remote_code),
        **options,
    )
    model = PeftModel.from_pretrained(base, adapter, revision=revision)
    trained = {key for key, _ in model.named_parameters() if ".modules_to_save." in key or ".trainable_tokens_" in key}
    lacking = [key for key in info["missing_keys"] if not any(_holds(other, key) for other in trained)]
    if lacking:
        raise ValueError(
            f"The reward model {adapter} has no {', '.join(sorted(lacking))}, and neither has its base model {name}: "
            "its rewards would be random. Train the adapter with `task_type='SEQ_CLS'`, which saves the score head, or "
            "give a base model that has one."
        )
    merged: Any = model.merge_and_unload().eval()
    if _has_tokenizer(adapter, revision, trust_remote_code):
        merged.config.name_or_path = adapter  # TRL loads the tokenizer from there
    return merged


def _holds(parameter: str, key: str) -> bool:
    """Whether a `parameter` of an adapted model is what the adapter saved in the place of the base model's `key`."""
    module, _, weight = key.rpartition(".")
    return f".{module}.modules_to_save." in parameter and parameter.endswith(f".{weight}")


def _has_tokenizer(adapter: str, revision: str | None, trust_remote_code: bool) -> bool:
    try:
        AutoTokenizer.from_pretrained(adapter, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return False
    return True


def _refuse_virtual_tokens(adapter: str, config: Any) -> None:
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"The reward model {adapter} is an adapter of type {getattr(config.peft_type, 'value', config.peft_type)}, "
            "which cannot be merged into its base model. Give a LoRA or another kind that can be merged, or a reward "
            "function that calls the model."
        )

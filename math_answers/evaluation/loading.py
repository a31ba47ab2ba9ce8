"""Loads a model, or an adapter of any kind by PEFT, and refuses a checkpoint whose weights do not fit."""

import warnings
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModelForCausalLM
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from math_answers.models import adapter_settings, base_of, check_quantization

# Settings of an adapter that vLLM reads, or that say nothing about the finished weights
_VLLM_APPLIES = {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora"}
_VLLM_APPLIES |= {"layers_to_transform", "layers_pattern", "base_model_name_or_path", "revision", "task_type"}
_VLLM_APPLIES |= {"inference_mode", "peft_version", "auto_mapping"}
_PROMPTS = {"prompt_embeddings", "prefix_task_cols", "prefix_task_rows"}


def vllm_ignores(model: str) -> str | None:
    """What vLLM does not apply of an adapter, such as `use_dora: True`, or `None`: it serves plain LoRA alone, and
    ignores most other settings in silence."""
    adapter = adapter_settings(model)
    if adapter is None:
        return None
    if adapter.get("peft_type", "LORA") != "LORA":
        return f"`peft_type: {adapter['peft_type']}`"
    plain = LoraConfig().to_dict()
    for name in sorted(adapter.keys() - _VLLM_APPLIES):
        value = adapter[name]
        drawn = name == "init_lora_weights" and value in (False, "gaussian")  # others change the base model's weights
        if value and value != plain.get(name) and not drawn:
            return f"`{name}: {value}`"
    return None


def load_model(
    model: str, revision: str | None, dtype: str = "auto", meta: bool = False, trust_remote_code: bool = False
) -> Any:
    """A model, or its base model with an adapter, on the CPU; with `meta`, without weights. A `ValueError` names
    weights that the checkpoint lacks, or has and the model does not. Without `trust_remote_code`, transformers refuses
    a model with code of its own, and does not ask on the terminal whether to run it."""
    name, revision = base_of(model, revision)
    device = "meta" if meta else None
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=dtype,
            device_map=device,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except SafetensorError as error:
        raise ValueError(f"`model`: a weight file of {name} is torn ({error}). Save or download it again.") from error
    _check_keys(name, info["missing_keys"], info["unexpected_keys"])
    return loaded if name == model else _with_adapter(loaded, model, meta)


def check_weights(model: str, revision: str | None, trust_remote_code: bool = False) -> None:
    """Raise the `ValueError` of [`load_model`] before anything large is loaded, if that can be done."""
    name, name_revision = base_of(model, revision)
    config = AutoConfig.from_pretrained(name, revision=name_revision, trust_remote_code=trust_remote_code)
    if check_quantization(name, config) is None:  # quantised weights may need a GPU even when they are empty
        load_model(model, revision, meta=True, trust_remote_code=trust_remote_code)


def _with_adapter(base: PreTrainedModel, folder: str, meta: bool) -> Any:
    try:
        with warnings.catch_warnings():
            # PEFT leaves out settings of a newer version
            warnings.filterwarnings("error", "Unexpected keyword arguments", UserWarning)
            config = PeftConfig.from_pretrained(folder)
        if meta and config.peft_type != "LORA":  # some kinds need the base model's weights to begin with
            return base
        model = PeftModelForCausalLM.from_pretrained(base, folder, low_cpu_mem_usage=meta)
        # PEFT only warns of missing weights and drops unexpected ones. A second load returns both
        result = model.load_adapter(folder, "default", low_cpu_mem_usage=meta)
    except (RuntimeError, LookupError, UserWarning, SafetensorError) as error:
        raise ValueError(f"`model`: the adapter {folder} cannot be loaded: {error!r}.") from error
    # PEFT loads virtual tokens apart, and then calls them missing and unexpected. The layers of VB-LoRA share one bank
    missing = [key for key in result.missing_keys if "vblora_vector_bank" not in key and not config.is_prompt_learning]
    _check_keys(folder, missing, set(result.unexpected_keys) - (_PROMPTS if config.is_prompt_learning else set()))
    return model


def _check_keys(folder: str, missing: Any, unexpected: Any) -> None:
    for what, keys in (("lacks", sorted(missing)), ("has", sorted(unexpected))):
        if keys:
            other = "which its config asks for" if what == "lacks" else "for which its config has no place"
            raise ValueError(
                f"`model`: the checkpoint of {folder} {what} {len(keys)} weights {other}: {', '.join(keys[:3])}"
                f"{', …' * (len(keys) > 3)}. Save the model again, or correct its config.json or adapter_config.json."
            )

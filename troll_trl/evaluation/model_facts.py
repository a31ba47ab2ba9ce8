"""Facts about a model before it is loaded: whether it can be, its adapter settings, its context."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import repo_exists, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER = ("*token*", "vocab*", "*.model")  # a folder with a tokenizer has at least one such file

# What is downloaded of an adapter
_READ_BY_A_LOAD = ["*config.json", "*token*.json", "vocab.json", "merges.txt", "*.index.json", "*.jinja", "*.model"]
_READ_BY_A_LOAD += ["*.tiktoken", "*.safetensors", "*model*.bin"]


def check_model(model: str, key: str = "model", revision: str | None = None) -> str:
    """Raise an error if a model, or its base model, is neither a folder with a model nor a possible hub name. Return
    what to load: the model, or the folder into which an adapter of the hub is downloaded."""
    place = _place(model, key, revision)
    if adapter := adapter_settings(place):
        if not (base := adapter.get("base_model_name_or_path")):
            raise ValueError(f"`{key}`: the {ADAPTER_CONFIG} of {model} has no `base_model_name_or_path`.")
        if adapter_settings(_place(base, key, adapter.get("revision"))):
            raise ValueError(
                f"`{key}`: the base model {base} of {model} is an adapter too. Merge it into its own base first."
            )
    elif Path(place).is_dir() and not [file for kind in _TOKENIZER for file in Path(place).glob(kind)]:
        raise ValueError(f"`{key}`: {model} has no tokenizer. Save it there, too, with its `save_pretrained`.")
    return place


def _place(model: str, key: str, revision: str | None) -> str:
    folder = Path(model)
    if folder.is_dir():
        if not (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            raise ValueError(f"`{key}`: {model} holds neither a config.json nor an {ADAPTER_CONFIG}.")
        _check_weights(folder, key)
        return model
    if folder.is_file() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise FileNotFoundError(f"`{key}`: there is no folder {model} (working folder: {os.getcwd()}).")
    try:
        files = [try_to_load_from_cache(model, name, revision=revision) for name in ("config.json", ADAPTER_CONFIG)]
        known = any(isinstance(file, str) for file in files) or repo_exists(model)
        hub = "the model hub has no model of this name that you may read"
    except Exception as error:  # of httpx or httpx2, by the hub's version. A load would retry for half a minute
        known, hub = False, f"the model hub gives no answer: {error}"
    if not known:
        raise FileNotFoundError(f"`{key}`: there is no folder {model} (working folder: {os.getcwd()}), and {hub}")
    if find_adapter_config_file(model, revision=revision) is None:
        return model
    return snapshot_download(model, revision=revision, allow_patterns=_READ_BY_A_LOAD, ignore_patterns=["*/*"])


def _check_weights(folder: Path, key: str) -> None:
    """Refuse a file of weights whose download or copy has stopped. Only its header is read."""
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"`{key}`: {file} is incomplete ({error}). Copy or download it again.") from None


def adapter_settings(model: str) -> dict[str, Any] | None:
    """The settings of an adapter in a folder; `None` for anything else."""
    file = Path(model) / ADAPTER_CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def base_of(model: str, revision: str | None) -> tuple[str, str | None]:
    """The base model of an adapter with the revision that it was trained on; else the model and its revision."""
    adapter = adapter_settings(model)
    return (adapter["base_model_name_or_path"], adapter.get("revision")) if adapter else (model, revision)


def saved_at(model: str) -> str | None:
    """Find the time at which the newest weights in a folder were saved: a training run may continue there. `None` for a
    hub name."""
    weights = [path.stat().st_mtime for name in ("*.safetensors", "*.bin") for path in Path(model).glob(name)]
    return datetime.fromtimestamp(max(weights), UTC).isoformat() if weights else None


def context_of(model: str, revision: str | None, trust_remote_code: bool) -> int | None:
    """Return how many tokens a model was made for, prompt and completion together, without an adapter's virtual tokens;
    `None` if the config does not say."""
    name, revision = base_of(model, revision)
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code).get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if context and original and factor:  # scaled positions (YaRN and others) may reach further
        context = max(context, int(original * factor))
    virtual = (adapter_settings(model) or {}).get("num_virtual_tokens") or 0
    return None if context is None else context - virtual


def end_ids(generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """
    The tokens that end a completion: the tokenizer's and the generation config's, since a chat model
    may end its turn with another one. Without any, every completion would run to the limit.
    """
    named = generation_config.eos_token_id if generation_config is not None else None
    ids = set([named] if isinstance(named, int) else named or []) | {tokenizer.eos_token_id}
    if ids == {None}:
        raise ValueError("`model`: neither its generation config nor its tokenizer names an end-of-sequence token.")
    return sorted(token for token in ids if token is not None)

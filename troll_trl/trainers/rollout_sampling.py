"""
Samples rollouts without vLLM from the distribution that the trainer scores, whatever `generation_config.json` says.

`generate` takes every option that a run does not set from this file. With a filter such as `min_p`, it would not sample
from the distribution that the trainer scores.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig

logger = get_logger(__name__)

_SPECIAL_TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
# With these, `generate` would sample from a different distribution
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens")


def warn_of_ignored_filters(model: torch.nn.Module, config: Any) -> None:
    """Warn about filters of the `model`'s own generation config that the trainer's `config` does not set."""
    filters = {
        name: value
        for own in (module.generation_config for module in _generating(model))
        for name in _FILTERS
        if (value := getattr(own, name, None)) and getattr(config, name, None) is None
    }
    if filters:
        logger.warning(
            "Rollouts ignore these options of the model's generation_config.json: "
            f"{', '.join(f'{name}={value!r}' for name, value in filters.items())}. To sample with such an option, "
            "set it in the training config."
        )


@contextmanager
def special_tokens_alone(model: torch.nn.Module) -> Iterator[None]:
    """Leave only the special tokens in the generation config of a `model`, and request no router logits: with padding,
    most MoE families of transformers would otherwise fail at a completion's second token. On exit, restore both
    configs, because a checkpoint saves them."""
    modules = _generating(model)
    own = [module.generation_config for module in modules]
    texts = [config for m in modules if getattr(config := m.config.get_text_config(), "output_router_logits", False)]
    try:
        for module, config in zip(modules, own, strict=True):
            tokens = {name: getattr(config, name, None) for name in _SPECIAL_TOKENS}
            # In a run, a `top_k` of `None` means no filter; transformers' own default is the 50 most likely tokens
            module.generation_config = GenerationConfig(do_sample=True, top_k=0, **tokens)
        for config in texts:
            config.output_router_logits = False
        yield
    finally:
        for module, config in zip(modules, own, strict=True):
            module.generation_config = config
        for config in texts:
            config.output_router_logits = True


def _generating(model: torch.nn.Module) -> list[Any]:
    """Find the modules with a generation config: an adapter's base model, or the language model inside another
    model."""
    return [m for m in model.modules() if isinstance(vars(m).get("generation_config"), GenerationConfig)]


def check_generation_kwargs(generation_kwargs: Mapping[str, Any] | None) -> None:
    """Raise a `ValueError` for options of `generation_kwargs` that change the distribution of the rollouts, but not the
    distribution that the trainer scores."""
    options = generation_kwargs or {}
    wrong = [name for name in ("temperature", "num_beams") if name in options]
    wrong += ["do_sample"] if not options.get("do_sample", True) else []
    if wrong:
        raise ValueError(
            f"`generation_kwargs` has {', '.join(f'{name}={options[name]!r}' for name in wrong)}, which the trainer "
            "does not read: it would score rollouts under a distribution other than the one sampled from. Set the "
            "config's `temperature`; rollouts are always sampled, without beams."
        )

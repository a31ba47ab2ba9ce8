"""Rollouts without vLLM are sampled as the run says, whatever the model's `generation_config.json` holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

# The options that `generate` takes anyway; only a message needs them
_DEFAULTS: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
_SPECIAL_TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")


class SampledAsConfigured(_Trainer):
    """
    Mixin for a trainer of TRL whose rollouts, without vLLM, take the special tokens of the model's generation config
    alone.

    `generate` takes every option that the run leaves open from there. A filter such as `min_p` would sample from
    another distribution than the one that the trainer scores. `generation_kwargs` of the run act as they are.
    """

    def _generate(self, *args, **kwargs):
        with special_tokens_alone(self.model):
            return super()._generate(*args, **kwargs)


def warn_of_unused_options(model: torch.nn.Module, used: GenerationConfig | None) -> None:
    """Name the options of the generation config of a `model` that its rollouts leave out, if there are any. `used` is
    the trainer's own config, or `None` with vLLM."""
    if left_out := unused_options(model, used):
        said = ", ".join(f"{name}={value!r}" for name, value in left_out.items())
        logger.warning(
            f"Rollouts leave these options of the model's generation_config.json out: {said}. Only its special tokens "
            "act in training. To sample with such an option, give it in `generation_kwargs`."
        )


def unused_options(model: torch.nn.Module, used: GenerationConfig | None) -> dict[str, Any]:
    """The options, special tokens aside, that `generate` would take from the generation configs of a `model`, since the
    run's own config `used` leaves them open. None, if `used` is `None`, as with vLLM."""
    if used is None:
        return {}
    options = {name: value for module in _generating(model) for name, value in vars(module.generation_config).items()}
    return {
        name: value
        for name, value in options.items()
        if value is not None
        and value != _DEFAULTS.get(name, False)  # a switch that is off
        and getattr(used, name, None) is None
        and not name.startswith("_")
        and name not in (*_SPECIAL_TOKENS, "transformers_version", "max_length")  # TRL's `max_new_tokens` replaces that
    }


@contextmanager
def special_tokens_alone(model: torch.nn.Module) -> Iterator[None]:
    """The context in which `generate` runs: the generation config of a `model`, whatever wraps it, has its special
    tokens alone. A checkpoint then saves the config as it was."""
    modules = _generating(model)
    own = [module.generation_config for module in modules]
    try:
        for module, config in zip(modules, own, strict=True):
            tokens = {name: getattr(config, name, None) for name in _SPECIAL_TOKENS}
            # A run's `top_k` of `None` is no filter; transformers' own default would be the 50 most likely tokens
            module.generation_config = GenerationConfig(do_sample=True, top_k=0, **tokens)
        yield
    finally:
        for module, config in zip(modules, own, strict=True):
            module.generation_config = config


def _generating(model: torch.nn.Module) -> list[Any]:
    """The modules with a generation config: an adapter's base model, or the language model inside of another."""
    return [m for m in model.modules() if isinstance(vars(m).get("generation_config"), GenerationConfig)]

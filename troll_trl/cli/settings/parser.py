"""
Strict parsing of YAML files and flags: what the parser does not understand, it refuses by name.

A file's value and a flag's value take one way: the text becomes a flag of transformers' parser, which converts it to
the type of its field. So `learning_rate: 1e-6` in a file means what `--learning_rate 1e-6` means, and later layers
replace earlier ones as a later flag replaces an earlier one.
"""

import argparse
import inspect
import json
import logging
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import product
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig

from troll_trl.cli.settings.arguments import TrollModelConfig, TrollScriptArguments
from troll_trl.cli.settings.command import Command, stop
from troll_trl.resilience.best_model import best_by_reward
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import TrollGRPOConfig, TrollOptions, TrollRLOOConfig, troll_fields

logger = logging.getLogger(__name__)

# For each `algorithm` the config of `method: troll`, and the config of `method: clip`
CONFIGS = {"grpo": (TrollGRPOConfig, GRPOConfig), "rloo": (TrollRLOOConfig, RLOOConfig)}

# What TRL documents, types as any string, and refuses late or never
DOCUMENTED_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# Fields of text to which TRL and transformers give `True` and `False` a meaning as well
_TEXT_OR_BOOLEAN = ("scale_rewards", "resume_from_checkpoint")
# Mappings whose text may also be the path of a file, which transformers reads
_MAPPING_OR_PATH = ("accelerator_config", "fsdp_config", "deepspeed")


def parse_training_command(command: Command) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """
    The script's arguments, the trainer's ([`TrollGRPOConfig`], [`TrollRLOOConfig`], or TRL's plain one for `method:
    clip`) and the model's. A mistake ends the process with code 2, and one paragraph names it, the value and the
    remedy.
    """
    troll_config, clip_config = CONFIGS[command.algorithm]
    parser = StrictParser((TrollScriptArguments, troll_config, TrollModelConfig, DatasetMixtureConfig), command.program)
    settings = parser.settings_of(command)
    if settings.get("method") == "clip":
        parser.dataclass_types[1] = clip_config  # which the parser makes of the same settings
    try:
        # A copy: transformers writes into `accelerator_config`, and the settings are saved
        options = deepcopy(settings) | best_by_reward(settings)  # also for TRL's own config
        script_args, training_args, model_args, mixture = parser.parse_dict(options, allow_extra_keys=True)
        script_args.mixture = mixture
        if script_args.reward_model_name_or_path is not None and "reward_funcs" not in settings:
            script_args.reward_funcs = []
        check_ranges(script_args)
        check_ranges(training_args)
        if "kl_bound" in settings and isinstance(training_args, TrollOptions):
            settings["kl_bound"] = training_args.kl_bound  # the number of 'auto' is saved
        if script_args.resume and training_args.resume_from_checkpoint:
            raise ValueError("`resume` and `resume_from_checkpoint` are both set. Give one of them.")
        if (mixture.test_split_size or mixture.streaming) and not mixture.datasets:
            raise ValueError(
                "`test_split_size` and `streaming` are for a mixture, under `datasets`. Set `dataset_test_split` or "
                "`dataset_streaming` instead."
            )
        if mixture.test_split_size and mixture.streaming:
            raise ValueError("`test_split_size` cannot split streamed rows. Leave it or `streaming` out.")
        for item, name in product(mixture.datasets, ("path", "name", "data_dir", "split")):
            if not isinstance(value := getattr(item, name), str) and (name == "path" or value is not None):
                raise ValueError(f"`datasets`: `{name}` must be text, got {value!r}. Write a number in quotes.")
        if training_args.eval_on_start and training_args.eval_strategy == "no":
            raise ValueError("`eval_on_start` needs an `eval_strategy`, which is 'no'. Set one, or remove it.")
    except (ValueError, TypeError, OSError, ImportError) as error:  # the last two of files and packages that are named
        stop(command.program, error)
    if training_args.process_index == 0:
        unused = [option.name for option in troll_fields(troll_config) if option.name in settings]
        if script_args.method == "clip" and unused:
            logger.warning(f"`method: clip` ignores {', '.join(unused)}, which only TROLL uses.")
        for name, key, text in _texts_below(settings):
            if text.lower() in ("yes", "no", "on", "off"):
                logger.warning(f"`{name}`: {key} is the text {text!r}, not a boolean. Write true or false for one.")
        of_one = ("dataset_name", "dataset_config", "dataset_streaming")
        if script_args.mixture.datasets and (ignored := [name for name in of_one if settings.get(name)]):
            logger.warning(f"`datasets` replaces `{'`, `'.join(ignored)}`, which the run ignores, as `trl grpo` does.")
        if training_args.eval_strategy == "no" and (script_args.dataset_test_split or script_args.eval_dataset_name):
            logger.warning("Nothing is evaluated: set `eval_strategy: steps` and `eval_steps`.")
    script_args.settings = settings
    return script_args, training_args, model_args


class StrictParser(HfArgumentParser):
    """
    A [`~transformers.HfArgumentParser`] for commands whose names were checked. It also takes the values of files, and
    refuses what is of another type than its field.
    """

    def __init__(self, dataclass_types: Iterable[Any], program: str):
        super().__init__(dataclass_types, prog=program, allow_abbrev=False, add_help=False)
        self._hints: dict[str, Any] = {}
        for option_type in self.dataclass_types:
            self._hints |= get_type_hints(option_type)
        self._hints["kl_bound"] = float | str  # its type is what makes one of the two
        for action in self._actions:
            hint = self._hints[action.dest]
            action.choices = DOCUMENTED_CHOICES.get(action.dest, action.choices)
            if action.dest == "datasets":
                action.type = lambda path: {"path": path}
            elif action.dest in _TEXT_OR_BOOLEAN:
                action.type = _text_or_boolean
            elif dict in _types_in(hint) and action.dest not in _MAPPING_OR_PATH:
                action.type = mapping
            elif tuple in _types_in(hint):
                action.nargs, action.type = "+", float
        self._file = ""

    def error(self, message: str) -> NoReturn:
        """argparse's message without the usage of all 300 flags."""
        stop(self.prog, f"{self._file}{message}")

    def settings_of(self, command: Command) -> dict[str, Any]:
        """The merged settings of the files and flags of a command, by name, each of the right type."""
        # If an option is present from the start, the parser sets no default. What differs in the end was given.
        not_given = object()
        namespace = argparse.Namespace(**dict.fromkeys((action.dest for action in self._actions), not_given))
        for layer in command.layers:
            self._file = f"{layer.path}: "
            for name, value in layer.values.items():
                if name != "env":
                    self._set(name, value, namespace)
        self._file = ""
        self.parse_args(command.flags, namespace)
        return {name: value for name, value in vars(namespace).items() if value is not not_given}

    def _set(self, name: str, value: Any, namespace: argparse.Namespace) -> None:
        """Take a value of a file as a flag's, or as YAML reads it if no flag can say it and the field takes it."""
        takes_several = any(action.dest == name and action.nargs == "+" for action in self._actions)
        if isinstance(value, str):
            self.parse_args([f"--{name}={value}"], namespace)
        elif takes_several and value and isinstance(value, list) and all(map(_is_argument, value)):
            self.parse_args([f"--{name}", *value], namespace)
        elif type(value) in _types_in(self._hints[name]) and (
            not takes_several or not value or (name == "datasets" and all(isinstance(item, dict) for item in value))
        ):
            setattr(namespace, name, value)
        else:
            self.error(f"`{name}` must be {inspect.formatannotation(self._hints[name])}, got {value!r}.")


def _texts_below(settings: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Setting, key and value of the texts in mappings, however deep."""
    for name, value in settings.items():
        mappings = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
        for key, inner in [pair for mapping in mappings for pair in mapping.items()]:
            if isinstance(inner, str):
                yield name, key, inner
            yield from ((name, f"{key}.{below}", text) for _, below, text in _texts_below({name: inner}))


def _types_in(hint: Any) -> set[Any]:
    """The alternatives of `list[str] | None` are list and NoneType."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(alternative) or alternative for alternative in alternatives}


def _is_argument(item: Any) -> bool:
    """Whether the parser takes it for a value, and not for a flag."""
    return isinstance(item, str) and not re.match(r"-\D", item)


def mapping(text: str) -> dict[str, Any]:
    """Read JSON, as in `--chat_template_kwargs '{"enable_thinking": false}'`."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _text_or_boolean(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


mapping.__name__ = "JSON mapping"  # argparse puts it into its messages

"""
Strict parsing of YAML files and flags: what the parser does not understand, it refuses by name.

A file's value and a flag's value take one way: the text becomes a flag of transformers' parser, which converts it to
the type of its field. So `learning_rate: 1e-6` in a file means what `--learning_rate 1e-6` means, and later layers
replace earlier ones as a later flag replaces an earlier one.
"""

import argparse
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser
from transformers.trainer_utils import IntervalStrategy
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig
from trl.scripts.utils import DatasetConfig

from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.settings.command import Command, read_training_command, stop
from troll_trl.cli.settings.layers import Value
from troll_trl.cli.settings.names import nearest
from troll_trl.data.files import FILE_BUILDERS
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig, troll_fields

logger = logging.getLogger(__name__)

# For each `algorithm` the config of `method: troll`, and the config of `method: clip`
CONFIGS = {"grpo": (TrollGRPOConfig, GRPOConfig), "rloo": (TrollRLOOConfig, RLOOConfig)}

# What TRL documents but types as any string. TROLL supports fewer loss types; its config says which, and why.
DOCUMENTED_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# Fields of text to which TRL and transformers give `True` and `False` a meaning as well
_TEXT_OR_BOOLEAN = ("scale_rewards", "resume_from_checkpoint")
# Mappings whose text may also be the path of a file
_MAPPING_OR_PATH = ("accelerator_config", "fsdp_config", "deepspeed")


def parse_training_args(
    argv: Sequence[str] | None = None,
) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """
    The script's arguments, the trainer's ([`TrollGRPOConfig`], [`TrollRLOOConfig`], or TRL's plain one for `method:
    clip`) and the model's, from a command line and the YAML files that its `--config` names. A mistake ends the
    process with code 2, and one paragraph names it, the value and the remedy.
    """
    return parse_training_command(read_training_command(argv))


def parse_training_command(command: Command) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """[`parse_training_args`] for a command line that was read before."""
    troll_config, clip_config = CONFIGS[command.algorithm]
    types = (TrollScriptArguments, troll_config, ModelConfig, DatasetMixtureConfig)
    settings = StrictParser(types, command.program).settings_of(command)
    clip = settings.get("method") == "clip"
    try:
        _check_device(settings)
        script_args = _fill(TrollScriptArguments, settings)
        training_args = _fill(clip_config if clip else troll_config, settings)
        model_args = _fill(ModelConfig, settings)
        script_args.mixture = _fill_mixture(settings)
        if script_args.reward_model_name_or_path is not None and "reward_funcs" not in settings:
            script_args.reward_funcs = []
        check_ranges(script_args)
        check_ranges(training_args)
        _check_evaluation(script_args, training_args)
    except (ValueError, TypeError, OSError, ImportError) as error:  # the last two of files and packages that are named
        stop(command.program, error)
    if script_args.resume and training_args.resume_from_checkpoint:
        stop(command.program, "`resume` and `resume_from_checkpoint` are both set. Give one of them.")
    if training_args.process_index == 0:
        for warning in _warnings(script_args, training_args, settings):
            logger.warning(warning)
    script_args.settings = settings
    return script_args, training_args, model_args


def _fill(dataclass_type: type, settings: Mapping[str, Any]) -> Any:
    names = {option.name for option in fields(dataclass_type) if option.init}
    # Copies: transformers writes into `accelerator_config`, and the settings are saved
    return dataclass_type(**{name: deepcopy(value) for name, value in settings.items() if name in names})


def _fill_mixture(settings: Mapping[str, Any]) -> DatasetMixtureConfig:
    """TRL's `datasets`, with its entries checked, which the parser does not do."""
    names = {option.name for option in fields(DatasetConfig)}
    entries = settings.get("datasets") or []
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() - names or not isinstance(entry.get("path"), str):
            others = ", ".join(sorted(names - {"path"}))
            raise ValueError(f"an entry of `datasets` must have a path, and may have {others}; got {entry!r}.")
    mixture = _fill(DatasetMixtureConfig, {**settings, "datasets": entries})
    if not entries and (unused := [name for name in ("streaming", "test_split_size") if settings.get(name)]):
        raise ValueError(
            f"`{unused[0]}` is for a mixture, under `datasets`. With `dataset_name`, set `dataset_streaming` or "
            "`dataset_test_split`."
        )
    if mixture.streaming and mixture.test_split_size is not None:
        raise ValueError("`test_split_size` needs datasets whole, and `streaming` is set. Remove one of them.")
    return mixture


def _warnings(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, settings: Mapping[str, Any]
) -> Iterator[str]:
    """A warning for every setting that has no effect."""
    ours = [option.name for option in troll_fields(CONFIGS[script_args.algorithm][0]) if option.name in settings]
    if script_args.method == "clip" and ours:
        yield f"method clip: {', '.join(ours)} unused, being TROLL's own."
    if script_args.ignore_bias_buffers:
        yield "`ignore_bias_buffers` has no effect, as in `trl grpo`."
    unused = [name for name in ("dataset_name", "dataset_config", "dataset_streaming") if settings.get(name)]
    if script_args.mixture.datasets and unused:
        yield f"`datasets` is used, and {', '.join(unused)} ignored, as by `trl grpo`."
    if training_args.eval_strategy == IntervalStrategy.NO:
        for name in ("dataset_test_split", "eval_dataset_name"):
            if getattr(script_args, name) is not None:
                yield f"`{name}` is set, but nothing is evaluated: set `eval_strategy: steps` and `eval_steps`."


def _check_device(settings: Mapping[str, Any]):
    """Name all settings to change at once. TrainingArguments would name one problem at a time, and no setting."""
    if torch.accelerator.is_available() or settings.get("use_cpu"):
        return
    wanted = {name: settings.get(name, False) for name in ("fp16", "use_vllm")}
    wanted["bf16"] = settings.get("bf16", not wanted["fp16"])  # TRL's default
    if any(wanted.values()):
        changes = ["`use_cpu: true`", *(f"`{name}: false`" for name in ("bf16", "fp16", "use_vllm") if wanted[name])]
        raise ValueError(
            f"There is no accelerator here, and these settings need one. To train on the CPU set {', '.join(changes)}."
        )


def _check_evaluation(script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig):
    if script_args.eval_dataset_config is not None and script_args.eval_dataset_name is None:
        raise ValueError("`eval_dataset_config` needs `eval_dataset_name`, which is not set.")
    eval_strategy = IntervalStrategy(training_args.eval_strategy).value
    if eval_strategy == "no":
        if training_args.eval_on_start:
            raise ValueError(
                "`eval_on_start` is set, but `eval_strategy` is 'no': there is no evaluation to begin with. Set "
                "`eval_on_start: false` too, or an `eval_strategy`."
            )
        return
    if script_args.dataset_test_split is None and _has_test_split(script_args):
        script_args.dataset_test_split = "test"  # TRL's default
    if script_args.dataset_test_split is None:
        raise ValueError(
            f"`eval_strategy` is {eval_strategy!r}, but there is no evaluation set. Set "
            "`dataset_test_split` (and `eval_dataset_name`, if it is another dataset; or, with `datasets`, "
            "`test_split_size`), or `eval_strategy: no`."
        )


def _has_test_split(script_args: TrollScriptArguments) -> bool:
    """Whether the data may have a split `test`. A single file has one split, under any name."""
    if script_args.eval_dataset_name is None and script_args.mixture.datasets:
        return script_args.mixture.test_split_size is not None
    return Path(str(script_args.eval_dataset_name or script_args.dataset_name)).suffix not in FILE_BUILDERS


class StrictParser(HfArgumentParser):
    """
    A [`~transformers.HfArgumentParser`] for commands whose names were checked, which refuses values that it does not
    understand: of another type than the field's, or without a meaning that TRL documents.
    """

    def __init__(self, dataclass_types: Iterable[Any], program: str):
        super().__init__(dataclass_types, prog=program, allow_abbrev=False, add_help=False)
        self._hints: dict[str, Any] = {}
        for option_type in self.dataclass_types:
            self._hints |= get_type_hints(option_type)
        for action in self._actions:
            action.choices = DOCUMENTED_CHOICES.get(action.dest, action.choices)
            if action.dest == "datasets":
                action.type = lambda path: {"path": path}
            if action.dest in _TEXT_OR_BOOLEAN:
                action.type = _text_or_boolean
                action.choices = action.choices and (*action.choices, True, False)
            if {dict, str} <= _types_in(self._hints[action.dest]):
                action.type = _mapping_or_path if action.dest in _MAPPING_OR_PATH else _mapping
        self._actions_of = {action.dest: action for action in reversed(self._actions)}  # `--x` comes before `--no_x`
        self._file = ""

    def error(self, message: str) -> NoReturn:
        """One sentence. argparse's own begins with the usage of all 300 flags."""
        found = re.match(
            r"argument --(\w+)[^:]*: (?:invalid (\w+) value|invalid choice): (.*?)(?: \(choose .*)?$", message
        )
        if found:
            name, kind, value = found.groups()
            choices = [str(choice) for choice in self._actions_of[name].choices or ()]
            expected = f"one of {', '.join(choices)}" if choices else _EXPECTED.get(kind, kind)
            near = nearest(value.strip("'\""), choices)
            message = f"`{name}` must be {expected}, got {value}."
            if near:
                message += f" The nearest valid name is {near}."
        message = re.sub(r"^argument --(\w+)[^:]*:", r"`\1`:", message)
        stop(self.prog, f"{self._file}{message}")

    def settings_of(self, command: Command) -> dict[str, Any]:
        """The merged settings of the files and flags of a command, by name, each of the right type."""
        # If an option is present from the start, the parser sets no default. What differs in the end was given.
        not_given = object()
        namespace = argparse.Namespace(**dict.fromkeys(self._actions_of, not_given))
        for layer in command.layers:
            self._file = f"{layer.path}: "
            for name, value in layer.values.items():
                if name != "env":
                    self._set(name, value, namespace)
        self._file = ""
        namespace, unknown = self.parse_known_args(command.flags, namespace)
        if unknown and unknown[0].startswith("--"):
            self.error(f"unknown flag {unknown[0]}: only what is true by default has a flag `--no_…`.")
        if unknown:
            self.error(f"{unknown[0]!r} belongs to no flag. If it is the second of several values, its flag takes one.")
        return {name: value for name, value in vars(namespace).items() if value is not not_given}

    def _set(self, name: str, value: Value, namespace: argparse.Namespace) -> None:
        """Take a value of a file as a flag's, or as YAML reads it if no flag can say it and the field takes it."""
        types, (text, typed) = _types_in(self._hints[name]), value
        items = text if isinstance(text, list) and self._actions_of[name].nargs == "+" else []
        if isinstance(text, str):
            self.parse_args([f"--{name}={text}"], namespace)
        elif items and all(isinstance(item, str) and not re.match(r"-\D", item) for item in items):
            self.parse_args([f"--{name}", *items], namespace)
        elif (type(typed) in types or (isinstance(typed, list) and tuple in types)) and (
            not items or (name == "datasets" and all(isinstance(item, dict) for item in items))
        ):
            setattr(namespace, name, typed)
        else:
            expected = " or ".join(_EXPECTED[kind] for kind in _EXPECTED if kind in {of.__name__ for of in types})
            self.error(f"`{name}` must be {expected}, got {typed!r}.")


_EXPECTED = {
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "str": "text",
    "NoneType": "null",
}


def _types_in(hint: Any) -> set[Any]:
    """The alternatives of `list[str] | None` are list and NoneType; those of an enumeration are texts."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {get_origin(alternative) or alternative for alternative in alternatives}
    return {str if (isinstance(kind, type) and issubclass(kind, Enum)) or kind is Literal else kind for kind in types}


def _mapping(text: str) -> str:
    """Check that a text is a mapping, and leave it as it is. TRL reads it, but its errors name no key."""
    reason = ""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError as error:
        reason = f" ({error})"
    raise argparse.ArgumentTypeError(f'must be a mapping, such as {{"name": 1}}, got {text!r}{reason}.')


def _mapping_or_path(text: str) -> str:
    return _mapping(text) if text.lstrip().startswith("{") else text


def _text_or_boolean(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)

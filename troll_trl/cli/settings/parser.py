"""
Strict parsing of YAML files and flags: what is not understood stops, by name.

A value goes one way, whether a file or a flag gives it: its text becomes a flag of TRL's parser, which converts it to
the type of its field. So `learning_rate: 1e-6` in a file means what `--learning_rate 1e-6` means, and later layers
replace earlier ones as a later flag replaces an earlier one.
"""

import argparse
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from transformers.trainer_utils import IntervalStrategy
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig, TrlParser
from trl.scripts.utils import DatasetConfig

from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.settings.command import (
    Command,
    algorithm_of,
    read_training_command,
    refuse_unknown_names,
    stop,
    take_launcher_settings,
)
from troll_trl.cli.settings.layers import Layer, Value
from troll_trl.cli.settings.names import nearest
from troll_trl.data.files import FILE_BUILDERS
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig, troll_fields

logger = logging.getLogger(__name__)

# Of each `algorithm`: the config of `method: troll`, and that of `method: clip`
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
    clip`) and the model's, from a command line and the YAML files that its `--config` names. Ends with code 2, after
    one paragraph that says what was wrong, the value seen and what to do.
    """
    return parse_training_command(read_training_command(argv))


def parse_training_command(command: Command) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """As [`parse_training_args`], of a command line that was read before."""
    algorithm = algorithm_of(command)
    troll_config, clip_config = CONFIGS[algorithm]
    types = (TrollScriptArguments, troll_config, ModelConfig, DatasetMixtureConfig)
    parser = StrictTrlParser(types, algorithm, prog=command.program)
    command.launcher |= take_launcher_settings(command, parser.names)
    settings = parser.settings_of(command)
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
    unused = [option.name for option in troll_fields(troll_config) if option.name in settings]
    if clip and unused and training_args.process_index == 0:
        logger.warning("method clip: %s unused, being TROLL's own.", ", ".join(unused))
    _say_what_is_ignored(script_args, settings, training_args.process_index)
    script_args.settings = settings
    return script_args, training_args, model_args


def _fill(dataclass_type: type, settings: Mapping[str, Any]) -> Any:
    names = {option.name for option in fields(dataclass_type) if option.init}
    # Copies: transformers writes into `accelerator_config`, and the settings are saved
    return dataclass_type(**{name: deepcopy(value) for name, value in settings.items() if name in names})


def _fill_mixture(settings: Mapping[str, Any]) -> DatasetMixtureConfig:
    """TRL's `datasets`, whose entries the parser does not look into."""
    names = {option.name for option in fields(DatasetConfig)}
    entries = settings.get("datasets") or []
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() - names or not isinstance(entry.get("path"), str):
            others = ", ".join(sorted(names - {"path"}))
            raise ValueError(f"an entry of `datasets` must have a path, and may have {others}; got {entry!r}.")
    mixture = _fill(DatasetMixtureConfig, {**settings, "datasets": entries})
    if not entries and (unused := [name for name in ("streaming", "test_split_size") if settings.get(name)]):
        raise ValueError(
            f"`{unused[0]}` is for a mixture, under `datasets`. Of `dataset_name` there are `dataset_streaming` and "
            "`dataset_test_split`."
        )
    if mixture.streaming and mixture.test_split_size is not None:
        raise ValueError("`test_split_size` needs datasets whole, and `streaming` is set. Remove one of them.")
    return mixture


def _say_what_is_ignored(script_args: TrollScriptArguments, settings: Mapping[str, Any], rank: int) -> None:
    if script_args.ignore_bias_buffers and rank == 0:
        logger.warning("`ignore_bias_buffers` has no effect, as in `trl grpo`.")
    unused = [name for name in ("dataset_name", "dataset_config", "dataset_streaming") if settings.get(name)]
    if script_args.mixture.datasets and unused and rank == 0:
        logger.warning("`datasets` is used, and %s ignored, as by `trl grpo`.", ", ".join(unused))


def _check_device(settings: Mapping[str, Any]):
    """Before TrainingArguments, which names one thing that is missing at a time, and no key."""
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
    eval_strategy = IntervalStrategy(training_args.eval_strategy).value
    if eval_strategy == "no" and training_args.eval_on_start:
        raise ValueError(
            "`eval_on_start` is set, but `eval_strategy` is 'no': there is no evaluation to begin with. Set "
            "`eval_on_start: false` too, or an `eval_strategy`."
        )
    if eval_strategy == "no" and training_args.process_index == 0:
        for name in ("dataset_test_split", "eval_dataset_name"):
            if getattr(script_args, name) is not None:
                logger.warning(
                    f"`{name}` is set, but nothing is evaluated: set `eval_strategy: steps` and `eval_steps`."
                )
    if script_args.eval_dataset_config is not None and script_args.eval_dataset_name is None:
        raise ValueError("`eval_dataset_config` is set, but no `eval_dataset_name` that it would be of.")
    if eval_strategy != "no" and script_args.dataset_test_split is None and _has_test_split(script_args):
        script_args.dataset_test_split = "test"  # TRL's default
    if eval_strategy != "no" and script_args.dataset_test_split is None:
        raise ValueError(
            f"`eval_strategy` is {eval_strategy!r}, but there is no evaluation set. Set "
            "`dataset_test_split` (and `eval_dataset_name`, if it is another dataset; or, with `datasets`, "
            "`test_split_size`), or `eval_strategy: no`."
        )


def _has_test_split(script_args: TrollScriptArguments) -> bool:
    """Whether data may have a split of this name: a single file has one split, whatever it is called."""
    if script_args.eval_dataset_name is None and script_args.mixture.datasets:
        return script_args.mixture.test_split_size is not None
    return Path(str(script_args.eval_dataset_name or script_args.dataset_name)).suffix not in FILE_BUILDERS


class StrictTrlParser(TrlParser):
    """
    A [`~trl.TrlParser`] that refuses all that it does not understand.

    It names unknown keys and flags (all at once, with what to write instead), abbreviated flags, keys that stand twice
    in a file, values of another type than the field's, and values that TRL documents no meaning for. And it adds
    layers: a file's key `base` names one file or several, relative to itself, whose settings it takes over and may
    replace. A key replaces the base's whole value, lists and mappings included. The advice on an unknown name depends
    on the `algorithm` of a training run.
    """

    def __init__(self, dataclass_types: Iterable[Any], algorithm: str = "", **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self._algorithm = algorithm
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
            if {dict, str} <= _types_in(self._hints.get(action.dest)):
                action.type = _mapping_or_path if action.dest in _MAPPING_OR_PATH else _mapping
        self._actions_of = {action.dest: action for action in reversed(self._actions)}  # `--x` comes before `--no_x`
        self.names = self._actions_of.keys() - {"help"}
        self._file = ""
        self.add_argument("--config", help="YAML file of settings, or the name of a config that comes with the package")

    def error(self, message: str) -> NoReturn:
        """One sentence in place of argparse's, which begins with the usage, all of 300 flags."""
        found = re.match(
            r"argument --(\w+)[^:]*: (?:invalid (\w+) value|invalid choice): (.*?)(?: \(choose .*)?$", message
        )
        if found:
            name, kind, value = found.groups()
            choices = [str(choice) for choice in self._actions_of[name].choices or ()]
            expected = f"one of {', '.join(choices)}" if choices else _SPOKEN.get(kind, kind)
            near = nearest(value.strip("'\""), choices)
            message = (
                f"`{name}` must be {expected}, got {value}.{f' The nearest valid name is {near}.' if near else ''}"
            )
        message = re.sub(r"^argument --(\w+)[^:]*:", r"`\1`:", message)
        stop(self.prog, f"{self._file}{message}")

    def settings_of(self, command: Command) -> dict[str, Any]:
        """What the files and flags of a command set, merged, checked and of the right type, by name. Ends with code 2,
        after one paragraph that says what was wrong."""
        if "-h" in command.flags or "--help" in command.flags:
            self.print_help()
            raise SystemExit(0)
        refuse_unknown_names(command, self.names, self._algorithm)
        # Present from the start, an option gets no default; so what differs in the end was given
        not_given = object()
        namespace = argparse.Namespace(**dict.fromkeys(self.names, not_given), config=None)
        for layer in command.layers:
            self._file = f"{layer.path}: "
            self._take_layer(layer, namespace)
        self._file = ""
        namespace, unknown = self.parse_known_args(command.flags, namespace)
        if unknown and unknown[0].startswith("--"):
            self.error(f"unknown flag {unknown[0]}: only what is true by default has a flag `--no_…`.")
        if unknown:
            self.error(f"{unknown[0]!r} belongs to no flag. If it is the second of several values, its flag takes one.")
        return {name: value for name, value in vars(namespace).items() if name != "config" and value is not not_given}

    def _take_layer(self, layer: Layer, namespace: argparse.Namespace) -> None:
        for name, value in layer.values.items():
            if name == "env":
                continue
            flag = self._as_flag(name, value)
            if flag is None:
                setattr(namespace, name, value.typed)
            else:
                self.parse_args(flag, namespace)

    def _as_flag(self, name: str, value: Value) -> list[str] | None:
        """The words of a flag with this value, or `None` for what no flag can say and the field takes all the same."""
        types = _types_in(self._hints[name])
        if isinstance(value.text, str):
            return [f"--{name}={value.text}"]
        if isinstance(value.text, list) and value.text and self._actions_of[name].nargs == "+":
            if all(isinstance(item, str) and not re.match(r"-\D", item) for item in value.text):
                return [f"--{name}", *value.text]
            if name == "datasets" and all(isinstance(item, dict) for item in value.typed):
                return None
        elif type(value.typed) in types or (isinstance(value.typed, list) and tuple in types):
            return None
        expected = " or ".join(said for of_type, said in _EXPECTED.items() if of_type in types)
        self.error(f"`{name}` must be {expected}, got {value.typed!r}.")


_SPOKEN = {"float": "a number", "int": "a whole number"}
_EXPECTED = {
    bool: "true or false",
    dict: "a mapping",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "text",
    NoneType: "null",
}


def _types_in(hint: Any) -> set[Any]:
    """The alternatives of `list[str] | None` are list and NoneType; those of an enumeration are texts."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {get_origin(alternative) or alternative for alternative in alternatives}
    return {str if (isinstance(kind, type) and issubclass(kind, Enum)) or kind is Literal else kind for kind in types}


def _mapping(text: str) -> str:
    """As it is, for TRL to read: which names no key where it cannot, or takes the text for a mapping."""
    try:
        read = json.loads(text)
    except ValueError as error:
        read = error
    if isinstance(read, dict):
        return text
    reason = f" ({read})" if isinstance(read, ValueError) else ""
    raise argparse.ArgumentTypeError(f'must be a mapping, such as {{"name": 1}}, got {text!r}{reason}.')


def _mapping_or_path(text: str) -> str:
    return _mapping(text) if text.lstrip().startswith("{") else text


def _text_or_boolean(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)

"""
Strict parsing of YAML files and flags: what the parser does not understand, it refuses by name.

A file's value and a flag's value take one way: the text becomes a flag of TRL's parser, which converts it to the type
of its field. So `learning_rate: 1e-6` in a file means what `--learning_rate 1e-6` means, and later layers replace
earlier ones as a later flag replaces an earlier one. A mapping takes this way as JSON.
"""

import argparse
import functools
import inspect
import json
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig, TrlParser

from math_answers.evaluation.arguments import EvaluationArguments
from troll_trl.cli.settings.arguments import (
    TrollModelConfig,
    TrollScriptArguments,
    check_needed,
    check_together,
    warn_of_ignored,
)
from troll_trl.cli.settings.command import CommandParser, is_flag, name_of, nearest, show, stop
from troll_trl.cli.settings.layers import Command, config_names
from troll_trl.fields import is_secret, may_hold_secret, without_secrets
from troll_trl.resilience.best_model import best_by_reward
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import ClipGRPOConfig, ClipRLOOConfig, TrollGRPOConfig, TrollOptions, TrollRLOOConfig

# The dataclasses of a command. The second one of a training is the trainer's.
DATACLASSES: dict[str, tuple[Any, ...]] = {
    "grpo": (TrollScriptArguments, TrollGRPOConfig, TrollModelConfig, DatasetMixtureConfig),
    "rloo": (TrollScriptArguments, TrollRLOOConfig, TrollModelConfig, DatasetMixtureConfig),
    "eval": (EvaluationArguments,),
}

_USE = (
    "--config takes a YAML file of settings, or the name of a config that comes with the package (`troll configs` "
    "lists them). Every setting is a key in the file and a flag. A flag overrides the file."
)
_LAUNCHER = (
    "Flags of `accelerate launch` start several processes, such as --num_processes 8, or on a CPU --num_processes 2 "
    "--multi_gpu. --accelerate_config takes a file for it, or a name such as ddp, fsdp2 or zero3."
)

# -- Names ------------------------------------------------------------------------------------------------------------

_ENV = "Set the environment variable {} instead, for instance under `env`."
# The nearest valid name misleads, or there is none, for these names of TRL, transformers and open-r1
RENAMED = {
    # TRL and transformers
    "torch_dtype": "Write `dtype`.",
    "max_prompt_length": "Write `max_prompt_tokens`, which drops longer prompts and cuts none.",
    "vllm_device": "Remove it: with `vllm_mode: colocate` vLLM shares the training GPUs.",
    "warmup_ratio": "Write `warmup_steps`; a number below 1 is a share of all updates.",
    "overwrite_output_dir": "Remove it: no run overwrites `output_dir`; `--resume` continues the run there.",
    "logging_dir": _ENV.format("TENSORBOARD_LOGGING_DIR"),
    "push_to_hub_token": "Write `hub_token`.",
    "divergence_topk": "Write `support_size`, which counts the sampled token too.",
    "clip_ratio_c": "Write `ratio_cap`.",
    # open-r1
    "dataset_mixture": "Write `datasets`, a list of mappings with path, name, split, columns and fraction.",
    "dataset_prompt_column": "Write `problem_column`.",
    "hub_model_revision": "Write `hub_revision`, the branch that is pushed to; `model_revision` loads another model.",
    "push_to_hub_revision": "Write `push_to_hub`.",
    "chat_template": "Remove it, and save the template with the model's tokenizer; for its options there is "
    "`chat_template_kwargs`.",
    "wandb_entity": _ENV.format("WANDB_ENTITY"),
    "wandb_project": _ENV.format("WANDB_PROJECT"),
    "max_completion_len": "It is an argument of `get_soft_overlong_punishment(...)`, which `reward_funcs` may call.",
    # Short ones
    "model": "Write `model_name_or_path`.",
    "dataset": "Write `dataset_name`.",
    "lr": "Write `learning_rate`.",
    "batch_size": "Write `per_device_train_batch_size`.",
    "epochs": "Write `num_train_epochs`.",
}
# `troll eval` has other names than training
EVALUATION = {
    "model_name_or_path": "Write `model`.",
    "dataset_name": "Write `benchmarks: [name=path]`.",
    "max_completion_length": "Write `max_new_tokens`.",
    "num_generations": "Write `n`.",
    "per_device_eval_batch_size": "Write `batch_size`.",
    "use_vllm": "Write `backend: vllm`.",
}


@cache
def declared_names(command: str) -> frozenset[str]:
    """Return the names of the settings of a command: `"grpo"`, `"rloo"` or `"eval"`."""
    return frozenset(field.name for kind in DATACLASSES[command] for field in fields(kind) if field.init)


@cache
def launcher_names(command: str) -> frozenset[str]:
    """Return the names of the options of `accelerate launch` that are not settings of the run. `env` is left out:
    it means the variables of a TPU. An evaluation has none."""
    options = launch_command_parser()._option_string_actions if command != "eval" else {"--help": None}
    names = {name_of(option) for option in options if option.startswith("--")} | {"accelerate_config"}
    return frozenset(names) - declared_names(command) - {"help", "env"}


# -- Values -----------------------------------------------------------------------------------------------------------

# TRL documents these choices, types them as any string, and refuses others late or never
DOCUMENTED_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# The text of these mappings may also be the path of a file, which transformers reads
_MAPPING_OR_PATH = ("accelerator_config", "fsdp_config", "deepspeed")
_CLIP: dict[str, type] = {"grpo": ClipGRPOConfig, "rloo": ClipRLOOConfig}


def _mapping(text: str) -> dict[str, Any]:
    """Read JSON, as in `--chat_template_kwargs '{"enable_thinking": false}'`."""
    with suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    shown = "not shown here, because it may hold a secret" if may_hold_secret(text) else repr(text)
    raise argparse.ArgumentTypeError(f"invalid JSON mapping value: {shown}")


def _text_or_boolean(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


_number_or_auto.__name__ = "number or 'auto'"  # argparse's message has it
# The annotations of these fields do not say how to read a text
_CONVERTERS: dict[str, Any] = {
    "datasets": lambda path: {"path": path},
    "kl_bound": _number_or_auto,
    # TRL and transformers give `True` and `False` a meaning as well
    "scale_rewards": _text_or_boolean,
    "resume_from_checkpoint": _text_or_boolean,
}


def _or_null(convert: Any) -> Any:
    """Make a converter that also takes `null`, as a file does."""

    @functools.wraps(convert)
    def converted(text: str) -> Any:
        return None if text == "null" else convert(text)

    return converted


def _types_in(hint: Any) -> set[Any]:
    """Return the alternatives of a type, which are list and NoneType for `list[str] | None`. A file has a list for a
    tuple."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {get_origin(alternative) or alternative for alternative in alternatives}
    return types | {list} if tuple in types else types


class StrictParser(CommandParser, TrlParser):
    """
    TRL's parser of dataclasses, which also takes the values of files, refuses what is of another type than its field,
    and names what is nearest to an unknown name.

    Args:
        settings (`str`): whose dataclasses are parsed: `"grpo"`, `"rloo"` or `"eval"`
        program (`str`): name in messages
    """

    def __init__(self, settings: str, program: str):
        trains = settings != "eval"
        example = "qwen3-0.6b/gsm8k" if trains else "eval/paper --model outputs/run --output outputs/eval"
        usage = f"{program} [--config FILE] [--NAME VALUE ...]\n\n    {program} --config {example}"
        super().__init__(DATACLASSES[settings], prog=program, usage=usage, description=_USE)
        self.epilog = _LAUNCHER if trains else None
        self._settings, self._file = settings, ""
        self._hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        for action in self._actions:
            types = _types_in(self._hints.get(action.dest))
            action.choices = DOCUMENTED_CHOICES.get(action.dest, action.choices)
            action.type = _CONVERTERS.get(action.dest, action.type)
            if dict in types and action.dest not in _MAPPING_OR_PATH:
                action.type = _mapping
            if tuple in types:  # it has two numbers
                action.nargs, action.type = 2, float
            if NoneType in types and action.nargs is None:
                action.type = _or_null(action.type)

    def error(self, message: str):
        super().error(f"{self._file}{message}")

    def advice(self, name: str, prefix: str = "") -> str:
        names, launcher = declared_names(self._settings), launcher_names(self._settings)
        other = {"grpo": "rloo", "rloo": "grpo"}.get(self._settings)
        if replacement := (EVALUATION if self._settings == "eval" else RENAMED).get(name):
            return replacement
        if other and name in declared_names(other) - names:
            return f"It is an option of {other}: set `algorithm: {other}`, or remove it."
        if name in launcher:
            return "It belongs to the launcher: give it to `troll grpo`, `troll rloo` or `accelerate launch`."
        near = nearest(name, names | launcher | ({"config", "help"} if prefix else set()))
        return f"The nearest valid name is {prefix}{near}." if near else "No valid name is near it."

    def settings_of(self, command: Command) -> dict[str, Any]:
        """Merge the settings of the files and flags of a command, by name, each of the right type."""
        if {"-h", "--help"} & {*command.flags}:
            show(self.format_help())
            raise SystemExit(0)
        names = declared_names(self._settings)
        keys = [(path, name) for path, values in command.layers for name in values if name not in names]
        unknown = [f"{path}: unknown key `{name}`. {self.advice(name)}" for path, name in keys]
        if unknown and (shipped := [name for name in command.configs if name in config_names()]):
            unknown[-1] += f" To change a config that comes with the package: troll configs copy {' '.join(shipped)}"
        unknown += self.unknown_flags(command.flags)
        if len(unknown) > 1:
            unknown.insert(0, f"{len(unknown)} names are unknown:")
        if unknown:
            self.error("\n  ".join(unknown))
        for action in self._actions:
            action.default = argparse.SUPPRESS  # the namespace gets only what is given
        namespace = argparse.Namespace()
        for path, values in command.layers:
            self._file = f"{path}: "
            for name, value in values.items():
                self._set(name, value, namespace)
        self._file = ""
        self.parse_args(command.flags, namespace)
        return vars(namespace)

    def _set(self, name: str, value: Any, namespace: argparse.Namespace) -> None:
        """Take a value of a file as a flag's, or as it is if no flag can say it and the field takes it."""
        nargs = self._option_string_actions[f"--{name}"].nargs
        items = value if isinstance(value, list) else []
        texts = all(isinstance(item, str) and not is_flag(item) for item in items)
        mappings = name == "datasets" and all(isinstance(item, dict) for item in items)
        if isinstance(value, str):
            self.parse_args([f"--{name}={value}"], namespace)
        elif type(value) not in _types_in(self._hints[name]) or not (texts or mappings):
            got = "a value that is not shown" if is_secret(name, value) else repr(without_secrets(value))
            self.error(f"`{name}` must be {inspect.formatannotation(self._hints[name])}, got {got}.")
        elif nargs == 2 or (nargs == "+" and items and texts):
            self.parse_args([f"--{name}", *items], namespace)
        else:
            setattr(namespace, name, value)


# -- A training -------------------------------------------------------------------------------------------------------


def training_settings(command: Command, algorithm: str, launches: bool = False) -> dict[str, Any]:
    """Read the settings of a training run. Those that `accelerate launch` reads, such as `num_processes`, move from the
    files to `command.launcher`, and if the program launches, from the flags, too. A mistake ends the process with code
    2, and one line names it."""
    names = launcher_names(algorithm)
    given: dict[str, Any] = {}
    for path, values in command.layers:
        for name in [name for name in values if name in names]:
            given[name] = values.pop(name)
            if not isinstance(given[name], str | None):
                stop(command.program, f"{path}: `{name}` must be one value, got {without_secrets(given[name])!r}.")
    command.launcher = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words, command.flags = command.flags, []
    taker = command.flags
    for word in words:
        if is_flag(word):
            of_launcher = launches and word.startswith("--") and name_of(word) in names
            taker = command.launcher if of_launcher else command.flags
        taker.append(word)
    settings = StrictParser(algorithm, command.program).settings_of(command)
    try:
        check_needed(settings)
    except ValueError as error:
        stop(command.program, error)
    return settings


def parse_training_command(command: Command) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """
    Make the script's arguments, the trainer's ([`TrollGRPOConfig`], [`TrollRLOOConfig`], or TRL's options for
    `method: clip`) and the model's. A mistake ends the process with code 2. One line names it, the value and
    the remedy.
    """
    named = command.algorithm()
    algorithm = named if named in ("grpo", "rloo") else "grpo"  # whose parser refuses another one
    settings = training_settings(command, algorithm)
    script_type, training_type, *others = DATACLASSES[algorithm]
    if settings.get("method") == "clip":
        training_type = _CLIP[algorithm]
    try:
        # A copy: transformers writes into `accelerator_config`, and the settings are saved
        options = deepcopy(settings) | best_by_reward(settings)  # also for TRL's own config
        if options.get("reward_model_name_or_path") is not None:
            options.setdefault("reward_funcs", [])
        script_args, training_args, model_args, mixture = (
            kind(**{field.name: options[field.name] for field in fields(kind) if field.name in options})
            for kind in (script_type, training_type, *others)
        )
        script_args.mixture, script_args.settings = mixture, settings
        check_ranges(script_args)
        check_ranges(training_args)
        check_together(script_args, training_args)
    except (ValueError, TypeError, OSError, ImportError) as error:  # a setting may name a file or need a package
        stop(command.program, error)
    if isinstance(training_args, TrollOptions) and "kl_bound" in settings:
        settings["kl_bound"] = training_args.kl_bound  # the number of 'auto' is saved
    if training_args.process_index == 0:
        warn_of_ignored(script_args, training_args)
    return script_args, training_args, model_args

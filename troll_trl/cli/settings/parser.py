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
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from transformers.utils import is_torch_xla_available
from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.settings.command import Command, CommandParser, is_flag, name_of, show, stop
from troll_trl.cli.settings.layers import config_names
from troll_trl.cli.settings.names import DATACLASSES, declared_names, describe_unknown, launcher_names
from troll_trl.fields import is_secret, may_hold_secret, without_secrets
from troll_trl.resilience.best_model import best_by_reward
from troll_trl.resilience.option_ranges import check_ranges
from troll_trl.trainers.config import ClipGRPOConfig, ClipRLOOConfig, TrollOptions, troll_fields

logger = logging.getLogger(__name__)

# Each time for a training, and for an evaluation
_EXAMPLES = ("--config qwen3-0.6b/gsm8k", "--config eval/paper --model outputs/run --output outputs/eval")
_USE = (
    "--config takes a YAML file of settings, or the name of a config that comes with the package (`troll configs` "
    "lists them). Every setting is a key in the file and a flag. A flag overrides the file."
)
_LAUNCHER = (
    "Flags of `accelerate launch` start several processes, such as --num_processes 8, or on a CPU --num_processes 2 "
    "--multi_gpu. --accelerate_config takes a file for it, or a name such as ddp, fsdp2 or zero3."
)

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
_CLIP: dict[str, type] = {"grpo": ClipGRPOConfig, "rloo": ClipRLOOConfig}


def parse_training_command(command: Command) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """
    The script's arguments, the trainer's ([`TrollGRPOConfig`], [`TrollRLOOConfig`], or TRL's options for `method:
    clip`) and the model's. A mistake ends the process with code 2, and one paragraph names it, the value and the
    remedy.
    """
    algorithm = command.algorithm if command.algorithm in ("grpo", "rloo") else "grpo"  # which refuses another one
    parser = StrictParser(algorithm, command.program)
    settings = parser.training_settings_of(command)
    troll_config = parser.dataclass_types[1]
    if settings.get("method") == "clip":
        parser.dataclass_types[1] = _CLIP[algorithm]  # which the parser makes of the same settings
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


class StrictParser(CommandParser, TrlParser):
    """
    TRL's parser of dataclasses, which also takes the values of files, refuses what is of another type than its field,
    and names what is nearest to an unknown name.

    Args:
        settings (`str`): whose dataclasses are parsed: `"grpo"`, `"rloo"` or `"eval"`
        program (`str`): name in messages
    """

    def __init__(self, settings: str, program: str):
        usage = f"{program} [--config FILE] [--NAME VALUE ...]\n\n    {program} {_EXAMPLES[settings == 'eval']}"
        super().__init__(DATACLASSES[settings], prog=program, usage=usage, description=_USE)
        if settings != "eval":
            self.epilog = _LAUNCHER
        self._settings, self._file = settings, ""
        self._hints: dict[str, Any] = {}
        for option_type in self.dataclass_types:
            self._hints |= get_type_hints(option_type)
        if settings != "eval":
            self._hints["kl_bound"] = float | str  # the config refuses `None`
        for action in self._actions:
            types = _types_in(self._hints.get(action.dest))
            action.choices = DOCUMENTED_CHOICES.get(action.dest, action.choices)
            if action.dest == "datasets":
                action.type = lambda path: {"path": path}
            elif action.dest in _TEXT_OR_BOOLEAN:
                action.type = _text_or_boolean
            elif action.dest == "kl_bound":
                action.type = _number_or_auto
            elif dict in types and action.dest not in _MAPPING_OR_PATH:
                action.type = mapping
            elif tuple in types:  # of two numbers
                action.nargs, action.type = 2, float
            if NoneType in types and action.nargs is None:
                action.type = _nullable(action.type)

    def error(self, message: str):
        said, invalid, value = message.partition(f"invalid {mapping.__name__} value: ")
        if invalid and may_hold_secret(value):
            message = f"{said}{invalid}not shown here, because it may hold a secret"
        super().error(f"{self._file}{message}")

    def training_settings_of(self, command: Command, launches: bool = False) -> dict[str, Any]:
        """[`settings_of`] of a training run, with all that it needs. Moves what `accelerate launch` reads, such as
        `num_processes`, from the files and, if the program launches, from the flags into `command.launcher`."""
        names, given = launcher_names(self._settings), {}
        for path, values in command.layers:
            for name in [name for name in values if name in names]:
                given[name] = values.pop(name)
                if not isinstance(given[name], str | None):
                    self.error(f"{path}: `{name}` must be one value, got {given[name]!r}.")
        command.launcher = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words, command.flags = command.flags, []
        taker = command.flags
        for word in words:
            if is_flag(word):
                of_launcher = launches and word.startswith("--") and name_of(word) in names
                taker = command.launcher if of_launcher else command.flags
            taker.append(word)
        settings = self.settings_of(command)
        needed = ("model_name_or_path", "dataset_name")[: 1 if settings.get("datasets") else 2]
        if missing := [f"`{name}`" for name in needed if settings.get(name) is None]:
            self.error(
                f"{' and '.join(missing)} must be set: a run needs a model and data. Each is a hub name or a path, in "
                f"a YAML file or as a flag: troll grpo {_EXAMPLES[0]}"
            )
        self._refuse_half_precision_without_a_gpu(settings)
        return settings

    def settings_of(self, command: Command) -> dict[str, Any]:
        """The merged settings of the files and flags of a command, by name, each of the right type."""
        if {"-h", "--help"} & {*command.flags}:
            show(self.format_help())
            raise SystemExit(0)
        self._refuse_unknown(command)
        # If an option is present from the start, the parser sets no default. What differs in the end was given.
        not_given = object()
        namespace = argparse.Namespace(**dict.fromkeys((action.dest for action in self._actions), not_given))
        for path, values in command.layers:
            self._file = f"{path}: "
            for name, value in values.items():
                self._set(name, value, namespace)
        self._file = ""
        self.parse_args(command.flags, namespace)
        return {name: value for name, value in vars(namespace).items() if value is not not_given}

    def _set(self, name: str, value: Any, namespace: argparse.Namespace) -> None:
        """Take a value of a file as a flag's, or as YAML reads it if no flag can say it and the field takes it."""
        takes_several = any(action.dest == name and action.nargs in ("+", 2) for action in self._actions)
        if isinstance(value, str):
            self.parse_args([f"--{name}={value}"], namespace)
        elif takes_several and value and isinstance(value, list) and all(map(_is_argument, value)):
            self.parse_args([f"--{name}", *value], namespace)
        elif type(value) in _types_in(self._hints[name]) and (
            not takes_several or not value or (name == "datasets" and all(isinstance(item, dict) for item in value))
        ):
            setattr(namespace, name, value)
        else:
            got = "a value that is not shown" if is_secret(name, value) else repr(without_secrets(value))
            self.error(f"`{name}` must be {inspect.formatannotation(self._hints[name])}, got {got}.")

    def _refuse_unknown(self, command: Command) -> None:
        """End with one line for each unknown key and flag."""
        names, said = declared_names(self._settings), []
        for path, values in command.layers:
            unknown = [str(name) for name in values if name not in names]
            said += [
                f"{path}: unknown key `{name}`. {describe_unknown(name, names, self._settings)}" for name in unknown
            ]
        if said and (shipped := [name for name in command.configs if name in config_names()]):
            said[-1] += f" To change a config that comes with the package: troll configs copy {' '.join(shipped)}"
        said += self.unknown_flags(command.flags)
        if len(said) > 1:
            said.insert(0, f"{len(said)} names are unknown:")
        if said:
            self.error("\n  ".join(said))

    def describe_unknown(self, name: str) -> str:
        launchers = launcher_names(self._settings) if self._settings != "eval" else set()
        return describe_unknown(name, declared_names(self._settings) | launchers | {"config"}, self._settings, "--")

    def _refuse_half_precision_without_a_gpu(self, settings: dict[str, Any]) -> None:
        """As transformers does, but before a process is started, and with a cure for it."""
        fp16 = settings.get("fp16")
        bf16 = not fp16 if settings.get("bf16") is None else settings["bf16"]  # TRL's default
        if settings.get("use_cpu") or not (bf16 or fp16):
            return
        if not torch.accelerator.is_available() and not is_torch_xla_available():
            self.error(
                f"torch {torch.__version__} finds no GPU on this machine, and `{'bf16' if bf16 else 'fp16'}` needs "
                "one. To train on the CPU, which takes long for all but small models: --use_cpu true --bf16 false "
                "--fp16 false"
            )


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


def _nullable(convert: Any) -> Any:
    """A converter that also takes `null`, as a file does."""

    def converted(text: str) -> Any:
        return None if text == "null" else convert(text)

    converted.__name__ = convert.__name__  # argparse puts it into its messages
    return converted


def _text_or_boolean(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


# argparse puts them into its messages
mapping.__name__ = "JSON mapping"
_number_or_auto.__name__ = "number or 'auto'"

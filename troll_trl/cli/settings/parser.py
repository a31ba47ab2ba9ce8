"""Strict parsing of the training script's YAML files and flags: what is not understood stops, by name."""

import argparse
import difflib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

from troll_trl.cli.settings.layers import read_layers
from troll_trl.cli.settings.values import convert
from troll_trl.resilience.input_checks import check_ranges
from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig, troll_fields

logger = logging.getLogger(__name__)

# Of each `algorithm`: the config of `method: troll`, and that of `method: clip`
CONFIGS = {"grpo": (TrollGRPOConfig, GRPOConfig), "rloo": (TrollRLOOConfig, RLOOConfig)}

# What TRL documents but types as any string. TROLL supports fewer loss types; its config says which, and why.
DOCUMENTED_CHOICES = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# Two strings that may be booleans as well
DOCUMENTED_TYPES: dict[str, Any] = {"scale_rewards": str | bool, "resume_from_checkpoint": str | bool | None}


@dataclass
class TrollScriptArguments:
    """
    Arguments of the training script, beside those of the trainer and the model.

    Args:
        method (`str`, *optional*, defaults to `"troll"`):
            `"troll"` for the trust-region projection, `"clip"` for TRL's own trainer on the same settings.
        algorithm (`str`, *optional*, defaults to `"grpo"`):
            Estimator of the advantages: `"grpo"` ([`~trl.GRPOTrainer`]) or `"rloo"` ([`~trl.RLOOTrainer`]).
        dataset_name (`str`):
            Training data: a hub name, a JSON-lines or Parquet file, or a folder.
        dataset_config (`str`, *optional*):
            Configuration name of a hub dataset.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        dataset_test_split (`str`, *optional*):
            Split to evaluate on. Without it there is no evaluation set.
        eval_dataset_name (`str`, *optional*):
            Evaluation data, if it is not another split of `dataset_name`.
        eval_dataset_config (`str`, *optional*):
            Configuration name of the evaluation dataset; that of the training data if they are the same dataset.
        problem_column (`str`, *optional*):
            Column of the problems, if the dataset is of none of the known schemas. An `eval_dataset_name` must be of a
            known one.
        answer_column (`str`, *optional*):
            Column of the gold answers, likewise.
        instruction (`str`, *optional*):
            Text added to every problem, such as how to mark the final answer.
        system_prompt (`str`, *optional*):
            System message before every problem.
        row_filter (`str`, *optional*):
            `column=value`: train on rows with this text in this column only, such as `ability=math`. An
            `eval_dataset_name` is not filtered.
        max_prompt_tokens (`int`, *optional*):
            Drop prompts of more tokens, with a warning that counts them. None is cut.
        max_train_samples (`int`, *optional*):
            Train on the first so many problems only.
        max_eval_samples (`int`, *optional*):
            Evaluate on the first so many problems only.
        reward_funcs (`list[str]`, *optional*, defaults to `["math_accuracy"]`):
            Reward functions: `math_accuracy`, or dotted import paths such as `my_lib.rewards.custom_reward` or
            `trl.rewards.think_format_reward`.
        resume (`bool`, *optional*, defaults to `False`):
            Continue from the newest complete checkpoint in `output_dir`, or start where there is none: what a job that
            may be started again by its cluster needs.

    Attributes:
        settings (`dict[str, Any]`):
            What files and flags set, merged. Filled in by [`parse_training_args`].
    """

    method: str = field(
        default="troll",
        metadata={
            "help": "'troll' for the trust-region projection, 'clip' for TRL's own trainer on the same settings.",
            "choices": ["troll", "clip"],
        },
    )
    algorithm: str = field(
        default="grpo",
        metadata={"help": "Estimator of the advantages: 'grpo' or 'rloo'.", "choices": list(CONFIGS)},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Training data: a hub name, a JSON-lines or Parquet file, or a folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on. Without it there is no evaluation set."}
    )
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Evaluation data, if it is not another split of `dataset_name`."}
    )
    eval_dataset_config: str | None = field(
        default=None,
        metadata={
            "help": "Configuration name of the evaluation dataset; that of the training data if they are the same "
            "dataset."
        },
    )
    problem_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the problems, if the dataset is of none of the known schemas. An `eval_dataset_name` "
            "must be of a known one."
        },
    )
    answer_column: str | None = field(default=None, metadata={"help": "Column of the gold answers, likewise."})
    instruction: str | None = field(
        default=None, metadata={"help": "Text added to every problem, such as how to mark the final answer."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message before every problem."})
    row_filter: str | None = field(
        default=None,
        metadata={
            "help": "column=value: train on rows with this text in this column only, such as ability=math. An "
            "`eval_dataset_name` is not filtered."
        },
    )
    max_prompt_tokens: int | None = field(
        default=None,
        metadata={"help": "Drop prompts of more tokens, with a warning that counts them. None is cut."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many problems only."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on the first so many problems only."}
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_accuracy"],
        metadata={
            "help": "Reward functions: `math_accuracy`, or dotted import paths such as `my_lib.rewards.custom_reward` "
            "or `trl.rewards.think_format_reward`."
        },
    )
    resume: bool = field(
        default=False,
        metadata={"help": "Continue from the newest complete checkpoint in `output_dir`, or start if there is none."},
    )
    settings: dict[str, Any] = field(init=False, repr=False, default_factory=dict)


def parse_training_args(
    argv: Sequence[str] | None = None,
) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """
    Parse the command line of the training script, and the YAML files that its `--config` names.

    Args:
        argv (`Sequence[str]`, *optional*):
            Flags; those of the process by default.

    Returns:
        `tuple`: script arguments; a [`TrollGRPOConfig`] or [`TrollRLOOConfig`], or TRL's plain one for `method: clip`;
        and the [`~trl.ModelConfig`].

    Raises:
        SystemExit: with code 2, after one paragraph that says what was wrong, the value seen and what to do.
    """
    troll_config, clip_config = CONFIGS[_algorithm(argv)]
    parser = StrictTrlParser((TrollScriptArguments, troll_config, ModelConfig))
    settings = parser.read_settings(argv)
    resume = settings.get("resume_from_checkpoint")
    if isinstance(resume, str) and resume.lower() in ("true", "false"):  # a flag can give text only
        settings["resume_from_checkpoint"] = resume.lower() == "true"
    clip = settings.get("method") == "clip"
    try:
        script_args = _fill(TrollScriptArguments, settings)
        training_args = _fill(clip_config if clip else troll_config, settings)
        model_args = _fill(ModelConfig, settings)
        check_ranges(training_args)
        _check_what_is_needed(script_args, training_args, model_args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    unused = [option.name for option in troll_fields() if option.name in settings]
    if clip and unused and training_args.process_index == 0:
        logger.warning("method clip: %s unused, being TROLL's own.", ", ".join(unused))
    script_args.settings = settings
    return script_args, training_args, model_args


def _algorithm(argv: Sequence[str] | None) -> str:
    """The algorithm that flags or files name. It decides which other names are valid, so it is read before them, and
    what cannot be read here is left to the parser to refuse."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--algorithm")
    flags.add_argument("--config", action="append", default=[])
    try:
        namespace, _ = flags.parse_known_args(argv)
        layers = [layer for config in namespace.config for _, layer in read_layers(Path(config))]
    except (argparse.ArgumentError, ValueError):
        return "grpo"
    named = [namespace.algorithm] + [layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer]
    algorithm = next((name for name in named if name is not None), "grpo")
    return algorithm if isinstance(algorithm, str) and algorithm in CONFIGS else "grpo"


def _fill(dataclass_type: type, settings: Mapping[str, Any]) -> Any:
    names = {option.name for option in fields(dataclass_type) if option.init}
    return dataclass_type(**{name: value for name, value in settings.items() if name in names})


def _check_what_is_needed(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
):
    if script_args.dataset_name is None:
        raise ValueError("`dataset_name` is not set. Give a hub name, a file or a folder.")
    if model_args.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Give a hub name or a folder.")
    eval_strategy = IntervalStrategy(training_args.eval_strategy).value
    if eval_strategy == "no" and script_args.dataset_test_split is not None and training_args.process_index == 0:
        logger.warning(
            "`dataset_test_split` is set, but nothing is evaluated: set `eval_strategy: steps` and `eval_steps`."
        )
    if script_args.resume and training_args.resume_from_checkpoint:
        raise ValueError("`resume` and `resume_from_checkpoint` are both set. Give one of them.")
    if eval_strategy != "no" and script_args.dataset_test_split is None:
        raise ValueError(
            f"`eval_strategy` is {eval_strategy!r}, but there is no evaluation set. Set "
            "`dataset_test_split` (and `eval_dataset_name`, if it is another dataset), or `eval_strategy: 'no'`."
        )


class StrictTrlParser(TrlParser):
    """
    A [`~trl.TrlParser`] that lets nothing through that it does not understand.

    It refuses, and names, unknown keys and flags (with the nearest valid name), abbreviated flags, keys that stand
    twice in a file, values of another type than the field's, and values that TRL documents no meaning for. And it adds
    layers: a file's key `base` names one file or several, relative to itself, whose settings it takes over and may
    replace. A key replaces the base's whole value, lists and mappings included.

    Args:
        dataclass_types (`Iterable[type]`):
            Dataclasses whose fields are the valid keys and flags.
        kwargs:
            Passed to [`~trl.TrlParser`].
    """

    def __init__(self, dataclass_types: Iterable[Any], **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self.add_argument("--config", action="append", help="YAML file of settings. Flags replace what it says.")
        self._hints = {
            name: hint for option_type in self.dataclass_types for name, hint in get_type_hints(option_type).items()
        } | DOCUMENTED_TYPES
        for action in self._actions:
            action.choices = DOCUMENTED_CHOICES.get(action.dest, action.choices)
        self._choices = {action.dest: action.choices for action in self._actions if action.choices is not None}
        self._names = {action.dest for action in self._actions} - {"help", "config"}

    def error(self, message: str):
        # Without the usage, which lists 300 flags
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args_and_config(self, args: Sequence[str] | None = None):
        """Dataclasses from files and flags. TrlParser's ways of letting unknown ones through are gone."""
        settings = self.read_settings(args)
        return tuple(_fill(dataclass_type, settings) for dataclass_type in self.dataclass_types)

    def read_settings(self, args: Sequence[str] | None = None) -> dict[str, Any]:
        """
        What files and flags set, merged, checked and of the right type, by name. Environment variables under the files'
        `env` are set.

        Args:
            args (`Sequence[str]`, *optional*):
                Flags; those of the process by default.

        Raises:
            SystemExit: with code 2, after one paragraph that says what was wrong.
        """
        # Present from the start, an option gets no default; so what differs in the end was given
        not_given = object()
        namespace, unknown = self.parse_known_args(args, argparse.Namespace(**dict.fromkeys(self._names, not_given)))
        if unknown:
            self.error(self._describe_unknown_flag(unknown[0]))
        configs = vars(namespace).pop("config") or []
        if len(configs) > 1:
            self.error(f"--config is given {len(configs)} times. Name one file, and the others as its `base`.")
        settings: dict[str, Any] = {}
        try:
            for path, layer in (layer for config in configs for layer in read_layers(Path(config))):
                settings.update(self._check_layer(path, layer))
        except ValueError as error:
            self.error(str(error))
        for name, value in settings.get("env", {}).items():
            os.environ[name] = str(value)
        return settings | {name: value for name, value in vars(namespace).items() if value is not not_given}

    def _describe_unknown(self, name: str, prefix: str = "") -> str:
        """Why a name is not valid: it belongs to the other algorithm, or to none."""
        for algorithm, (config, _) in CONFIGS.items():
            if name in {option.name for option in fields(config)}:
                return f"It is an option of {algorithm}: set `algorithm: {algorithm}`, or remove it."
        return _nearest(name, self._names, prefix)

    def _describe_unknown_flag(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"{flag!r} belongs to no flag. If it is the second of several values, its flag takes one."
        flag = flag.split("=")[0]
        return f"unknown flag {flag}. {self._describe_unknown(flag.lstrip('-').replace('-', '_'), '--')}"

    def _check_layer(self, path: Path, layer: Mapping[str, Any]) -> dict[str, Any]:
        checked = {}
        for name, value in layer.items():
            if name == "env":
                if not isinstance(value, dict) or any(isinstance(item, dict | list) for item in value.values()):
                    raise ValueError(f"{path}: `env` must map names to values, got {value!r}.")
                checked[name] = value
                continue
            if name not in self._names:
                raise ValueError(f"{path}: unknown key `{name}`. {self._describe_unknown(str(name))}")
            try:
                checked[name] = convert(value, self._hints[name])
            except ValueError as error:
                raise ValueError(f"{path}: `{name}` must be {error}.") from None
            choices = self._choices.get(name)
            if choices is not None and isinstance(value, str) and value not in choices:
                raise ValueError(
                    f"{path}: `{name}` must be one of {', '.join(choices)}, got {value!r}. {_nearest(value, choices)}"
                )
        return checked


def _nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    return f"The nearest valid name is {prefix}{difflib.get_close_matches(name, list(names), n=1, cutoff=0)[0]}."

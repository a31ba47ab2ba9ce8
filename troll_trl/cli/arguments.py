"""Arguments of a training run, in addition to the trainer's and the model's, and dataclasses that hold them all."""

import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser
from transformers import GenerationConfig
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig, TrlParser

from troll_trl.cli.command_line import MAPPING_OR_PATH, CommandParser, OptionParser, nearest
from troll_trl.fields import setting
from troll_trl.trainers.config import TrollGRPOConfig, TrollRLOOConfig
from troll_trl.trainers.rollout_sampling import check_generation_kwargs


@dataclass
class TrollModelConfig(ModelConfig):
    """TRL's model arguments with a different default for `lora_dropout`."""

    lora_dropout: float = setting(
        0.0, "LoRA dropout. TRL's default of 0.05 adds noise, which a trust region treats as steps of the policy."
    )


@dataclass
class TrollScriptArguments:
    """
    Arguments of a training run, in addition to the trainer's and the model's.

    `make_arguments` fills in `mixture`, the [`~trl.DatasetMixtureConfig`] to train on in place of `dataset_name`.
    """

    method: str = setting(
        "troll",
        "'troll' trains with a trust region, 'clip' with TRL's own trainer and the same settings.",
        choices=["troll", "clip"],
    )
    algorithm: str = setting(
        "grpo",
        "'grpo' or 'rloo'. `troll grpo` and `troll rloo` set this option.",
        choices=["grpo", "rloo"],
    )
    dataset_name: str | None = setting(
        None,
        "Training data: a hub name, a folder, or a file (JSON Lines, JSON, CSV or Parquet). For a mixture, use TRL's "
        "`datasets`.",
    )
    dataset_config: str | None = setting(None, "Configuration of the dataset on the hub.")
    dataset_train_split: str = setting("train", "Split to train on, or part of a split, such as `train[:90%%]`.")
    dataset_test_split: str | None = setting(
        None, "Split to evaluate on, or part of it. Default: `test`. A file as `dataset_name` needs a part of `train`."
    )
    dataset_streaming: bool = setting(False, "Load rows only as needed. Not supported with gold answers.")
    eval_dataset_name: str | None = setting(None, "Evaluation data, if not a split of `dataset_name`.")
    eval_dataset_config: str | None = setting(
        None,
        "Configuration of the evaluation dataset. If you evaluate on `dataset_name`, the default is `dataset_config`.",
    )
    problem_column: str | None = setting(
        None,
        "Column with the problems. Needed if the dataset has neither a known schema nor a `prompt` column. Also used "
        "for evaluation datasets that have this column.",
    )
    answer_column: str | None = setting(
        None,
        "Column with the gold answers, for `math_accuracy` and other rewards that read `solution`. Needed if the "
        "dataset has no known schema. Also used for evaluation datasets that have this column.",
    )
    instruction: str | None = setting(None, "Text to add after every problem or prompt.")
    system_prompt: str | None = setting(None, "System message before every problem.")
    row_filter: str | None = setting(
        None,
        "COLUMN=TEXT, such as ability=math: train only on rows whose COLUMN equals TEXT. Does not filter "
        "`eval_dataset_name`.",
    )
    max_prompt_tokens: int | None = setting(None, "Drop prompts above this limit, and warn. No prompt is truncated.")
    max_train_samples: int | None = setting(None, "Train only on the first N problems.")
    max_eval_samples: int | None = setting(None, "Evaluate only on the first N problems.")
    reward_funcs: list[str] = setting(
        help="Reward functions: `math_accuracy` (the default without a reward model), import paths such as "
        "`my_lib.rewards.custom_reward`, or calls that return a function, such as `my_lib.length_penalty(limit=512)`.",
        default_factory=lambda: ["math_accuracy"],
    )
    reward_model_name_or_path: str | None = setting(None, "Reward model: a hub name or a folder.")
    ignore_bias_buffers: bool = setting(False, "Has no effect, as in `trl grpo`.")
    resume: bool = setting(
        False,
        "Continue from the newest complete checkpoint in `output_dir`. If the folder contains no checkpoint, start a "
        "new run.",
    )
    mixture: Any = field(init=False, repr=False, default=None)


# By algorithm and method, the dataclass of the trainer's options
TRAINING: dict[tuple[str, str], Any] = {
    ("grpo", "troll"): TrollGRPOConfig,
    ("grpo", "clip"): GRPOConfig,
    ("rloo", "troll"): TrollRLOOConfig,
    ("rloo", "clip"): RLOOConfig,
}


# Smallest allowed values of options that libraries divide by, or count up to
_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "num_generations": 2,
    "num_generations_eval": 1,
    "max_completion_length": 1,
    "max_prompt_tokens": 1,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "learning_rate": 0,
}


def training_parser(algorithm: str, program: str) -> OptionParser:
    """Make the parser of a training run's options. This parser itself refuses an unknown algorithm."""
    training = TRAINING["rloo" if algorithm == "rloo" else "grpo", "troll"]
    types = (TrollScriptArguments, training, TrollModelConfig, DatasetMixtureConfig)
    return OptionParser(types, program, launcher_parser(program).names())


def launcher_parser(program: str) -> CommandParser:
    """Make the parser of the flags of `accelerate launch`, and of TRL's `--accelerate_config`."""
    parser = CommandParser(prog=program, parents=[launch_command_parser()], add_help=False)
    parser.add_argument("--accelerate_config", "--accelerate-config")
    return parser


def training_options(parser: OptionParser, values: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return the options that files and flags set. A mistake ends the process with code 2 and one message. A
    `hub_token` moves from the options to the environment variable `HF_TOKEN`."""
    options = parser.read(values, flags)
    if token := options.pop("hub_token", None):
        os.environ["HF_TOKEN"] = token
    for name, least in _LEAST.items():
        if (value := options.get(name)) is not None and not least <= value < math.inf:
            parser.error(f"`{name}` must be a finite number of at least {least}, got {value}.")
    for name in MAPPING_OR_PATH:
        if (path := str(options.get(name))).endswith(".json") and not Path(path).is_file():
            parser.error(f"`{name}`: there is no file {path}.")
    needed = ["model_name_or_path"] if options.get("datasets") else ["model_name_or_path", "dataset_name"]
    if missing := [name for name in needed if not options.get(name)]:
        parser.error(f"`{missing[0]}` must be set: a run needs a model and data, as in --config qwen3-0.6b/gsm8k.")
    return options


def make_arguments(options: dict[str, Any]) -> tuple[TrollScriptArguments, GRPOConfig | RLOOConfig, ModelConfig]:
    """Make the script's arguments, the trainer's ([`TrollGRPOConfig`], [`TrollRLOOConfig`], or TRL's options for
    `method: clip`) and the model's. A value that they refuse raises a `ValueError`, or the error of a file that it
    names."""
    options = deepcopy(options)  # transformers writes into `accelerator_config`, and a run saves its options
    if options.get("reward_model_name_or_path") is not None:
        options.setdefault("reward_funcs", [])
    training = TRAINING[options["algorithm"], options.get("method", "troll")]
    if options.get("method") == "clip" and options.get("adaptive_learning_rate"):
        raise ValueError(
            "`adaptive_learning_rate` is not supported with `method: clip`: it needs a trust region. Set it to false."
        )
    types = (TrollScriptArguments, training, TrollModelConfig, DatasetMixtureConfig)
    try:
        made = TrlParser(types).parse_dict(options, allow_extra_keys=True)
    except TypeError as error:  # of the entries of `datasets`
        raise ValueError(error) from error
    script_args, training_args, model_args, mixture = made
    script_args.mixture = mixture
    check_generation_kwargs(training_args.generation_kwargs)  # for `method: clip`, too
    known = vars(GenerationConfig())
    unknown = [name for name in training_args.generation_kwargs or () if name not in known]
    if unknown and not training_args.use_vllm:  # `generate` ignores an option that it does not have
        raise ValueError(
            f"`generation_kwargs` has the unknown key `{unknown[0]}`.{nearest(unknown[0], known)} It takes "
            "the options of transformers' GenerationConfig."
        )
    if script_args.resume and training_args.resume_from_checkpoint:
        raise ValueError("`resume` and `resume_from_checkpoint` are both set. Set only one.")
    return script_args, training_args, model_args

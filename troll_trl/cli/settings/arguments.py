"""Defines and checks the arguments of a training run. Its trainer and its model have their own."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import is_torch_xla_available
from trl import GRPOConfig, ModelConfig, RLOOConfig

from math_answers.settings import setting
from troll_trl.fields import document
from troll_trl.trainers.config import TrollGRPOConfig, troll_fields

logger = logging.getLogger(__name__)


@dataclass
class TrollModelConfig(ModelConfig):
    """TRL's arguments of the model, with another default."""

    lora_dropout: float = setting(
        0.0, "Dropout of LoRA. TRL's default is 0.05, which a trust region takes for a step of the policy."
    )


@document
@dataclass
class TrollScriptArguments:
    """
    Arguments of a training run, next to those of the trainer and the model.

    `parse_training_command` fills in `mixture`, the [`~trl.DatasetMixtureConfig`] to train on in place of
    `dataset_name`, and `settings`, what files and flags set, merged.
    """

    method: str = setting(
        "troll",
        "'troll' trains with a trust region. 'clip' trains with TRL's own trainer and the same settings.",
        choices=["troll", "clip"],
    )
    algorithm: str = setting(
        "grpo",
        "How advantages are estimated: 'grpo' or 'rloo'. `troll grpo` and `troll rloo` set it.",
        choices=["grpo", "rloo"],
    )
    dataset_name: str | None = setting(
        None,
        "Training data: a hub name, a JSON-lines or Parquet file, or a folder. For a mixture, use TRL's `datasets`.",
    )
    dataset_config: str | None = setting(None, "Configuration of the dataset on the hub.")
    dataset_train_split: str = setting("train", "Split to train on, or a part of it, such as `train[:90%%]`.")
    dataset_test_split: str | None = setting(
        None, "Split to evaluate on, or a part of it. The default is `test`, which a single file does not have."
    )
    dataset_streaming: bool = setting(False, "Read rows as the training needs them. Gold answers do not work with it.")
    eval_dataset_name: str | None = setting(None, "Evaluation data, if it is not a split of `dataset_name`.")
    eval_dataset_config: str | None = setting(
        None,
        "Configuration of the evaluation dataset. If it is the training dataset, the default is `dataset_config`.",
    )
    problem_column: str | None = setting(
        None,
        "Column with the problems, if the dataset has neither a known schema nor a column `prompt`. The same holds for "
        "`eval_dataset_name`, if that dataset has the column.",
    )
    answer_column: str | None = setting(
        None,
        "Column with the gold answers, if the dataset has no known schema. `math_accuracy` and other rewards that "
        "read `solution` need them. The same holds for `eval_dataset_name`, if that dataset has the column.",
    )
    instruction: str | None = setting(None, "Text after every problem or prompt, such as how to mark the final answer.")
    system_prompt: str | None = setting(None, "System message before every problem.")
    row_filter: str | None = setting(
        None,
        "Train only on rows with this text in this column: column=value, such as ability=math. It does not filter "
        "`eval_dataset_name`.",
    )
    max_prompt_tokens: int | None = setting(None, "Drop longer prompts, and warn how many. No prompt is truncated.")
    max_train_samples: int | None = setting(None, "Train on the first problems only, this many.")
    max_eval_samples: int | None = setting(None, "Evaluate on the first problems only, this many.")
    reward_funcs: list[str] = setting(
        help="Reward functions: `math_accuracy` (the default without a reward model), dotted import paths such as "
        "`my_lib.rewards.custom_reward`, or calls that make one: `my_lib.length_penalty(limit=512)`.",
        default_factory=lambda: ["math_accuracy"],
    )
    reward_model_name_or_path: str | None = setting(None, "Reward model: a hub name or a folder.")
    ignore_bias_buffers: bool = setting(False, "Has no effect, as in `trl grpo`.")
    resume: bool = setting(
        False,
        "Continue from the newest complete checkpoint in `output_dir`. If there is none, start a new run.",
    )
    mixture: Any = field(init=False, repr=False, default=None)
    settings: dict[str, Any] = field(init=False, repr=False, default_factory=dict)


def check_needed(settings: dict[str, Any]) -> None:
    """Refuse (`ValueError`) a run without a model or data, or with a half precision that this machine lacks."""
    needed = ["model_name_or_path"] if settings.get("datasets") else ["model_name_or_path", "dataset_name"]
    if missing := [f"`{name}`" for name in needed if settings.get(name) is None]:
        raise ValueError(
            f"{' and '.join(missing)} must be set: a run needs a model and data. Each is a hub name or a path, in a "
            "YAML file or as a flag: troll grpo --config qwen3-0.6b/gsm8k"
        )
    fp16 = settings.get("fp16")
    bf16 = not fp16 if settings.get("bf16") is None else settings["bf16"]  # TRL's default
    if settings.get("use_cpu") or not (bf16 or fp16):
        return
    if not torch.accelerator.is_available() and not is_torch_xla_available():
        # As transformers does, but before a process is started, and with a cure
        raise ValueError(
            f"torch {torch.__version__} finds no GPU on this machine, and `{'bf16' if bf16 else 'fp16'}` needs one. To "
            "train on the CPU, which takes long for all but small models: --use_cpu true --bf16 false --fp16 false"
        )


def check_together(script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig) -> None:
    """Refuse (`ValueError`) arguments that do not go together."""
    mixture = script_args.mixture
    if script_args.resume and training_args.resume_from_checkpoint:
        raise ValueError("`resume` and `resume_from_checkpoint` are both set. Give one of them.")
    if (mixture.test_split_size or mixture.streaming) and not mixture.datasets:
        raise ValueError(
            "`test_split_size` and `streaming` are for a mixture, under `datasets`. Set `dataset_test_split` or "
            "`dataset_streaming` instead."
        )
    if training_args.eval_on_start and training_args.eval_strategy == "no":
        raise ValueError("`eval_on_start` needs an `eval_strategy`, which is 'no'. Set one, or remove it.")


def warn_of_ignored(script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig) -> None:
    """Name the settings that this run does not use."""
    settings = script_args.settings
    unused = [option.name for option in troll_fields(TrollGRPOConfig) if option.name in settings]
    if script_args.method == "clip" and unused:
        logger.warning(f"`method: clip` ignores {', '.join(unused)}, which only TROLL uses.")
    upper = training_args.epsilon if training_args.epsilon_high is None else training_args.epsilon_high
    if script_args.method == "clip" and math.isinf(training_args.epsilon) and math.isinf(upper):  # a penalty's, say
        logger.warning("`method: clip` clips nothing with `epsilon: .inf`. Give it a range: --epsilon 0.2")
    of_one = ("dataset_name", "dataset_config", "dataset_streaming")
    if script_args.mixture.datasets and (unused := [name for name in of_one if settings.get(name)]):
        logger.warning(f"`datasets` replaces `{'`, `'.join(unused)}`, which the run ignores, as `trl grpo` does.")
    if training_args.eval_strategy == "no" and (script_args.dataset_test_split or script_args.eval_dataset_name):
        logger.warning("Nothing is evaluated: set `eval_strategy: steps` and `eval_steps`.")

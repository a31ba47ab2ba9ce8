"""Arguments of a training run, beside those of its trainer and its model."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrollScriptArguments:
    """
    Arguments of a training run, beside those of the trainer and the model.

    Args:
        method (`str`, *optional*, defaults to `"troll"`):
            `"troll"` for the trust-region projection, `"clip"` for TRL's own trainer on the same settings.
        algorithm (`str`, *optional*, defaults to `"grpo"`):
            Estimator of the advantages: `"grpo"` ([`~trl.GRPOTrainer`]) or `"rloo"` ([`~trl.RLOOTrainer`]).
        dataset_name (`str`):
            Training data: a hub name, a JSON-lines or Parquet file, or a folder. Or a mixture, as TRL's `datasets`.
        dataset_config (`str`, *optional*):
            Configuration name of a hub dataset.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on, or a part of it, such as `train[:90%]`.
        dataset_test_split (`str`, *optional*):
            Split, or part of one, to evaluate on. Without it there is no evaluation set.
        dataset_streaming (`bool`, *optional*, defaults to `False`):
            Read rows as they are needed, in place of all before the training. Not for gold answers.
        eval_dataset_name (`str`, *optional*):
            Evaluation data, if it is not another split of `dataset_name`.
        eval_dataset_config (`str`, *optional*):
            Configuration name of the evaluation dataset; that of the training data if they are the same dataset.
        problem_column (`str`, *optional*):
            Column of the problems, if the dataset is of none of the known schemas and has no column `prompt`. An
            `eval_dataset_name` must be of a known one.
        answer_column (`str`, *optional*):
            Column of the gold answers, for `math_accuracy` and other rewards that read `solution`, likewise.
        instruction (`str`, *optional*):
            Text added to every problem or prompt, such as how to mark the final answer.
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
        reward_funcs (`list[str]`, *optional*, defaults to `["math_accuracy"]`, or none with a reward model):
            Reward functions: `math_accuracy`, dotted import paths such as `my_lib.rewards.custom_reward` or
            `trl.rewards.think_format_reward`, or calls of what makes one: `my_lib.length_penalty(limit=512)`.
        reward_model_name_or_path (`str`, *optional*):
            Reward model, a hub name or a folder.
        ignore_bias_buffers (`bool`, *optional*, defaults to `False`):
            Read because `trl grpo` reads it, and without effect, as there.
        resume (`bool`, *optional*, defaults to `False`):
            Continue from the newest complete checkpoint in `output_dir`, or start where there is none: what a job that
            may be started again by its cluster needs.

    Attributes:
        mixture ([`~trl.DatasetMixtureConfig`]):
            Datasets to train on, in place of `dataset_name`. Filled in by `parse_training_args`.
        settings (`dict[str, Any]`):
            What files and flags set, merged. Filled in by `parse_training_args`.
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
        metadata={"help": "Estimator of the advantages: 'grpo' or 'rloo'.", "choices": ["grpo", "rloo"]},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Training data: a hub name, a JSON-lines or Parquet file, or a folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on. Without it there is no evaluation set."}
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read rows as they are needed. Not for gold answers."}
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
            "help": "Column of the problems, if the dataset is of none of the known schemas and has no column "
            "`prompt`. An `eval_dataset_name` must be of a known one."
        },
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column of the gold answers, for rewards that read `solution`, likewise."}
    )
    instruction: str | None = field(
        default=None, metadata={"help": "Text added to every problem or prompt, such as how to mark the final answer."}
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
            "help": "Reward functions: `math_accuracy`, dotted import paths such as `my_lib.rewards.custom_reward`, or "
            "calls of what makes one: `my_lib.length_penalty(limit=512)`."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model, a hub name or a folder."}
    )
    ignore_bias_buffers: bool = field(default=False, metadata={"help": "Without effect, as in `trl grpo`."})
    resume: bool = field(
        default=False,
        metadata={"help": "Continue from the newest complete checkpoint in `output_dir`, or start if there is none."},
    )
    mixture: Any = field(init=False, repr=False, default=None)
    settings: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

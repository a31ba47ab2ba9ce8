"""Arguments of a training run, next to those of its trainer and its model."""

from dataclasses import dataclass, field
from typing import Any

from troll_trl.fields import document, setting


@document
@dataclass
class TrollScriptArguments:
    """
    Arguments of a training run, next to those of the trainer and the model.

    `parse_training_args` fills in `mixture`, the [`~trl.DatasetMixtureConfig`] to train on in place of `dataset_name`,
    and `settings`, what files and flags set, merged.
    """

    method: str = setting(
        "troll",
        "'troll' for the trust region, 'clip' for TRL's own trainer on the same settings.",
        choices=["troll", "clip"],
    )
    algorithm: str = setting("grpo", "Estimator of the advantages: 'grpo' or 'rloo'.", choices=["grpo", "rloo"])
    dataset_name: str | None = setting(
        None,
        "Training data: a hub name, a JSON-lines or Parquet file, or a folder. Or a mixture, in TRL's `datasets`.",
    )
    dataset_config: str | None = setting(None, "Configuration name of a hub dataset.")
    dataset_train_split: str = setting("train", "Split to train on, or a part of it, such as `train[:90%%]`.")
    dataset_test_split: str | None = setting(
        None, "Split, or part of one, to evaluate on. Without it there is no evaluation set."
    )
    dataset_streaming: bool = setting(False, "Read rows as the training needs them. Not for gold answers.")
    eval_dataset_name: str | None = setting(None, "Evaluation data, if it is not another split of `dataset_name`.")
    eval_dataset_config: str | None = setting(
        None,
        "Configuration name of the evaluation dataset. If both are the same dataset, the default is `dataset_config`.",
    )
    problem_column: str | None = setting(
        None,
        "Column of the problems, if the dataset has none of the known schemas and no column `prompt`. An "
        "`eval_dataset_name` must have a known schema.",
    )
    answer_column: str | None = setting(
        None,
        "Column of the gold answers, for `math_accuracy` and other rewards that read `solution`, if the dataset has "
        "none of the known schemas.",
    )
    instruction: str | None = setting(
        None, "Text added to every problem or prompt, such as how to mark the final answer."
    )
    system_prompt: str | None = setting(None, "System message before every problem.")
    row_filter: str | None = setting(
        None,
        "column=value: train only on rows with this text in this column, such as ability=math. It does not filter an "
        "`eval_dataset_name`.",
    )
    max_prompt_tokens: int | None = setting(
        None, "Drop prompts of more tokens, with a warning that counts them. None is cut."
    )
    max_train_samples: int | None = setting(None, "Train only on this many problems, the first.")
    max_eval_samples: int | None = setting(None, "Evaluate only on this many problems, the first.")
    reward_funcs: list[str] = setting(
        help="Reward functions: `math_accuracy` (the default without a reward model), dotted import paths such as "
        "`my_lib.rewards.custom_reward`, or calls of what makes one: `my_lib.length_penalty(limit=512)`.",
        default_factory=lambda: ["math_accuracy"],
    )
    reward_model_name_or_path: str | None = setting(None, "Reward model, a hub name or a folder.")
    ignore_bias_buffers: bool = setting(False, "Without effect, as in `trl grpo`.")
    resume: bool = setting(
        False,
        "Continue from the newest complete checkpoint in `output_dir`, or start if there is none: for a job that its "
        "cluster may start again.",
    )
    mixture: Any = field(init=False, repr=False, default=None)
    settings: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

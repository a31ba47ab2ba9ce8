"""
Train a language model with TROLL, or with TRL's clip, on problems with known answers.

    python scripts/train.py --config configs/qwen3-0.6b/gsm8k.yaml --learning_rate 2e-6
    accelerate launch --config_file configs/accelerate/ddp.yaml scripts/train.py --config ... --method clip
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import yaml
from transformers import AutoTokenizer, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, get_peft_config, get_quantization_config

from troll_trl import TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.cli.memory import PeakMemory
from troll_trl.cli.progress import ProgressLine
from troll_trl.cli.settings.parser import TrollScriptArguments, parse_training_args
from troll_trl.data import load_math_dataset
from troll_trl.data.problems import report_overlap
from troll_trl.resilience.checkpoint import CheckpointMixin

# Of each `algorithm` and `method`
TRAINERS = {
    ("grpo", "troll"): TrollGRPOTrainer,
    ("grpo", "clip"): GRPOTrainer,
    ("rloo", "troll"): TrollRLOOTrainer,
    ("rloo", "clip"): RLOOTrainer,
}
REWARD_FUNCTIONS = {
    "math_accuracy": "troll_trl.rewards.math_accuracy_reward",
    # The names that `trl grpo` knows
    "accuracy_reward": "trl.rewards.accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
}


def load_reward_function(name: str) -> Callable:
    path = REWARD_FUNCTIONS.get(name, name)
    if "." not in path:
        raise ValueError(
            f"`reward_funcs` names {name!r}, which is none of {', '.join(REWARD_FUNCTIONS)} and no dotted import path "
            "such as my_lib.rewards.custom_reward."
        )
    module, _, attribute = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module), attribute, None)
    if function is None:
        raise ValueError(f"`reward_funcs` names {name!r}, but the module {module} has no {attribute!r}.")
    return function


def load_datasets(script_args: TrollScriptArguments, training_args: GRPOConfig, model_args: ModelConfig):
    prompt = {"instruction": script_args.instruction, "system_prompt": script_args.system_prompt}
    if script_args.max_prompt_tokens is not None:
        prompt |= {
            "max_prompt_tokens": script_args.max_prompt_tokens,
            "chat_template_kwargs": training_args.chat_template_kwargs,
            "tokenizer": AutoTokenizer.from_pretrained(
                model_args.model_name_or_path,
                revision=model_args.model_revision,
                trust_remote_code=training_args.trust_remote_code,
            ),
        }
    columns = {"problem_column": script_args.problem_column, "answer_column": script_args.answer_column}
    train_dataset = load_math_dataset(
        script_args.dataset_name,
        script_args.dataset_train_split,
        script_args.dataset_config,
        max_samples=script_args.max_train_samples,
        row_filter=script_args.row_filter,
        **columns,
        **prompt,
    )
    if training_args.eval_strategy == "no":
        return train_dataset, None
    another = script_args.eval_dataset_name is not None
    eval_dataset = load_math_dataset(
        script_args.eval_dataset_name if another else script_args.dataset_name,
        script_args.dataset_test_split,
        script_args.eval_dataset_config if another else script_args.dataset_config,
        max_samples=script_args.max_eval_samples,
        **({} if another else columns | {"row_filter": script_args.row_filter}),
        **prompt,
    )
    report_overlap(train_dataset, eval_dataset)
    return train_dataset, eval_dataset


def check_checkpoint(resume: str | bool | None, output_dir: str):
    """Before the model is loaded: whether there is anything to resume from."""
    folder = output_dir if resume is True else resume
    if folder and not (Path(folder).is_dir() and (resume is not True or get_last_checkpoint(folder))):
        raise ValueError(f"`resume_from_checkpoint` is {resume!r}, but there is no checkpoint in {folder}.")


def find_checkpoint(trainer: GRPOTrainer | RLOOTrainer, resume: bool) -> str | None:
    """The checkpoint to go on from. With `resume`, the newest complete one, if any."""
    args = trainer.args
    if isinstance(trainer, CheckpointMixin):
        return trainer.find_checkpoint("newest" if resume else args.resume_from_checkpoint)
    if resume or args.resume_from_checkpoint is True:  # TRL's own trainer does not know which are complete
        return get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    return args.resume_from_checkpoint or None


def save_settings(settings: dict, output_dir: str):
    # The folder may be uploaded, and these may hold secrets
    shown = {name: value for name, value in settings.items() if name not in ("env", "hub_token")}
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    text = "# All settings of the files and flags of this run, but for `env` and `hub_token`.\n" + yaml.safe_dump(
        shown, sort_keys=False, allow_unicode=True
    )
    Path(output_dir, "config.yaml").write_text(text, encoding="utf-8")


def make_trainer(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> GRPOTrainer | RLOOTrainer:
    name = model_args.model_name_or_path
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise FileNotFoundError(f"`model_name_or_path`: there is no folder {name} (working folder: {os.getcwd()}).")
    check_checkpoint(training_args.resume_from_checkpoint, training_args.output_dir)
    reward_funcs = [load_reward_function(function) for function in script_args.reward_funcs]
    train_dataset, eval_dataset = load_datasets(script_args, training_args, model_args)
    # As in TRL's scripts/grpo.py
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return TRAINERS[script_args.algorithm, script_args.method](
        model=name,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def main():
    # TRL 1.16 sets the option by the name that transformers 5.23 deprecates: nothing that a user could change
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
    script_args, training_args, model_args = parse_training_args()
    try:
        trainer = make_trainer(script_args, training_args, model_args)
        checkpoint = find_checkpoint(trainer, script_args.resume)
    except (ValueError, OSError, ImportError) as error:  # what a user can set right, without a traceback
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if training_args.process_index == 0:
        save_settings(script_args.settings, training_args.output_dir)
    trainer.add_callback(PeakMemory)
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressLine)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except FloatingPointError as error:  # says what was not finite, and where; every rank raises it
        if training_args.process_index == 0:
            print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


if __name__ == "__main__":
    main()

"""From settings to a trainer: refuses mistakes of the user, then loads rewards and data."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

from troll_trl import TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.cli.reward_functions import check_columns, load_reward_functions
from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.training_data import load_datasets
from troll_trl.evaluation.models import check_model

# By `algorithm` and `method`
TRAINERS = {
    ("grpo", "troll"): TrollGRPOTrainer,
    ("grpo", "clip"): GRPOTrainer,
    ("rloo", "troll"): TrollRLOOTrainer,
    ("rloo", "clip"): RLOOTrainer,
}


def check_model_name(name: str, revision: str | None, trust_remote_code: bool, key: str = "model_name_or_path") -> None:
    """Refuse a model that is neither a folder nor on the hub."""
    if Path(name).is_dir():
        return
    check_model(name, key)
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(
            f"`{key}`: there is no folder {name} (working folder: {Path.cwd()}), and the hub gives no model of this "
            f"name: {reason}"
        ) from None


def check_trainer_settings(args: GRPOConfig | RLOOConfig):
    """Before anything is loaded: refuse folders, packages and schedules with which the Trainer would fail later."""
    if Path(args.output_dir).is_file():
        raise FileExistsError(f"`output_dir` is a file: {args.output_dir}. Name a folder, which need not exist.")
    if args.use_vllm and not is_vllm_available():
        completions = args.generation_batch_size // args.world_size
        raise ImportError(
            "`use_vllm` is true, but vLLM is not installed: pip install 'troll-trl[vllm]', without constraints.txt (it "
            f"has its own torch). With `use_vllm: false` a process generates {completions} completions at once, "
            "and holds keys and values of all: then lower `generation_batch_size` as well."
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("`use_liger_kernel` is true, but liger-kernel is missing: pip install it, or set false.")
    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except RuntimeError as error:
        raise ImportError(f"`report_to`: {error} Or leave it out.") from None
    with suppress(ValueError):  # some optimizers ask for the model
        Trainer.get_optimizer_cls_and_kwargs(args)
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 1, args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`lr_scheduler_type: {args.lr_scheduler_type.value}` does not go with `lr_scheduler_kwargs: "
            f"{args.lr_scheduler_kwargs}`: {error}."
        ) from None


def make_trainer(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> GRPOTrainer | RLOOTrainer:
    check_model_name(model_args.model_name_or_path, model_args.model_revision, training_args.trust_remote_code)
    reward_funcs: list[Any] = [*load_reward_functions(script_args.reward_funcs)]
    if script_args.reward_model_name_or_path is not None:
        check_model_name(
            script_args.reward_model_name_or_path, None, training_args.trust_remote_code, "reward_model_name_or_path"
        )
        reward_funcs.insert(0, script_args.reward_model_name_or_path)
    train_dataset, eval_dataset = load_datasets(script_args, training_args, model_args)
    for data, dataset in (("the training data", train_dataset), ("the evaluation data", eval_dataset)):
        for function in reward_funcs:
            if callable(function) and dataset is not None and dataset.column_names:
                check_columns(function, dataset.column_names, data)
    prompts = training_args.generation_batch_size // training_args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:
        raise ValueError(
            f"The training data have {len(train_dataset)} prompts, and a rollout batch takes {prompts} "
            f"(`generation_batch_size` {training_args.generation_batch_size} over `num_generations` "
            f"{training_args.num_generations}): nothing would be trained. Give more data, or make the batch smaller."
        )
    # As in TRL's scripts/grpo.py
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return TRAINERS[script_args.algorithm, script_args.method](
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )

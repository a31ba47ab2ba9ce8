"""Makes a trainer of settings: refuses mistakes of the user, then loads rewards and data."""

from typing import Any

import transformers
from datasets import Dataset
from transformers import AutoConfig
from transformers.integrations import get_reporting_integration_callbacks
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, get_peft_config, get_quantization_config

from math_answers.models import adapter_settings, check_model, check_quantization
from troll_trl import TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.cli.reward_functions import check_reward_function, load_reward_function
from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.training_data import load_datasets
from troll_trl.trainers.clip import ClipGRPOTrainer, ClipRLOOTrainer
from troll_trl.trainers.reward_models import whole_reward_models

# The keys are `algorithm` and `method`
TRAINERS: dict[tuple[str, str], Any] = {
    ("grpo", "troll"): TrollGRPOTrainer,
    ("grpo", "clip"): ClipGRPOTrainer,
    ("rloo", "troll"): TrollRLOOTrainer,
    ("rloo", "clip"): ClipRLOOTrainer,
}


def make_trainer(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> GRPOTrainer | RLOOTrainer:
    model, revision = str(model_args.model_name_or_path), model_args.model_revision
    if adapter := adapter_settings(check_model(model, "model_name_or_path", revision)):
        raise ValueError(
            f"`model_name_or_path`: {model} is an adapter, and training starts from a whole model. Merge the adapter "
            f"into {adapter['base_model_name_or_path']} (`merge_and_unload` of PEFT), or train a new adapter of that "
            "model with `--use_peft`. `--resume` continues the adapter's own run."
        )
    # A wrong hub name is refused here, not after minutes of reading data
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=training_args.trust_remote_code)
    _check_architecture(model, config)
    quantization = _quantization(model, config, model_args)
    try:
        for callback in get_reporting_integration_callbacks(training_args.report_to):
            callback()
    except RuntimeError as error:  # a package is missing
        raise ImportError(f"`report_to`: {error}") from None
    reward_funcs: list[Any] = [load_reward_function(name) for name in script_args.reward_funcs]
    train_dataset, eval_dataset = load_datasets(script_args, training_args, model_args)
    for data, dataset in (("the training data", train_dataset), ("the evaluation data", eval_dataset)):
        for function in reward_funcs:
            if dataset is not None and dataset.column_names:
                check_reward_function(function, dataset.column_names, data)
    if script_args.reward_model_name_or_path is not None:
        check_model(script_args.reward_model_name_or_path, "reward_model_name_or_path")
        reward_funcs.insert(0, script_args.reward_model_name_or_path)
    prompts = training_args.generation_batch_size // training_args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:
        raise ValueError(
            f"The training data have {len(train_dataset)} prompts, and a rollout batch takes {prompts} "
            f"(`generation_batch_size` {training_args.generation_batch_size} over `num_generations` "
            f"{training_args.num_generations}): nothing would be trained. Give more data, or make the batch smaller."
        )
    # TRL's scripts/grpo.py does the same
    training_args.model_init_kwargs = {
        "revision": revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    try:
        return TRAINERS[script_args.algorithm, script_args.method](
            model=model,
            reward_funcs=whole_reward_models(reward_funcs, training_args),
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=quantization,
            peft_config=get_peft_config(model_args),
        )
    except TypeError as error:
        if any(f"unexpected keyword argument '{name}'" in str(error) for name in training_args.model_init_kwargs):
            raise ValueError(f"`model_init_kwargs`: {error}.") from error
        raise


def _check_architecture(model: str, config: Any) -> None:
    """Refuse a class that generates no text. A class of the checkpoint's own code passes."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)  # TRL loads this class
    if architecture is not None and not architecture.can_generate():
        raise ValueError(
            f"`model_name_or_path`: {model} is a {architecture.__name__}, which generates no text. Give a language "
            "model."
        )


def _quantization(model: str, config: Any, model_args: ModelConfig) -> Any:
    """Return how to quantise the weights of a model, or `None`. Refuses, before the data are read, quantised weights
    that this machine cannot load, or that no optimizer trains."""
    quantization = get_quantization_config(model_args)
    quantizer = check_quantization(model, config, quantization, "model_name_or_path")
    if quantizer is None or getattr(quantizer.quantization_config, "dequantize", False):
        return quantization
    if not (quantizer.is_qat_trainable or (quantizer.is_trainable and model_args.use_peft)):
        cure = "Train an adapter on them: `--use_peft`." if quantizer.is_trainable else "Start from whole weights."
        method = quantizer.quantization_config.quant_method
        raise ValueError(
            f"`model_name_or_path`: the weights of {model} are quantised ({method}), and not trained. {cure}"
        )
    return quantization

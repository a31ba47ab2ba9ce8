"""Makes a trainer from arguments: refuses a user's mistakes, then loads rewards and data."""

import inspect
from functools import partial
from typing import Any

from datasets import Dataset
from transformers.integrations import get_reporting_integration_callbacks
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, get_peft_config, get_quantization_config

from troll_trl import TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.cli.reward_functions import check_signature, load_reward_function
from troll_trl.cli.training_data import load_datasets
from troll_trl.evaluation.model_facts import adapter_settings, check_model
from troll_trl.rewards import answer_format_reward, math_accuracy_reward
from troll_trl.rewards.answers import opened_thought, thought_decoder
from troll_trl.trainers.clip import ClipGRPOTrainer, ClipRLOOTrainer

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
    """Make the trainer that the arguments ask for, with its model and data."""
    if training_args.max_steps == 0 or (training_args.max_steps < 0 and training_args.num_train_epochs <= 0):
        name = "max_steps" if training_args.max_steps == 0 else "num_train_epochs"
        raise ValueError(f"`{name}` is {getattr(training_args, name)}: nothing would be trained. It must be positive.")
    model, revision = str(model_args.model_name_or_path), model_args.model_revision
    if adapter := adapter_settings(check_model(model, "model_name_or_path", revision)):
        raise ValueError(
            f"`model_name_or_path`: {model} is an adapter, and training starts from a whole model. Merge the adapter "
            f"into {adapter['base_model_name_or_path']} (`merge_and_unload` of PEFT), or train a new adapter of that "
            "model with `--use_peft`. `--resume` continues the adapter's own run."
        )
    try:
        for callback in get_reporting_integration_callbacks(training_args.report_to):
            callback()
    except RuntimeError as error:  # a package is missing
        raise ImportError(f"`report_to`: {error}") from None
    functions = [load_reward_function(name) for name in script_args.reward_funcs]
    reward_funcs: list[Any] = [*functions]
    if script_args.reward_model_name_or_path is not None:
        check_model(script_args.reward_model_name_or_path, "reward_model_name_or_path")
        reward_funcs.insert(0, script_args.reward_model_name_or_path)
    train_dataset, eval_dataset = load_datasets(script_args, training_args, model_args)
    for name, function in zip(script_args.reward_funcs, functions, strict=True):
        for dataset in (train_dataset, eval_dataset):
            if dataset is not None:
                check_signature(name, function, dataset.column_names)
    prompts = training_args.generation_batch_size // training_args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:  # the sampler would draw none
        raise ValueError(
            f"The training data have {len(train_dataset)} prompts, and a rollout batch takes {prompts} "
            f"(`generation_batch_size` {training_args.generation_batch_size} over `num_generations` "
            f"{training_args.num_generations}). Give more data, or make the batch smaller."
        )
    # TRL's scripts/grpo.py does the same
    training_args.model_init_kwargs = {
        "revision": revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = TRAINERS[script_args.algorithm, script_args.method](
        model=model,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    restore_thought_tag(trainer)
    return trainer


def restore_thought_tag(trainer: GRPOTrainer | RLOOTrainer) -> None:
    """Let our rewards read the tags of thoughts that TRL's completions lack: a tag that the prompt ends with, and tags
    that are special tokens. Without them, an answer in a thought that is cut off would be rewarded."""
    readers = (math_accuracy_reward, answer_format_reward)
    ours = [reward for reward in trainer.reward_funcs if inspect.unwrap(reward) in readers]  # the guard wraps them
    if not ours:
        return
    tokenizer: Any = trainer._tokenizer
    prompt = next(iter(trainer.train_dataset))["prompt"]
    if not isinstance(prompt, str):
        parses_thoughts = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if parses_thoughts and isinstance(trainer, GRPOTrainer):  # RLOO parses nothing
            return
        options = {"tokenize": False, "add_generation_prompt": True, **(trainer.args.chat_template_kwargs or {})}
        prompt = trainer.processing_class.apply_chat_template(prompt, **options)
    tag, decode = opened_thought(prompt), thought_decoder(tokenizer)

    def read(reward, completions, completion_ids, **kwargs):
        texts = [tag + decode(ids) for ids in completion_ids]
        return reward(completions=texts, completion_ids=completion_ids, **kwargs)

    trainer.reward_funcs = [partial(read, reward) if reward in ours else reward for reward in trainer.reward_funcs]

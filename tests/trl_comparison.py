"""Short runs of a trainer on a tiny model, and how two of them compare."""

from tiny import tiny_model, tiny_prompts, tiny_tokenizer, token_reward


def make_trainer(
    trainer_class,
    config_class,
    tmp_path,
    model=None,
    architecture="qwen3",
    reward=token_reward,
    dataset=None,
    eval_dataset=None,
    tokenizer=None,
    reward_processing_classes=None,
    peft_config=None,
    quantization_config=None,
    rollout_func=None,
    tools=None,
    environment_factory=None,
    **options,
):
    """A trainer on a tiny model; what is not named here is an option of its config."""
    only_grpo = {"rollout_func": rollout_func, "tools": tools, "environment_factory": environment_factory}
    options = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 8,
        "seed": 3,
        **options,
    }
    return trainer_class(
        model=model or tiny_model(architecture),
        reward_funcs=reward,
        args=config_class(**options),
        train_dataset=dataset or tiny_prompts(),
        eval_dataset=eval_dataset or (tiny_prompts(8) if "eval_strategy" in options else None),
        processing_class=tokenizer or tiny_tokenizer(),
        reward_processing_classes=reward_processing_classes,
        peft_config=peft_config,
        quantization_config=quantization_config,
        **{name: value for name, value in only_grpo.items() if value is not None},
    )


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def logged(trainer, key):
    return [line[key] for line in trainer.state.log_history if key in line]


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_movement(start, expected, actual):
    movement = max((expected[name] - start[name]).abs().max().item() for name in start)
    difference = max((expected[name] - actual[name]).abs().max().item() for name in start)
    assert movement > 1e-3, "TRL's trainer has not moved"
    assert difference <= 2e-3 * movement, f"weights differ by {difference:.2e} after moving {movement:.2e}"

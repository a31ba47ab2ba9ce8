"""Short runs of a trainer on a tiny model, and how two of them compare."""

import math

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.tiny import tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer

WITHOUT_CLIP = {"epsilon": math.inf, "epsilon_high": math.inf}
OPEN_BOUND = {"kl_bound": math.inf, "regression_coef": 0.0}
COSTS = ("runtime", "per_second", "step_time", "minutes", "gib")  # how names end of what differs between equal runs
OURS = {"grpo": (TrollGRPOTrainer, TrollGRPOConfig), "rloo": (TrollRLOOTrainer, TrollRLOOConfig)}
# Of each algorithm: TRL's trainer without a clip, and ours with the bound open, which must do the same
EQUIVALENT = {
    "grpo": ((GRPOTrainer, GRPOConfig, WITHOUT_CLIP), (TrollGRPOTrainer, TrollGRPOConfig, OPEN_BOUND)),
    "rloo": ((RLOOTrainer, RLOOConfig, WITHOUT_CLIP), (TrollRLOOTrainer, TrollRLOOConfig, OPEN_BOUND)),
}
# The same for a mask whose bound is never reached
OPEN_MASK = {"trust_region": "mask", "divergence_type": "binary_kl", "divergence_bound": math.inf}
EQUIVALENT["mask"] = (EQUIVALENT["grpo"][0], (TrollGRPOTrainer, TrollGRPOConfig, OPEN_MASK))


def make_trainer(
    trainer_class,
    config_class,
    tmp_path,
    model=None,
    reward=token_reward,
    dataset=None,
    eval_dataset=None,
    tokenizer=None,
    reward_processing_classes=None,
    peft_config=None,
    quantization_config=None,
    rollout_func=None,
    tools=None,
    **options,
):
    """A trainer on a tiny model; what is not named here is an option of its config."""
    only_grpo = {"rollout_func": rollout_func, "tools": tools}
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
        model=model or tiny_model(),
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


def train_both(algorithm, tmp_path, make_model=None, **options):
    """Return the weights at the start, and both trainers of `EQUIVALENT` after the same run."""
    runs = []
    for trainer_class, config_class, extra in EQUIVALENT[algorithm]:
        model = make_model() if make_model else None
        trainer = make_trainer(trainer_class, config_class, tmp_path, model, **options, **extra)
        start = weights(trainer)
        trainer.train()
        runs.append(trainer)
    return start, *runs


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def micro_batch(trainer, number=0):
    """Return a copy of one of the rollout batch's, as the loss takes it."""
    return dict(trainer._buffered_inputs[number])


def off_policy(algorithm, tmp_path, **options):
    """Train a few updates. Return the trainer and a micro-batch whose old policy is behind the current one, with
    advantages of either sign."""
    options = {"kl_bound": 0.01, "learning_rate": 2e-2, "max_steps": 3} | options
    if algorithm == "rloo":
        options = {"beta": 0.0} | options
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.train()
    inputs = micro_batch(trainer)
    inputs["advantages"] = inputs["advantages"] * torch.tensor([-1.0, 1.0]).repeat(len(inputs["advantages"]) // 2)
    trainer.model.train()
    trainer.troll_metrics["train"].pop()
    return trainer, inputs


def logged(trainer, key):
    return [line[key] for line in trainer.state.log_history if key in line]


def assert_same_movement(start, expected, actual):
    """Within 2e-3 of the largest movement and, for weights in half precision, one rounding of a weight."""
    movement = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert movement > 1e-3, "TRL's trainer has not moved"
    for name, weight in expected.items():
        difference = (weight - actual[name]).abs().max().item()
        rounding = torch.finfo(weight.dtype).eps * weight.abs().max().item() if weight.is_floating_point() else 0.0
        assert difference <= 2e-3 * movement + rounding, f"{name} differs by {difference:.2e}, moved {movement:.2e}"


def log_of(trainer) -> list[dict]:
    """Log lines without times and memory."""
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: value for name, value in line.items() if not name.endswith(COSTS)} for line in lines]


def assert_same_run(expected, actual):
    assert actual.state.global_step == expected.state.global_step
    assert log_of(actual) == log_of(expected)
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(actual)[name]), name

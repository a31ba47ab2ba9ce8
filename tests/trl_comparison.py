"""Short runs of a trainer on a tiny model, and how two of them compare."""

import math

import pytest
import torch
from references import reference_project
from tiny import tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer

WITHOUT_CLIP = {"epsilon": math.inf, "epsilon_high": math.inf}
OPEN_BOUND = {"kl_bound": math.inf, "regression_coef": 0.0}
OURS = {"grpo": (TrollGRPOTrainer, TrollGRPOConfig), "rloo": (TrollRLOOTrainer, TrollRLOOConfig)}
# Of each algorithm: TRL's trainer without a clip, and ours with the bound open, which must do the same
EQUIVALENT = {
    "grpo": ((GRPOTrainer, GRPOConfig, WITHOUT_CLIP), (TrollGRPOTrainer, TrollGRPOConfig, OPEN_BOUND)),
    "rloo": ((RLOOTrainer, RLOOConfig, WITHOUT_CLIP), (TrollRLOOTrainer, TrollRLOOConfig, OPEN_BOUND)),
}
# The same of masks whose bound is never reached
OPEN_MASKS = {
    f"{kind}": (
        EQUIVALENT["grpo"][0],
        (
            TrollGRPOTrainer,
            TrollGRPOConfig,
            {"trust_region": "mask", "divergence_type": kind, "divergence_bound": bound},
        ),
    )
    for kind, bound in (("binary_tv", 1 - 1e-9), ("binary_kl", math.inf), ("topk_tv", 1 - 1e-9), ("topk_kl", math.inf))
}


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


def train_both(algorithm, tmp_path, make_model=None, **options):
    """The weights at the start, and both trainers of `EQUIVALENT` or `OPEN_MASKS` after the same run."""
    runs = []
    for trainer_class, config_class, extra in (EQUIVALENT | OPEN_MASKS)[algorithm]:
        model = make_model() if make_model else None
        trainer = make_trainer(trainer_class, config_class, tmp_path, model, **options, **extra)
        start = weights(trainer)
        trainer.train()
        runs.append(trainer)
    return start, *runs


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def micro_batch(trainer, number=0):
    """One of the rollout batch's, as the loss takes it."""
    return dict(trainer._buffered_inputs[number])


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


def assert_gradient_is_a_finite_difference(trainer, inputs):
    """Of the loss along the gradient in one weight. The trainer has no regression, whose target is held fixed."""
    model = trainer.model.train()
    model.zero_grad()
    trainer.compute_loss(model, inputs).backward()
    parameter = model.model.layers[0].mlp.up_proj.weight
    gradient, losses = parameter.grad, []
    with torch.no_grad():
        for step in (1e-2, -2e-2):
            parameter.add_(step * gradient / gradient.norm())
            losses.append(trainer.compute_loss(model, inputs).item())
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(gradient.norm().item(), rel=0.05)


def reference_tokens(trainer, inputs):
    """
    For every live token of a micro-batch: its row and position, policy, old policy and projection as float64
    log-probabilities over the old support and the rest, and whether it was projected. The policy comes from full
    logits, the projection from an independent root-finder.
    """
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    for b, t in inputs["completion_mask"].nonzero().tolist():
        support, old = inputs["old_token_ids"][b, t], inputs["old_sparse_logps"][b, t].double()
        kept = support[support >= 0].long()
        p_full = torch.log_softmax(logits[b, t].double(), -1)
        others = [v for v in range(len(p_full)) if v not in kept.tolist()]
        p = torch.cat([p_full[kept], p_full[others].logsumexp(0, keepdim=True)])
        q = torch.cat([old[: len(kept)], old[-1:]])
        t_solution, pi = reference_project(p.numpy(), q.numpy(), trainer.args.kl_bound)
        yield b, t, p, q, torch.as_tensor(pi), t_solution < 1

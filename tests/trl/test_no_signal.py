"""Without a learning signal no weight moves: what is zero by definition has a gradient of zero, and not its rounding,
which Adam would scale up to full steps."""

import pytest
import torch
from peft import LoraConfig

from tests.tiny import saved_model, tiny_model, token_reward
from tests.trl_comparison import OURS, logged, make_trainer, weights
from troll_trl.trainers.loss import ignore_rounding, rescale_kl


def no_reward(completion_ids, **kwargs) -> list[float]:
    return [0.0] * len(completion_ids)


def moved(folder, algorithm="grpo", reward=no_reward, **options) -> list[str]:
    """Names of the weights that are not bit for bit what they were, after 6 updates on 2 rollout batches."""
    trainer = make_trainer(*OURS[algorithm], folder, reward=reward, **{"max_steps": 6, **options})
    start = weights(trainer)
    trainer.train()
    assert logged(trainer, "troll/skipped_updates") == [0] * 6, "a skipped update moves nothing either"
    return [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])]


RUNS = {
    "dapo": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.04},
    "reference_kl_bf16": {"beta": 0.04, "use_bias_correction_kl": False, "bf16": True},
    "reference_kl_idle": {"beta": 0.04, "steps_per_generation": 1},
    "mask": {"trust_region": "mask", "beta": 0.04},
    "penalty": {"trust_region": "penalty", "kl_bound": 0.0, "beta": 0.04},
    "penalty_topk": {"trust_region": "penalty", "divergence_type": "topk_kl", "kl_bound": 0.0},
    "rloo": {"algorithm": "rloo", "normalize_advantages": True},  # its `beta` is 0.05
}


@pytest.mark.parametrize("name", RUNS)
def test_without_a_reward_no_weight_moves(name, tmp_path):
    model = saved_model(tmp_path / "model")  # where a reference comes from
    assert moved(tmp_path / "run", model=model, **RUNS[name]) == []


def test_with_lora_and_a_reference(tmp_path):
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian")
    assert moved(tmp_path, peft_config=adapter, beta=0.04) == []


def test_with_weights_in_bfloat16(tmp_path):
    assert moved(tmp_path, model=tiny_model().to(torch.bfloat16), bf16=True) == []


def test_the_runs_above_can_fail(tmp_path):
    assert moved(tmp_path, reward=token_reward), "with a reward the weights move"


def test_differences_of_rounding_are_none_and_larger_ones_stay():
    policy = torch.tensor([-0.1, -30.0, -0.1, -30.0, 0.0])
    reference = policy + torch.tensor([5e-7, 4e-6, 1e-4, 1e-3, 5e-6])
    expected = torch.stack([policy[0], policy[1], reference[2], reference[3], policy[4]])
    assert torch.equal(ignore_rounding(reference, policy), expected)


@pytest.mark.parametrize("log_scale", [-30.0, -5.0, -0.1, 0.3, 4.0])
def test_a_rescaled_kl_is_the_scaled_one(log_scale):
    """Value and both gradients, from float64."""
    log_ratio = torch.cat(
        [torch.linspace(-50, 20, 700), torch.logspace(-3, 0, 50), -torch.logspace(-3, 0, 50), torch.zeros(1)]
    )
    kl = lambda d: d.expm1() - d
    results = []
    for dtype, scaled in (
        (torch.float32, lambda d, scale: kl(rescale_kl(d, scale).double())),
        (torch.float64, lambda d, scale: kl(d) * scale.exp()),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (log_ratio, torch.full_like(log_ratio, log_scale))]
        value = scaled(*leaves)
        results.append([value, *torch.autograd.grad(value.sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=1e-8)

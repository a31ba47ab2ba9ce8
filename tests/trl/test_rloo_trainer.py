"""TrollRLOOTrainer against TRL's RLOOTrainer, and its loss against an independent computation."""

import pytest
import torch
from tiny import saved_model
from trl import GRPOConfig, RLOOConfig
from trl_comparison import (
    assert_same_movement,
    logged,
    make_trainer,
    micro_batch,
    reference_tokens,
    train_both,
    weights,
)

from troll_trl import TrollRLOOConfig, TrollRLOOTrainer

OPTIONS = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 6},
    "normalized": {"normalize_advantages": True},
    "clipped_rewards": {"reward_clip_range": (0.4, 0.5)},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 48},  # some end in every update
    "temperature": {"temperature": 0.7},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
    "reference_kl": {"beta": 0.5},
    "reference_kl_idle": {"beta": 0.5, "steps_per_generation": 1, "max_steps": 4},
}


# The others are of what GRPO has too
OWN = ("default", "normalized", "clipped_rewards", "reference_kl")


@pytest.mark.parametrize(
    "name", [*OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS if name not in OWN)]
)
def test_open_bound_without_regression_is_trl_without_a_clip(name, tmp_path):
    options = {"max_steps": 5} | OPTIONS[name]
    path = saved_model(tmp_path / "model")
    start, trl, troll = train_both("rloo", tmp_path, lambda: path, **options)
    assert_same_movement(start, weights(trl), weights(troll))
    if "beta" in options:
        assert logged(troll, "kl") == pytest.approx(logged(trl, "kl"), rel=1e-3, abs=1e-6)


def test_loss_of_a_completion(tmp_path):
    """−exp(Σ log π(a) − log q(a))·A + α·Σ KL(p ‖ π), from full logits and an independent root-finder."""
    trainer = make_trainer(
        TrollRLOOTrainer,
        TrollRLOOConfig,
        tmp_path,
        kl_bound=0.01,
        regression_coef=0.5,
        support_size=12,
        tail_mass=1e-3,
        learning_rate=2e-2,
        max_steps=3,
        beta=0.0,
    )
    trainer.train()
    inputs = micro_batch(trainer)
    inputs["advantages"][::2] *= -1  # so that of the projected tokens some have moved against their advantage
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)

    log_ratio = torch.zeros(len(inputs["advantages"]), dtype=torch.float64)
    regression, projected = log_ratio.clone(), 0
    for b, _, p, q, pi, is_projected in reference_tokens(trainer, inputs):
        projected += is_projected
        log_ratio[b] += pi[0] - q[0]
        regression[b] += (p.exp() * (p - pi)).sum()
    expected = (-log_ratio.exp() * inputs["advantages"] + 0.5 * regression).mean()
    assert projected >= 5, "the test needs projected tokens"
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-5)


def test_metrics_and_what_is_said(tmp_path, capsys):
    trainer = make_trainer(
        TrollRLOOTrainer, RLOOConfig, tmp_path, beta=0.0, learning_rate=2e-2, eval_strategy="steps", eval_steps=4
    )
    assert trainer.args.kl_bound == 0.05, "a plain RLOOConfig gets TROLL's defaults"
    said = "8 prompts x 4 completions per rollout batch, 4 updates per rollout batch, up to 64 tokens"
    assert said in capsys.readouterr().out
    trainer.train()
    assert len(logged(trainer, "troll/kl_max")) == 8 and len(logged(trainer, "eval_troll/kl_max")) == 2
    assert 0.04 < max(logged(trainer, "troll/kl_max")) <= 0.05 * 1.001
    assert not any("clip_ratio" in key for line in trainer.state.log_history for key in line)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "2510.03817" in card and "becker2025troll" in card


def test_config_of_another_trainer_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"TrollRLOOConfig or a plain RLOOConfig, got .*GRPOConfig"):
        make_trainer(TrollRLOOTrainer, GRPOConfig, tmp_path)

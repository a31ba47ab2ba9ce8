"""An option that works with TRL's trainer does the same with ours. With the bound open and no regression, ours trains
the weights that TRL's trainer trains without a clip."""

import pytest
import torch
from transformers import Qwen3ForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny import SIZES, tiny_config, tiny_prompts, tiny_tokenizer, token_reward
from tests.trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def moe(**overrides):
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts | overrides))
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


# Options of the config, and what make_trainer takes beside them. One for each path of ours, and each shape of a batch
CASES = {
    "steps_above_accumulation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 5},
    "steps_below_accumulation": {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 4},
    "steps_across_accumulation": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6},
    "three_iterations": {"num_iterations": 3, "steps_per_generation": 2},
    "uneven_last_batch": {"dataset": tiny_prompts(11), "num_train_epochs": 2, "max_steps": -1},
    "streamed": {"dataset": tiny_prompts().to_iterable_dataset()},
    "several_rewards": {"reward": [token_reward, length_reward], "reward_weights": [1.0, 0.1]},
    "checkpointing": {"gradient_checkpointing": True},
    "moe_auxiliary_loss": {"make_model": moe, "router_aux_loss_coef": 0.5},
}
RLOO = ("steps_across_accumulation", "uneven_last_batch", "moe_auxiliary_loss")


def both(algorithm, tmp_path, case):
    return train_both(algorithm, tmp_path, **{"beta": 0.0, "steps_per_generation": 2, "max_steps": 4, **case})


@pytest.mark.parametrize(
    ("algorithm", "name"), [*(("grpo", name) for name in CASES), *(("rloo", name) for name in RLOO)]
)
def test_same_as_trl_without_a_clip(algorithm, name, tmp_path):
    start, trl, troll = both(algorithm, tmp_path, CASES[name])
    assert_same_movement(start, weights(trl), weights(troll))
    same = {"reward", "completions/mean_length", "aux_loss", "entropy", "frac_reward_zero_std"}
    for key in same & set(trl.state.log_history[0]):
        assert logged(troll, key) == pytest.approx(logged(trl, key), rel=1e-3, abs=1e-5), key


def test_reward_model(tmp_path):
    torch.manual_seed(1)
    judge = Qwen3ForSequenceClassification(tiny_config(num_labels=1))
    start, trl, troll = both("grpo", tmp_path, {"reward": judge, "reward_processing_classes": tiny_tokenizer()})
    assert_same_movement(start, weights(trl), weights(troll))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_evaluation_is_trls(algorithm, tmp_path):
    """What is sampled and rewarded in evaluation, before training and during it, with its own number of generations."""
    case = {"eval_dataset": tiny_prompts(8), "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    case |= {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
    if algorithm == "grpo":  # over completions, and so weighed as by TRL; a loss over tokens is not
        case["loss_type"] = "grpo"
    _, trl, troll = both(algorithm, tmp_path, case)
    assert len(logged(troll, "eval_reward")) == 3
    for key in ("eval_reward", "eval_completions/mean_length", "eval_entropy", "eval_loss"):
        assert logged(troll, key) == pytest.approx(logged(trl, key), rel=1e-3, abs=1e-5), key
    assert logged(troll, "eval_troll/projected_fraction") == [0.0, 0.0, 0.0]


def test_router_logits_in_the_config_are_off_in_generation(tmp_path):
    """With padding, the model's own load-balancing loss fails at a completion's second token."""
    model = moe(output_router_logits=True)
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, model, router_aux_loss_coef=0.5, max_steps=2)
    trainer.train()
    assert model.config.output_router_logits and len(logged(trainer, "aux_loss")) == 2

"""Every option that works with TRL's trainer does the same with ours: with the bound open and without the regression,
the trained weights are those of TRL's trainer without a clip. Names are those of docs/compatibility.md."""

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from tiny import tiny_config, tiny_prompts, tiny_tokenizer, token_reward
from transformers import Qwen3ForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def length_reward(completion_ids, **kwargs):
    return [len(ids) + ids[0] % 5 for ids in completion_ids]


def chats(rows=32):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": row["prompt"]}] for row in tiny_prompts(rows)]})


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}w2{% endif %}{% if loud %} w3{% endif %}"
    )
    return tokenizer


def moe(**overrides):
    torch.manual_seed(0)
    options = {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    config = Qwen3MoeConfig(**{**options, **overrides})
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


# Options of the config, and what make_trainer takes beside them
BATCHES = {
    "steps_above_accumulation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 5},
    "steps_below_accumulation": {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 4},
    "steps_across_accumulation": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6},
    "generation_batch_size": {"steps_per_generation": None, "generation_batch_size": 16},
    "three_iterations": {"num_iterations": 3, "steps_per_generation": 2},
    "group_larger_than_batch": {"num_generations": 8, "per_device_train_batch_size": 4},
    "uneven_last_batch": {"dataset": tiny_prompts(11), "num_train_epochs": 2, "max_steps": -1},
}
REWARDS = {
    "several_rewards_with_weights": {"reward": [token_reward, length_reward], "reward_weights": [1.0, 0.1]},
}
GRPO_ONLY = {"cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True}}
GENERATION = {
    "sampling_options": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    "chat_template": {"dataset": chats(), "tokenizer": chat_tokenizer(), "chat_template_kwargs": {"loud": True}},
}
MODEL = {
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing_reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "activation_checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "dropout_disabled": {"disable_dropout": True},
    "moe_auxiliary_loss": {"make_model": moe, "router_aux_loss_coef": 0.5},
    "moe_without_auxiliary_loss": {"make_model": moe, "router_aux_loss_coef": 0.0},
}
ALL = {**BATCHES, **REWARDS, **GENERATION, **MODEL}
CASES = [("grpo", name) for name in {**ALL, **GRPO_ONLY}]
CASES += [("rloo", name) for name in ("steps_across_accumulation", "uneven_last_batch", "moe_auxiliary_loss")]
SLOW = {"checkpointing_reentrant", "moe_without_auxiliary_loss", "group_larger_than_batch", "sampling_options"}
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] in SLOW)) for case in CASES]


def both(algorithm, tmp_path, case):
    return train_both(algorithm, tmp_path, **{"beta": 0.0, "steps_per_generation": 2, "max_steps": 4, **case})


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_same_as_trl_without_a_clip(algorithm, name, tmp_path):
    # By version: were the option renamed, this must fail
    if name == "activation_checkpointing" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("an option of transformers 5.23 and newer")
    start, trl, troll = both(algorithm, tmp_path, {**ALL, **GRPO_ONLY}[name])
    assert_same_movement(start, weights(trl), weights(troll))
    same = {"reward", "completions/mean_length", "aux_loss", "entropy", "first_token", "frac_reward_zero_std"}
    for key in same & set(trl.state.log_history[0]):
        assert logged(troll, key) == pytest.approx(logged(trl, key), rel=1e-3, abs=1e-5), key
    assert len(logged(troll, "troll/kl_max" if name != "steps_below_accumulation" else "troll/kl_mean")) >= 2


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_reward_model(algorithm, tmp_path):
    torch.manual_seed(1)
    judge = Qwen3ForSequenceClassification(tiny_config(num_labels=1))
    case = {"reward": judge, "reward_processing_classes": tiny_tokenizer()}
    start, trl, troll = both(algorithm, tmp_path, case)
    assert logged(troll, "reward") == pytest.approx(logged(trl, "reward"), rel=1e-3)
    assert_same_movement(start, weights(trl), weights(troll))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("iterable", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "iterable"])
def test_evaluation_is_trls(algorithm, iterable, tmp_path):
    """What is sampled and rewarded in evaluation, before training and during it, with its own number of generations."""
    dataset = tiny_prompts(8)
    case = {
        "eval_dataset": dataset.to_iterable_dataset() if iterable else dataset,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "num_generations_eval": 2,
        "per_device_eval_batch_size": 4,
    }
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


def test_evaluation_in_half_precision(tmp_path):
    """Which converts the model, outside of training."""
    runs = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (TrollGRPOTrainer, TrollGRPOConfig)):
        options = {"eval_dataset": tiny_prompts(8), "per_device_eval_batch_size": 4, "bf16_full_eval": True}
        trainer = make_trainer(trainer_class, config_class, tmp_path, **options)
        runs.append(trainer.evaluate())
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    for key in ("eval_reward", "eval_entropy"):
        assert runs[1][key] == pytest.approx(runs[0][key], rel=1e-2), key

"""Model objects without a name, or whose folder is gone: TRL would load a reference model or a tokenizer from there."""

import shutil

import pytest
from peft import LoraConfig
from tiny import saved_model, tiny_config, tiny_model, tiny_prompts, tiny_tokenizer, token_reward
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification
from trl_comparison import OURS, make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


@pytest.mark.parametrize("algorithm", OURS)
def test_no_reference_model_can_be_loaded(tmp_path, algorithm):
    """It said "Repo id must use alphanumeric chars", for RLOO with its default of `beta`."""
    beta = {"beta": 0.1} if algorithm == "grpo" else {}
    with pytest.raises(ValueError, match=r"`beta` is 0\.\d+, and TRL loads the reference model .* it has no name"):
        make_trainer(*OURS[algorithm], tmp_path, **beta)
    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model"))
    make_trainer(*OURS[algorithm], tmp_path, model, **beta)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ValueError, match=f"`beta` is .*: the folder {tmp_path}/model is not there"):
        make_trainer(*OURS[algorithm], tmp_path, model, **beta)


@pytest.mark.parametrize("algorithm", OURS)
def test_without_a_reference_model_or_with_an_adapter_none_is_needed(tmp_path, algorithm):
    make_trainer(*OURS[algorithm], tmp_path, beta=0.0)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    make_trainer(*OURS[algorithm], tmp_path, beta=0.1, peft_config=lora)


def test_no_tokenizer_can_be_loaded(tmp_path):
    args = TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match=r"TRL loads the tokenizer .* it has no name.* Give .* `processing_"):
        TrollGRPOTrainer(tiny_model(), token_reward, args, tiny_prompts())
    reward = Qwen3ForSequenceClassification(tiny_config(num_labels=1))
    options = {"args": args, "train_dataset": tiny_prompts(), "processing_class": tiny_tokenizer()}
    for functions in (reward, [token_reward, reward]):
        with pytest.raises(ValueError, match="Give the trainer `reward_processing_classes`"):
            TrollGRPOTrainer(tiny_model(), functions, **options)
    TrollGRPOTrainer(tiny_model(), reward, **options, reward_processing_classes=tiny_tokenizer())

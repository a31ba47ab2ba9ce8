"""Reward models that are adapters score as the merged model does, or are refused by name."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tiny import saved_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification
from trl_comparison import OURS, make_trainer

from troll_trl.trainers.reward_models import whole_reward_models

OF_LAYERS = {"task_type": "SEQ_CLS", "target_modules": ["q_proj", "down_proj"]}
ADAPTERS = {
    "lora": LoraConfig(**OF_LAYERS, lora_dropout=0.5),
    "dora": LoraConfig(**OF_LAYERS, use_dora=True),
    "rslora": LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", use_rslora=True),
    "embeddings": LoraConfig(task_type="SEQ_CLS", target_modules=["embed_tokens"]),
    "ia3": IA3Config(**OF_LAYERS, feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(**OF_LAYERS),
}
VIRTUAL_TOKENS = {
    "PROMPT_TUNING": PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    "PREFIX_TUNING": PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    "P_TUNING": PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
}
PROMPTS, COMPLETIONS = ["w1 w2 w3", "w4"], [" w5", " w6 w7 w8"]


def adapted(folder, config, base=None):
    """A trained adapter, and the model that it was merged into, in folders below `folder`."""
    torch.manual_seed(1)
    base = base or saved_model(folder / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.config.pad_token_id = 0
    model = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.normal_()
    model.save_pretrained(folder / "adapter")
    return model


def rewards_of(folder, reward, algorithm="grpo", **options):
    trainer = make_trainer(*OURS[algorithm], folder / "out", reward=reward, beta=0.0, **options)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    return trainer, trainer._calculate_rewards(rows, PROMPTS, COMPLETIONS, [[1], [1]]).flatten().tolist()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_scores_as_the_merged_model(tmp_path, kind):
    """transformers dropped DoRA's magnitudes; TRL gave a `PeftModel` no tokenizer, and left its dropout on."""
    model = adapted(tmp_path, ADAPTERS[kind])
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    _, expected = rewards_of(tmp_path, str(tmp_path / "merged"))
    for algorithm, reward in (("grpo", str(tmp_path / "adapter")), ("rloo", model.train())):
        _, actual = rewards_of(tmp_path, reward, algorithm)
        assert actual == pytest.approx(expected, rel=1e-4), (kind, algorithm)
    assert abs(expected[0] - expected[1]) > 1e-3, "the test needs a model that tells completions apart"


def test_its_own_tokenizer_is_read_and_it_can_be_one_of_several(tmp_path):
    adapted(tmp_path, ADAPTERS["lora"])
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "w90"})
    tokenizer.save_pretrained(tmp_path / "adapter")
    functions = [str(tmp_path / "adapter"), lambda prompts, **_: [1.0] * len(prompts)]
    trainer, _ = rewards_of(tmp_path, functions)
    assert trainer.reward_processing_classes[0].pad_token == "w90" and trainer.reward_func_names[0] == "adapter"
    assert functions[0] == str(tmp_path / "adapter"), "the list is the caller's"


def test_a_random_score_head_is_refused(tmp_path):
    """An adapter without a head, of a base model without one, gave each run other rewards."""
    adapted(tmp_path, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"adapter has no score.weight, and neither has its base model .*base: "):
        rewards_of(tmp_path, str(tmp_path / "adapter"))
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1).save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")
    shutil.rmtree(tmp_path / "adapter")
    model = adapted(tmp_path, LoraConfig(target_modules=["q_proj"]), base=str(tmp_path / "rm"))
    _, expected = rewards_of(tmp_path, model)
    assert rewards_of(tmp_path, str(tmp_path / "adapter"))[1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", VIRTUAL_TOKENS)
def test_virtual_tokens_are_refused(tmp_path, kind):
    model = adapted(tmp_path, VIRTUAL_TOKENS[kind])
    for reward in (str(tmp_path / "adapter"), model):
        with pytest.raises(ValueError, match=f"is an adapter of type {kind}, which cannot be merged"):
            rewards_of(tmp_path, reward)


def test_a_loaded_adapter_of_the_caller_stays_one(tmp_path):
    adapted(tmp_path, ADAPTERS["lora"])
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rewards_of(tmp_path, [model])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_adapter_under_zero_3_is_refused_and_a_loaded_one_is_not(tmp_path, monkeypatch):
    """ZeRO-3 splits weights while they are read, so nothing could be merged. No DeepSpeed is needed to refuse."""
    model = adapted(tmp_path, ADAPTERS["lora"])
    whole = [str(tmp_path / "base"), len, None]
    args = SimpleNamespace(model_init_kwargs=None, trust_remote_code=False)
    zero_3 = SimpleNamespace(is_zero3=lambda: True)
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", lambda: zero_3)
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", lambda *_, **__: pytest.fail("was read"))
    for rewards in (str(tmp_path / "adapter"), [len, str(tmp_path / "adapter")]):
        with pytest.raises(ValueError, match=r"adapter is an adapter, and ZeRO-3 splits .*Merge it .*give that folder"):
            whole_reward_models(rewards, args)
    assert whole_reward_models([model, *whole], args) == [model.get_base_model(), *whole]

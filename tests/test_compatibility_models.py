"""Adapters, precisions, compilation, reference models and vision-language models, against TRL's trainer."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig
from PIL import Image
from tiny import saved_model, tiny_config, tiny_model, tiny_tokenizer
from transformers import (
    BitsAndBytesConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

PROJECTIONS = ["q_proj", "v_proj"]
ADAPTERS = {
    "lora": lambda: LoraConfig(r=4, target_modules=PROJECTIONS),
    "dora": lambda: LoraConfig(r=4, target_modules=PROJECTIONS, use_dora=True),
    "trained_head": lambda: LoraConfig(r=4, target_modules=PROJECTIONS, modules_to_save=["lm_head"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt_tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix_tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


both = partial(train_both, "grpo", steps_per_generation=2, max_steps=4)


# With checkpointing, prefix tuning fails in transformers, with TRL's trainer too
@pytest.mark.parametrize(
    ("name", "checkpointing"), [(name, False) for name in ADAPTERS] + [("lora", True), ("trained_head", True)]
)
def test_adapter_with_reference_kl(name, checkpointing, tmp_path):
    start, trl, troll = both(
        tmp_path,
        lambda: tiny_model(tie_word_embeddings=False),
        peft_config=ADAPTERS[name](),
        disable_dropout=True,
        learning_rate=5e-2,
        beta=0.5,
        gradient_checkpointing=checkpointing,
    )
    assert_same_movement(start, weights(trl), weights(troll))


def test_adapter_on_the_head_is_refused(tmp_path):
    """By TRL: the head is read as one matrix, without what an adapter adds to it."""
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        make_trainer(
            TrollGRPOTrainer, TrollGRPOConfig, tmp_path, peft_config=LoraConfig(r=4, target_modules=["lm_head"])
        )


PRECISIONS = {
    "bf16_autocast": {"bf16": True},
    "bf16_autocast_cast_head": {"bf16": True, "cast_lm_head_to_fp32": True},
    "bf16_weights": {"make_model": lambda: tiny_model().to(torch.bfloat16)},
    "bf16_weights_cast_head": {"make_model": lambda: tiny_model().to(torch.bfloat16), "cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision(name, tmp_path):
    """In bfloat16 two ways to round part; at the start they agree, and both learn the same."""
    start, trl, troll = both(tmp_path, learning_rate=1e-3, max_steps=8, **PRECISIONS[name])
    assert logged(troll, "reward")[0] == logged(trl, "reward")[0], "the first rollout is the same"
    for key in ("grad_norm", "entropy"):
        assert logged(troll, key)[0] == pytest.approx(logged(trl, key)[0], rel=3e-2)
    moved_trl = torch.cat([(weights(trl)[name] - start[name]).float().flatten() for name in start])
    moved_troll = torch.cat([(weights(troll)[name] - start[name]).float().flatten() for name in start])
    assert torch.cosine_similarity(moved_trl, moved_troll, dim=0) > 0.8
    # The old policy comes from the same pass as the log-probabilities that TRL keeps
    assert max(logged(troll, "troll/policy_kl_max")) < 0.5


@pytest.mark.extras
def test_quantized_base(tmp_path):
    """QLoRA: four-bit weights of the layers, a head that stays whole, a reference without the adapter."""
    path = saved_model(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    start, trl, troll = both(
        tmp_path,
        lambda: path,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        peft_config=LoraConfig(r=4, target_modules=PROJECTIONS),
        disable_dropout=True,
        learning_rate=5e-2,
        beta=0.5,
    )
    assert any(type(module).__name__ == "Linear4bit" for module in troll.model.modules())
    trained = {name: start[name] for name in start if "lora" in name}
    assert_same_movement(trained, weights(trl), weights(troll))


@pytest.mark.slow
def test_compiled_model(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "default"}
    start, trl, troll = both(tmp_path, **compiled, max_steps=2)
    assert_same_movement(start, weights(trl), weights(troll))


def test_reference_model_that_follows(tmp_path):
    path = saved_model(tmp_path / "model")
    options = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    start, trl, troll = both(tmp_path, lambda: path, **options)
    assert_same_movement(start, weights(trl), weights(troll))
    reference = dict(troll.ref_model.named_parameters())
    assert any(not torch.equal(reference[name], start[name]) for name in start)


def test_model_init_kwargs(tmp_path):
    path = saved_model(tmp_path / "model")
    options = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}
    start, trl, troll = both(tmp_path, lambda: path, **options)
    assert troll.model.config._attn_implementation == "eager"
    assert_same_movement(start, weights(trl), weights(troll))


# -- Vision-language ---------------------------------------------------------------------------------------------------

IMAGE = "<image>"


def llava():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = tiny_config("llama", vocab_size=101)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=100, vision_feature_layer=-1)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)
    return model


def llava_processor():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w2"
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def pictures(rows=16):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (rows, 28, 28, 3), generator=generator, dtype=torch.uint8).numpy()
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"w{row} w5"}] for row in range(rows)],
            "image": [Image.fromarray(picture) for picture in pixels],
        }
    )


@pytest.mark.parametrize("adapter", [False, True], ids=["", "lora"])
def test_vision_language_model(adapter, tmp_path):
    start, trl, troll = both(
        tmp_path,
        llava,
        dataset=pictures(),
        tokenizer=llava_processor(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapter else None,
        disable_dropout=True,
    )
    assert "pixel_values" in troll._buffered_inputs[0]
    assert_same_movement(start, weights(trl), weights(troll))

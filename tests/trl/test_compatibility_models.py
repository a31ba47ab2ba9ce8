"""Adapters, precisions, compilation, reference models and vision-language models, against TRL's trainer."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from PIL import Image
from transformers import (
    BitsAndBytesConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from tests.tiny import SIZES, saved_model, tiny_config, tiny_model, tiny_tokenizer
from tests.trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

PROJECTIONS = ["q_proj", "v_proj"]
ADAPTERS = {  # `test_trainer.py` has LoRA alone
    "trained_head": lambda: LoraConfig(r=4, target_modules=PROJECTIONS, modules_to_save=["lm_head"]),
    "prompt_tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix_tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}

both = partial(train_both, "grpo", steps_per_generation=2, max_steps=4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_with_reference_kl(name, tmp_path):
    options = {"peft_config": ADAPTERS[name](), "disable_dropout": True, "learning_rate": 5e-2, "beta": 0.5}
    # With checkpointing, the other two fail in transformers, with TRL's trainer too
    options["gradient_checkpointing"] = name == "trained_head"
    start, trl, troll = both(tmp_path, lambda: tiny_model(tie_word_embeddings=False), **options)
    assert_same_movement(start, weights(trl), weights(troll))


@pytest.mark.parametrize("case", [
    {"bf16": True, "cast_lm_head_to_fp32": True},
    {"make_model": lambda: tiny_model().to(torch.bfloat16)},
], ids=["autocast_cast_head", "weights"])  # fmt: skip
def test_bfloat16(case, tmp_path):
    """Two ways to round part; at the start they agree, and both learn the same."""
    start, trl, troll = both(tmp_path, learning_rate=1e-3, max_steps=8, **case)
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


# -- Vision-language ---------------------------------------------------------------------------------------------------

IMAGE = "<image>"


def llava():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
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


def pictures(rows=16, width=28, each=1):
    """Rows with `each` images of 28 x `width` pixels; with several, the rows differ in how many they have."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (rows, each, 28, width, 3), generator=generator, dtype=torch.uint8).numpy()
    images = [[Image.fromarray(picture) for picture in row[: 1 + number % each]] for number, row in enumerate(pixels)]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"w{row} w5"}] for row in range(rows)]}
        | ({"image": [row[0] for row in images]} if each == 1 else {"images": images})
    )


def qwen_vl():
    """Qwen2.5-VL, which indexes its patches by grids, and its positions by three coordinates."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            **{name: value for name, value in SIZES.items() if name != "head_dim"} | {"vocab_size": 104},
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16},
            **{"window_size": 56, "fullatt_block_indexes": [1]},
        },
        **{f"{name}_token_id": 100 + index for index, name in enumerate(QWEN_TOKENS)},
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)
    return model


QWEN_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


class ImagesOnly(Qwen2_5_VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def __init__(self, image_processor, tokenizer, chat_template=None):
        for name in ("image", "video"):
            setattr(self, f"{name}_token", QWEN_TOKENS[name])
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(QWEN_TOKENS[name]))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def qwen_vl_processor():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*QWEN_TOKENS.values()]})
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w2"
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    return ImagesOnly(image_processor=images, tokenizer=tokenizer, chat_template=template)


FAMILIES = {  # model, processor, data, what the batch holds for them
    "qwen2.5-vl": (qwen_vl, qwen_vl_processor, partial(pictures, width=56, each=2), "image_grid_thw"),
    "llava": (llava, llava_processor, pictures, "pixel_values"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_vision_language_families(name, tmp_path):
    """As TRL's without a clip where the bound is open; where it is not, tokens are projected and end at the bound."""
    make_model, processor, data, tensor = FAMILIES[name]
    options = {"dataset": data(), "tokenizer": processor(), "disable_dropout": True}
    images = [*range(100, len(options["tokenizer"].tokenizer))]  # tokens that a completion must not hold
    options["generation_kwargs"] = {"suppress_tokens": images}
    start, trl, troll = both(tmp_path, make_model, **options)
    assert tensor in troll._buffered_inputs[0]
    assert_same_movement(start, weights(trl), weights(troll))

    options |= {"steps_per_generation": 4, "max_steps": 4, "kl_bound": 1e-3, "learning_rate": 1e-2}
    projecting = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, make_model(), **options)
    projecting.train()
    assert logged(projecting, "troll/projected_fraction")[0] == 0, "the weights of the rollout"
    assert max(logged(projecting, "troll/projected_fraction")) > 0.1
    assert max(logged(projecting, "troll/kl_max")) <= 1e-3 * 1.001 < max(logged(projecting, "troll/policy_kl_max"))
    vision = [name for name in start if "visual" in name or "vision" in name]
    assert any(not torch.equal(weights(projecting)[name], start[name]) for name in vision)

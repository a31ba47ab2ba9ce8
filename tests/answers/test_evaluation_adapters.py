"""Evaluation of adapters: each kind completes as the model that was trained, or is refused by name."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import saved_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from trl import ModelConfig

from math_answers.evaluation import EvaluationArguments, generate_samples
from math_answers.evaluation.generation import TransformersGenerator, resolve_backend
from math_answers.evaluation.loading import check_weights, load_model, vllm_ignores
from math_answers.models import check_model, context_of
from troll_trl.cli.make_trainer import make_trainer

TARGETS = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
PLAIN = {
    "lora": peft.LoraConfig(**TARGETS),
    "rslora": peft.LoraConfig(**TARGETS, use_rslora=True),
}
OTHERS = {
    "dora": peft.LoraConfig(**TARGETS, use_dora=True),
    "pissa": peft.LoraConfig(**TARGETS, init_lora_weights="pissa"),
    "ranks": peft.LoraConfig(**TARGETS, rank_pattern={"q_proj": 8}),
    "alphas": peft.LoraConfig(**TARGETS, alpha_pattern={"q_proj": 64}),
    "saved modules": peft.LoraConfig(**TARGETS, modules_to_save=["lm_head"]),
    "trained tokens": peft.LoraConfig(**TARGETS, trainable_token_indices=[3, 4, 5]),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "loha": peft.LoHaConfig(**TARGETS),
    "oft": peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
KINDS = PLAIN | OTHERS
PROMPTS = [[5 + i, 9, 3 + 2 * i, 4 + i][: 1 + i % 4] for i in range(8)]


def make_adapter(config: peft.PeftConfig):
    """A trained adapter in the folder `adapter` of the working folder, on a model in `base`."""
    base = AutoModelForCausalLM.from_pretrained(saved_model("base", tie_word_embeddings=False))
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn(weight.shape))
    model.eval().save_pretrained("adapter")
    return model


def change_file(change):
    weights = load_file("adapter/adapter_model.safetensors")
    change(weights)
    save_file(weights, "adapter/adapter_model.safetensors")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """A kind, its trained model, and where [`make_adapter`] has put both folders."""
    folder = tmp_path_factory.mktemp("adapter")
    with contextlib.chdir(folder):
        return request.param, make_adapter(KINDS[request.param]), folder


@pytest.fixture
def adapter(made):
    """Of each kind: its name and the trained model. The folders are in the working folder."""
    kind, model, folder = made
    shutil.copytree(folder, ".", dirs_exist_ok=True)
    return kind, model


def test_an_adapter_completes_as_the_model_that_was_trained(adapter):
    """DoRA lost its magnitudes in silence; in a batch, virtual tokens met padding that a prompt alone has not."""
    _, model = adapter
    args = EvaluationArguments(model=["adapter"], benchmarks=["gsm8k"], output="out", max_new_tokens=12)
    tokenizer = tiny_tokenizer()
    got = TransformersGenerator("adapter", tokenizer, args, 16).generate(PROMPTS, [0] * len(PROMPTS))
    config = GenerationConfig(max_new_tokens=12, eos_token_id=1, pad_token_id=0)
    expected = [
        model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), generation_config=config
        )[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    assert [one.text for one in got] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]


def test_vllm_serves_plain_lora_and_refuses_every_other_kind_by_name(adapter, monkeypatch):
    kind, _ = adapter
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_backend("auto", {"a": "adapter"}) == ("vllm" if kind in PLAIN else "transformers")
    if kind in PLAIN:
        assert resolve_backend("vllm", {"a": "adapter"}) == "vllm"
    else:
        with pytest.raises(ValueError, match=r"does not apply `\w+: .*` of the adapter a. Use the backend"):
            resolve_backend("vllm", {"base": "base", "a": "adapter"})


def test_a_setting_that_vllm_ignores_is_named():
    make_adapter(OTHERS["dora"])
    assert vllm_ignores("adapter") == "`use_dora: True`"
    assert vllm_ignores("base") is None


def test_a_weight_that_an_adapter_lacks_or_has_too_many_stops(adapter):
    change_file(lambda weights: weights.update({"base_model.model.other.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match="adapter has 1 weights for which its config has no place"):
        load_model("adapter", None)
    change_file(lambda weights: weights.pop("base_model.model.other.weight"))
    change_file(lambda weights: weights.pop(min(weights)))
    with pytest.raises(ValueError, match=r"adapter lacks 1 weights which|adapter adapter cannot be loaded: KeyError"):
        load_model("adapter", None)


@pytest.mark.parametrize("meta", [True, False])
def test_a_weight_that_a_checkpoint_lacks_or_has_too_many_stops(meta):
    saved_model("base")
    file = Path("base/model.safetensors")
    whole = load_file(file)
    check_weights("base", None)
    save_file(whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"base has 1 weights for which its config has no place: .*q_proj\.bias"):
        load_model("base", None, meta=meta)
    del whole["model.layers.1.mlp.down_proj.weight"]
    save_file(whole, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"base lacks 1 weights which its config asks for: .*1\.mlp\.down_proj"):
        load_model("base", None, meta=meta)


def test_a_torn_weight_file_stops_with_its_model():
    """A download that was cut ended in a traceback."""
    make_adapter(PLAIN["lora"])
    for file, expected in (
        ("adapter/adapter_model.safetensors", "the adapter adapter cannot be loaded: SafetensorError"),
        ("base/model.safetensors", "a weight file of base is torn"),
    ):
        Path(file).write_bytes(Path(file).read_bytes()[:1000])
        with pytest.raises(ValueError, match=expected):
            check_weights("adapter", None)


def test_a_setting_of_a_newer_peft_stops():
    make_adapter(PLAIN["lora"])
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(settings | {"use_a_new_kind": True}))
    with pytest.raises(ValueError, match=r"adapter cannot be loaded: .*use_a_new_kind"):
        load_model("adapter", None)
    assert vllm_ignores("adapter") == "`use_a_new_kind: True`"


def test_an_adapter_on_an_adapter_is_refused():
    make_adapter(PLAIN["lora"])
    Path("second").mkdir()
    Path("second/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "adapter"}))
    with pytest.raises(ValueError, match="the base model adapter of second is an adapter too"):
        check_model("second")


@pytest.fixture
def hub(monkeypatch):
    """Puts a folder under a name of the hub into the cache, of which a machine without a network reads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").resolve()))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(folder, name):
        cached = Path("hub", f"models--{name.replace('/', '--')}")
        shutil.copytree(folder, cached / "snapshots" / "c0ffee")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("c0ffee")

    return put


@pytest.mark.parametrize("kind", ["lora", "dora", "prompt"])
def test_an_adapter_of_the_hub_is_evaluated_as_one_in_a_folder(kind, hub):
    """It was refused for its lack of a config.json, or loaded past PEFT if it has one."""
    make_adapter(KINDS[kind])
    AutoConfig.from_pretrained("base").save_pretrained("adapter")
    hub("adapter", "owner/adapter")
    Path("problems.jsonl").write_text("\n".join(f'{{"problem": "w{n}", "answer": "{n}"}}' for n in range(4)))
    models = ["adapter", "owner/adapter", "base"]
    args = EvaluationArguments(
        model=models, benchmarks=["own=problems.jsonl"], instruction="", output="out", max_new_tokens=8
    )
    generate_samples(args)
    rows = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    folder, named, base = [[row["completion"] for row in rows if row["model"] == model] for model in models]
    assert folder == named != base and len(folder) == 4
    assert vllm_ignores(check_model("owner/adapter")) == vllm_ignores("adapter")


def test_an_adapter_of_the_hub_is_no_model_to_start_from_nor_a_base(hub):
    make_adapter(PLAIN["lora"])
    hub("adapter", "owner/adapter")
    with pytest.raises(ValueError, match="owner/adapter is an adapter, and training starts from a whole model"):
        make_trainer(None, None, ModelConfig(model_name_or_path="owner/adapter"))
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "owner/adapter"}))
    with pytest.raises(ValueError, match="base model owner/adapter of adapter is an adapter too"):
        check_model("adapter")


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "new"}, {"bits": 4}])
def test_quantised_weights_that_cannot_be_loaded_stop_before_anything_is_read(quantization, monkeypatch):
    """They failed after the data were read; an unknown kind was loaded as if it were whole."""
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", lambda: False)
    saved_model("base")
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match="`model`: the quantised weights of base cannot be loaded here: "):
        check_weights("base", None)


@pytest.mark.parametrize("quantization", ["int8", "", 4, True, ["int8"], {}])
def test_a_quantization_config_that_is_no_mapping_is_named(quantization):
    """It ended in "'str' object has no attribute 'to_dict'"."""
    make_adapter(KINDS["lora"])
    config = json.loads(Path("base/config.json").read_text())
    said = r"`quantization_config` in the config.json of base must be a mapping with a `quant_method`, got "
    for part in ({"quantization_config": quantization}, {"text_config": {"quantization_config": quantization}}):
        Path("base/config.json").write_text(json.dumps(config | part))
        key = f"`{'text_config.' * ('text_config' in part)}quantization_config`"
        for model in ("base", "adapter"):
            with pytest.raises(ValueError, match=rf"^`model`: {said.replace('`quantization_config`', key)}"):
                check_model(model)
        with pytest.raises(ValueError, match=f"^`model_name_or_path`: {said.replace('`quantization_config`', key)}"):
            make_trainer(None, SimpleNamespace(trust_remote_code=False), ModelConfig(model_name_or_path="base"))


def test_virtual_tokens_take_room_in_the_context():
    make_adapter(OTHERS["prompt"])
    assert context_of("adapter") == context_of("base") - 4

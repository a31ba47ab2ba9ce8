"""
Memory of one micro-batch of each model of the configs, on the device of `fake_cuda.py` without numbers:

    FAKE_CUDA_LIBRARY=... FAKE_CUDA_STORAGE=meta PYTHONPATH=tests/support:benchmarks:. \
        python tests/kernels/fake_cuda_memory.py OUT.json

Real sizes and layers, gradient checkpointing, bfloat16 autocast, attention as a flash attention keeps it, every
position live, K = 64. Bytes are the most that are held at a time beyond weights, inputs and the gradients of earlier
micro-batches.
"""

import fake_cuda  # noqa: I001  first

import copy
import json
import sys
import warnings
from pathlib import Path

import counts
import torch
from ranks import leave_together
from transformers import (
    ApertusConfig,
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
    SmolLM3Config,
)

from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.trainers.trust_region_model import TrustRegionModel
from troll_trl.trust_region.regions import ProjectionTrustRegion

QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
LLAMA = {"vocab_size": 128_256, "head_dim": 128, "num_key_value_heads": 8}


def sizes(hidden, intermediate, layers, heads, tied, **others):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **others,
    }


MODELS = {
    "qwen3-0.6b": Qwen3Config(**sizes(1024, 3072, 28, 16, True, **QWEN3)),
    "qwen3-1.7b": Qwen3Config(**sizes(2048, 6144, 28, 16, True, **QWEN3)),
    "qwen3-4b": Qwen3Config(**sizes(2560, 9728, 36, 32, True, **QWEN3)),
    "qwen3-8b": Qwen3Config(**sizes(4096, 12_288, 36, 32, False, **QWEN3)),
    "qwen3-14b": Qwen3Config(**sizes(5120, 17_408, 40, 40, False, **QWEN3)),
    "llama-3.2-3b": LlamaConfig(**sizes(3072, 8192, 28, 24, True, **LLAMA)),
    "llama-3.1-8b": LlamaConfig(**sizes(4096, 14_336, 32, 32, False, **LLAMA)),
    "smollm3-3b": SmolLM3Config(**sizes(2048, 11_008, 36, 16, True, vocab_size=128_256, num_key_value_heads=4)),
    "apertus-8b": ApertusConfig(**sizes(4096, 21_504, 32, 32, False, vocab_size=131_072, num_key_value_heads=8)),
}
SUPPORT = 64


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    """Its parameters and buffers, which are on the meta device, on the fake one; tied ones stay tied."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.nn.Parameter(fake_cuda.CudaTensor(parameter.detach().to("meta")))
                module._parameters[name] = moved.setdefault(id(parameter), new)
        for name, buffer in module._buffers.items():
            module._buffers[name] = fake_cuda.CudaTensor(buffer.to("meta"))
    return model


def peak(model, what: str, rows: int, length: int, sharded: bool) -> int:
    """Bytes of `"training"`, the loss and its gradient, or of `"scoring"`."""
    ids = torch.empty(rows, length + 1, dtype=torch.int64, device="cuda")
    support = torch.empty(rows, length, SUPPORT, dtype=torch.int32, device="cuda")
    old = torch.empty(rows, length, SUPPORT + 1, device="cuda")
    live = torch.ones(rows, length, dtype=torch.bool, device="cuda")
    batch = {"input_ids": ids, "attention_mask": {"full_attention": None}, "labels": ids, "fused_lm_head": True}
    gradients = []
    for parameter in model.parameters():  # of earlier micro-batches: each rank's part is counted apart, if sharded
        parameter.grad = None if sharded else torch.empty_like(parameter)
        gradients += [] if sharded else [parameter.grad]
    enabled = torch.is_autocast_enabled
    inputs = [*model.parameters(), *model.buffers(), *gradients, ids, support, old, live]
    training = what == "training"
    with torch.set_grad_enabled(training), counts.recorded(inputs) as recorder:
        torch.is_autocast_enabled = enabled
        attention = lambda module, q, k, v, mask, **_: counts._Attention.apply(recorder, q, k, v).transpose(1, 2)
        AttentionInterface.register("counted", lambda *args, **others: (attention(*args, **others).contiguous(), None))
        if training:
            advantages = torch.empty(rows, 1, device="cuda")
            this = TrustRegionModel(ProjectionTrustRegion(0.05), old, support, live, advantages)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                log_probs = this.wrap(model, length)(**batch).log_probs
            ((this.bounded.regression - log_probs.exp() * advantages) * live).sum().backward()
        else:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(**batch, support_size=SUPPORT, check_finite=False)
    return recorder.counts.peak_bytes


def measure(name: str, layers: int, length: int, sharded: bool, rows: int, evaluated: int) -> dict[str, int]:
    """With so many layers: parameters, those of the head, and bytes of training and evaluation."""
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = layers
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:layers]
    if hasattr(config, "no_rope_layers"):
        config.no_rope_layers = config.no_rope_layers[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if sharded else torch.float32)
    model = on_device(model.train())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        kwargs = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model.config._attn_implementation = "counted"
    add_sparse_lm_head(model)
    if sharded:  # FSDP2 reduces a layer's gradient as soon as it is there
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    result = {
        "parameters": sum(x.numel() for x in model.parameters()),
        "head": model.get_output_embeddings().weight.numel(),
        "training": peak(model, "training", rows, length, sharded),
    }
    if layers == 2 or not sharded:  # without weights that autocast casts, every layer takes the same memory in turn
        result["evaluation"] = peak(model, "scoring", evaluated, length, sharded=True)
    return result


def measure_whole(name: str, **case) -> dict[str, int]:
    """Of all layers: every layer adds the same (checked once, for Qwen3-1.7B on DDP and Qwen3-8B sharded)."""
    two, three = (measure(name, layers, **case) for layers in (2, 3))
    more = MODELS[name].num_hidden_layers - 2
    return {what: of + more * (three.get(what, of) - of) for what, of in two.items()} | {
        "layer": three["parameters"] - two["parameters"]
    }


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[1]).write_text(json.dumps({key: measure_whole(**case) for key, case in cases.items()}))
    leave_together()  # the threads of autograd on this device may abort the interpreter's teardown

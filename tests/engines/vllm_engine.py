"""What vLLM's engine needs on a CPU under TRL's trainers."""

import functools
import os

import torch
from torch.distributed import TCPStore

from tests.tiny import saved_model

# Of runs that are compared: Adam makes a full step of a gradient that is rounding, in some element of so many
SGD = {"optim": "sgd", "learning_rate": 0.3}
# Compiling takes minutes, and the cache would take a share of the machine's memory or, by a variable, whole GiB
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
# Head sizes below 32 have no attention kernel on a CPU
MODEL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "max_position_embeddings": 64}


def plain_linear_layers(patch=setattr):
    """
    Keep the weights of linear layers as they are loaded.

    On a CPU vLLM packs them for its matrix kernels at load, a tied head's too, and drops or leaves stale what a later
    `load_weights` writes to: a sync of the trainer's weights would not reach the samples. As `patch`,
    `monkeypatch.setattr` also takes it back.
    """
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    patch(layers, "dispatch_cpu_unquantized_gemm", use_plain_linear)


def start_engines_with(monkeypatch, dtype: str):
    """Start TRL's colocated engines with weights in `dtype`, which TRL does not pass on: vLLM would serve a float32
    checkpoint in bfloat16."""
    import trl.generation.vllm_generation as generation

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(generation, "LLM", functools.partial(generation.LLM, dtype=dtype, **SMALL))
    # accelerate sets 29500, where the engines of two test processes would meet. It stays, as the process group does
    os.environ.setdefault("MASTER_PORT", str(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port))
    keep_process_group()


def keep_process_group():
    """An engine that is collected destroys torch's default process group, which the next trainer is about to use. For
    good: it may be collected as late as at exit."""
    import vllm.v1.engine.core as core

    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None


def model_for_vllm(folder) -> str:
    """A tiny model in a folder, in float32, whose distributions are as wide as those of `tiny_model`'s other sizes."""
    return saved_model(folder, spread=3.0, **MODEL)

"""What vLLM's engine needs on a CPU under TRL's trainers, and how its log-probabilities compare with a policy's."""

import functools

import torch
from tiny import saved_model, tiny_prompts, tiny_tokenizer

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
    `load_weights` writes to: a sync of the trainer's weights would not reach the samples.

    Args:
        patch (`Callable`, *optional*, defaults to `setattr`):
            Sets the attribute, or `monkeypatch.setattr`, which also takes it back.
    """
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    patch(layers, "dispatch_cpu_unquantized_gemm", use_plain_linear)


def plain_experts(patch=setattr):
    """
    The same for the experts of a mixture, which a CPU's kernel wants packed: pack them for each use. Their group of
    processes is made with the first engine of a process, if that is a mixture: let the next engine make all groups.
    """
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()
    experts = cpu_moe.CPUUnquantizedExperts
    apply = experts.apply

    def pack_and_apply(self, output, hidden_states, w1, w2, *args, **kwargs):
        packed = [cpu_moe.cpu_prepack_moe_weight(weights, self.isa) for weights in (w1, w2)]
        return apply(self, output, hidden_states, *packed, *args, **kwargs)

    patch(experts, "process_weights_after_loading", lambda self, layer: None)
    patch(experts, "apply", pack_and_apply)


def start_engines_with(monkeypatch, dtype: str, **options):
    """
    Start TRL's colocated engines with options that TRL does not pass on.

    Args:
        monkeypatch (`pytest.MonkeyPatch`):
            Takes them back at the end of a test.
        dtype (`str`):
            Of the engine's weights; with `"auto"` vLLM serves a float32 checkpoint in bfloat16.
        **options:
            Further ones of `vllm.LLM`.
    """
    import trl.generation.vllm_generation as generation

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(generation, "LLM", functools.partial(generation.LLM, dtype=dtype, **SMALL, **options))
    keep_process_group()


def keep_process_group():
    """An engine that is collected destroys torch's default process group, which the next trainer is about to use. For
    good: it may be collected as late as at exit."""
    import vllm.v1.engine.core as core

    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None


def model_for_vllm(folder) -> str:
    """A tiny model in a folder, in float32, whose distributions are as wide as those of `tiny_model`'s other sizes."""
    return saved_model(folder, spread=3.0, **MODEL)


@torch.no_grad()
def sample_and_score(trainer, rows: int = 16) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """
    What the engine samples now: of each completion its tokens, the engine's log-probabilities of them `(tokens,)`, and
    the logits `(tokens, vocabulary)` that the trainer's model has there, float32.
    """
    prompts = [tiny_tokenizer()(prompt)["input_ids"] for prompt in tiny_prompts(rows)["prompt"]]
    _, completions, log_probs, _ = trainer.vllm_generation.generate(prompts, None, 1)
    scored = []
    for prompt, completion, row in zip(prompts, completions, log_probs, strict=True):
        logits = trainer.model(torch.tensor([prompt + list(completion)])).logits[0, len(prompt) - 1 : -1]
        scored.append((list(completion), torch.tensor([value for (value,) in row]), logits.float()))
    return scored


def largest_difference(trainer) -> float:
    """Of the engine's log-probabilities and the policy's, over what the engine samples now."""
    differences = [
        logits.log_softmax(-1)[range(len(tokens)), tokens] - log_probs
        for tokens, log_probs, logits in sample_and_score(trainer)
    ]
    return torch.cat(differences).abs().max().item()

"""What `old_policy: engine` saves and costs: FLOPs of a step, and Python's time for the numbers of each token.

    python benchmarks/engine_policy.py                     # FLOPs, and reading answers; without vLLM no engine's part
    .venv/vllm/bin/python benchmarks/engine_policy.py      # `make test-vllm` sets it up

FLOPs of a token, counted on tensors without memory, in a context of 2,048: TRL's clip with vLLM scores the rollout once
and trains on it; TROLL with the engine's old policy only trains. The fused heads of both compute their logits again in
the backward. "Scoring on an H100" divides a scoring pass's FLOPs by 400e12 a second, which large models reach there.

Reading: microseconds a token from vLLM's answer to the rows of the rollout batch, with N likely tokens. TRL's sorts an
object for each listed token. Ours reads vLLM's flat lists into arrays. The engine's part samples with dictionaries of
objects, as TRL asks for them, and with flat lists. On a CPU its model is tiny, and a token's time is mostly vLLM's
Python. On a GPU it has the shape of Qwen3-0.6B and random weights in bfloat16, without CUDA graphs, whose capture takes
longer than the sampling.
"""

import os
import statistics
import tempfile
import time
from importlib.util import find_spec
from types import SimpleNamespace

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
import torch
from common import Report, parser
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from troll_trl.trainers.engine_policy import EngineOldPolicyCache
from troll_trl.trainers.engine_rows import read_answer

CONTEXT, H100 = 2048, 400e12  # tokens; FLOP/s
SHAPES = {  # hidden and intermediate size, layers, heads, key-value heads
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8),
    "Qwen3-8B": (4096, 12288, 36, 32, 8),
}
TOKENS, ENGINE_TOKENS, LIKELY = 256, 64, (0, 19, 63)


def make_config(shape: str, **others) -> Qwen3Config:
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    return Qwen3Config(vocab_size=151_936, **sizes, **heads_of, **others)


def flops_per_token(shape: str) -> tuple[float, float]:
    """Forward FLOPs a token, of the layers and of the head."""
    config = make_config(shape)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, CONTEXT, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(ids, attention_mask=None)
    return counter.get_total_flops() / CONTEXT, 2 * config.hidden_size * config.vocab_size


def count_flops(report: Report) -> None:
    for shape in SHAPES:
        layers, head = flops_per_token(shape)
        score = layers + head
        for checkpointing in (False, True):
            # Forward, backward of twice as much, and the logits, or all, once more
            update = 3 * score + head + layers * checkpointing
            report.add(
                what=f"FLOPs, {shape}, {'with' if checkpointing else 'no'} checkpointing",
                ratio=update / (update + score),
                value=f"scoring on an H100 {1e6 * score / H100:.1f} µs/token",
            )


def seconds_per_token(function, tokens: int, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) / tokens)
    return statistics.median(times[1:])


def time_reading(report: Report, repeats: int) -> None:
    """Made-up answers of 64 completions, in vLLM's own classes."""
    from trl.generation.vllm_generation import extract_logprobs
    from vllm.logprobs import FlatLogprobs, Logprob

    generator, rows = np.random.default_rng(0), 64
    for likely in LIKELY:
        flats, objects, sampled = [], [], []
        for _ in range(rows):
            flat, dictionaries = FlatLogprobs(), []
            for _ in range(TOKENS):
                ids = generator.choice(150_000, likely + 1, replace=False).tolist()
                values = np.sort(np.log(generator.dirichlet(np.full(likely + 2, 0.1)) + 1e-12))[::-1][
                    : likely + 1
                ].tolist()
                listed = {i: Logprob(v, rank + 1, None) for rank, (i, v) in enumerate(zip(ids, values, strict=True))}
                flat.append(listed)
                dictionaries.append(listed)
            flats.append(flat)
            objects.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=dictionaries)]))
            sampled.append([flat.token_ids[place] for place in flat.start_indices])
        recorder = EngineOldPolicyCache.__new__(EngineOldPolicyCache)
        recorder.support_size, recorder.tail_mass = likely + 1, 1e-5

        def ours(flats=flats, sampled=sampled, likely=likely, recorder=recorder):
            answered = [
                read_answer(
                    tokens, np.subtract(flat.end_indices, flat.start_indices), flat.token_ids, flat.logprobs, likely
                )
                for tokens, flat in zip(sampled, flats, strict=True)
            ]
            recorder.keep(sampled, answered, None)
            live = torch.ones(TOKENS, dtype=torch.bool)
            if likely:
                for tokens, rows in zip(sampled, recorder._rows, strict=True):
                    recorder._pack(rows, torch.tensor(tokens), live)

        count = rows * TOKENS
        trls = seconds_per_token(lambda objects=objects: extract_logprobs(objects), count, repeats)
        own = seconds_per_token(ours, count, repeats)
        value = f"TRL's extract_logprobs {1e6 * trls:.1f} µs/token; ours, to the batch's rows, {1e6 * own:.1f}"
        report.add(what=f"reading, {likely} likely tokens", ratio=own / trls, value=value)


def write_model(folder: str, device: str) -> None:
    """The model that the engine samples with."""
    shared = {"tie_word_embeddings": True, "max_position_embeddings": 512}
    if device == "cuda":
        config = make_config("Qwen3-0.6B", **shared)
    else:
        config = Qwen3Config(
            vocab_size=32_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, **shared,
        )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):  # random numbers for a large model take a CPU seconds
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(folder)


def time_engine(report: Report, folder: str, device: str, repeats: int) -> None:
    from vllm import LLM, SamplingParams

    write_model(folder, device)
    sizes = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**30}
    if device == "cpu":
        sizes = {"dtype": "float32", "kv_cache_memory_bytes": 2**28}
    engine = LLM(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_logprobs=64,
        logprobs_mode="processed_logprobs", generation_config="vllm", max_num_seqs=64, **sizes,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}] * 64
    kinds = {f"{n}, {'flat' if flat else 'objects'}": (n, flat) for n in LIKELY for flat in (False, True)}

    def sample(likely, flat):
        options = {"flat_logprobs": True} if flat else {}
        settings = SamplingParams(
            temperature=1.0, max_tokens=ENGINE_TOKENS, ignore_eos=True, logprobs=likely, detokenize=False, **options
        )
        engine.generate(prompts, settings, use_tqdm=False)

    seconds = {name: [] for name in kinds}
    for i in range(-1, repeats):
        for name, arguments in kinds.items():
            start = time.perf_counter()
            sample(*arguments)
            if i >= 0:
                seconds[name].append((time.perf_counter() - start) / (64 * ENGINE_TOKENS))
        if i < 0:
            continue
        least = statistics.median(seconds["0, objects"])
        for name, values in seconds.items():
            own = statistics.median(values)
            report.add(
                what=f"engine, logprobs {name}", ratio=least / own, tokens_per_second=1 / own,
                value=f"{1 / own:.0f} tokens/s, {1e6 * (own - least):+.1f} µs/token to logprobs=0 as objects",
            )  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    args = options.parse_args()
    report = Report("engine_policy", args, {"what": "", "ratio": ".3f", "value": ""}, key=("what",))
    report.start("Ratios: our FLOPs to TRL's clip, our reading to TRL's, and tokens a second to logprobs=0.")
    if find_spec("vllm"):  # first, because a limit of time may cut what follows
        with tempfile.TemporaryDirectory() as folder:
            time_engine(report, folder, args.device, args.repeats)
        time_reading(report, args.repeats)
    count_flops(report)
    report.save()


if __name__ == "__main__":
    main()

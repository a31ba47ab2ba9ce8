"""How far vLLM's log-probabilities are from the trainer's, by dtype, and what each mode of the importance-sampling
correction makes of it.

    make test-vllm    # sets up .venv/vllm
    .venv/vllm/bin/python benchmarks/vllm_mismatch.py --model PATH --problems data/gsm8k/test.jsonl

The engine samples one completion of each problem at temperature 1 and reports the log-probabilities μ of its 64 most
likely tokens; the trainer's model scores the same tokens, q. "Difference" is log q(a) − log μ(a) of the sampled token;
KL(μ‖q) is over the 64 and one rest. A trust region of 0.05 around μ would lose this to the mismatch; TROLL's is around
q. The ratio of a completion is the product of its tokens' q/μ. The effective share of a weighting w is
(Σw)²/(n·Σw²) over tokens: 1 if all count alike.
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KEPT, BOUND = 64, 0.05
ENGINES = ("float32", "bfloat16")
TRAINERS = ("float32", "bfloat16 autocast")  # of float32 weights
# Defaults of TRL (sequence_mask, 3) and of the configs here (token_truncate, 2), and the other two at TRL's cap
MODES = (("token_truncate", 2.0), ("token_mask", 3.0), ("sequence_truncate", 3.0), ("sequence_mask", 3.0))


def sample(model: str, dtype: str, prompts: list[list[int]], tokens: int) -> list[list[dict[int, float]]]:
    """At each position of a completion the sampled token, first, and the most likely ones, with log-probabilities."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts)) + tokens
    engine = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=longest,
        logprobs_mode="processed_logprobs",
        max_logprobs=KEPT,
        kv_cache_memory_bytes=2**30,
        generation_config="vllm",
    )
    settings = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=KEPT)
    start = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
    completions = [
        [
            {token: row[token].logprob, **{other: value.logprob for other, value in row.items()}}
            for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in outputs
    ]
    count = sum(map(len, completions))
    print(f"{dtype} engine: {count} tokens in {time.perf_counter() - start:.0f} s", flush=True)
    del engine
    gc.collect()
    return completions


@torch.no_grad()
def score(model, trainer: str, prompts, completions) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`log q − log μ` of each completion's tokens `(T,)`, and KL(μ‖q) of all tokens."""
    differences, divergences = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        sampled = [next(iter(row)) for row in completion]
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer != "float32"):
            logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        log_q = logits.float().log_softmax(-1)
        for row, policy in zip(completion, log_q, strict=True):
            ids, log_mu = torch.tensor(list(row)), torch.tensor(list(row.values()), dtype=torch.float64)
            kept = policy[ids].double()
            rest_mu, rest_q = (1 - log_mu.exp().sum()).clamp(min=1e-9), (1 - kept.exp().sum()).clamp(min=1e-9)
            divergences.append((log_mu.exp() * (log_mu - kept)).sum() + rest_mu * (rest_mu / rest_q).log())
        theirs = torch.tensor([next(iter(row.values())) for row in completion])
        differences.append(log_q[range(len(sampled)), sampled] - theirs)
    return differences, torch.stack(divergences)


def weights(differences: list[torch.Tensor], mode: str, cap: float) -> torch.Tensor:
    """Weights of all tokens, as TRL weighs them."""
    if mode.startswith("sequence"):
        ratios = torch.cat([x.sum().expand(len(x)) for x in differences]).exp()
    else:
        ratios = torch.cat(differences).exp()
    return ratios.clamp(max=cap) if mode.endswith("truncate") else ratios * (ratios <= cap)


def report(engine: str, trainer: str, differences: list[torch.Tensor], kl: torch.Tensor, lengths: list[int]):
    size = torch.cat(differences).abs()
    print(
        f"| {engine} | {trainer} | {size.mean():.1e} | {size.quantile(0.99):.1e} | {size.max():.1e} "
        f"| {kl.mean():.1e} | {(kl > BOUND).double().mean():.1%} |"
    )
    if engine == trainer == "float32":
        return
    for length in lengths:
        cut = [x[:length] for x in differences if len(x) >= length]
        ratio = torch.stack([x.sum() for x in cut]).exp()
        low, high, beyond = ratio.quantile(0.05), ratio.quantile(0.95), (ratio > 3).double().mean()
        print(f"    to {length} tokens ({len(cut)}): 5 % to 95 % {low:.2f} to {high:.2f}, above 3 {beyond:.1%}", end="")
        for mode, cap in MODES:
            w = weights(cut, mode, cap).double()
            effective = w.sum() ** 2 / (len(w) * (w * w).sum())
            touched = (w == cap) if mode.endswith("truncate") else (w == 0)
            print(f"; {mode} {cap:g}: {touched.double().mean():.2%} at it, effective {effective:.2f}", end="")
        print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines with a column `question`")
    parser.add_argument("--count", type=int, default=48, help="number of problems")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = [json.loads(line)["question"] for line in args.problems.read_text().splitlines()[: args.count]]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    sampled = {dtype: sample(args.model, dtype, prompts, args.tokens) for dtype in ENGINES}
    print("| engine | trainer | mean | 99 % | largest | KL(μ‖q) mean | above 0.05 |\n|---|---|---|---|---|---|---|")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for trainer in TRAINERS:
        for engine in ENGINES:
            differences, kl = score(model, trainer, prompts, sampled[engine])
            report(engine, trainer, differences, kl, [32, 128, args.tokens])


if __name__ == "__main__":
    main()

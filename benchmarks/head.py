"""The sparse LM head against TRL's fused head, on the same hidden states: time and peak memory, as paired ratios.

    python benchmarks/head.py --tokens 1024 --hidden 1024 --vocabulary 151936 --support 64 --repeats 5 --json FILE

Both heads sit on a Qwen3 without layers, so that nothing but the head counts. Training pass: forward and backward with
gradients for hidden states and head. Scoring pass: without gradient; ours selects the support in it. Pairs run in turn
in one process, the order alternating; a ratio below 1 means that ours needs less. The last row masks every other
position (prompts, padding), which TRL computes on a CPU and we do not.

Memory is the peak resident set of a child process per head and pass, less what it held before the pass, and its ratio.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from troll_trl.lm_head import add_sparse_lm_head

PASSES = ("training", "scoring")


class Heads:
    """A model with both heads, a batch, and the four passes to be timed."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int, support: int, masked: bool = False):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=0,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=False,
        )
        self.model = Qwen3ForCausalLM(config)
        # The norm behind the frozen embeddings still asks for the gradient of the hidden states
        self.model.model.embed_tokens.requires_grad_(False)
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        add_sparse_lm_head(self.model)
        input_ids = torch.randint(vocabulary, (1, tokens + 1))
        labels = input_ids.clone()
        if masked:
            labels[:, ::2] = -100
        self.batch = {"input_ids": input_ids, "labels": labels, "fused_lm_head": True}
        self.support = support
        with torch.no_grad():
            self.token_ids = self.model(**self.batch, support_size=support).token_ids
        self.upstream = torch.randn((*self.token_ids.shape[:2], support + 1))

    def run(self, head: str, name: str) -> None:
        if name == "scoring":
            with torch.no_grad():
                self.model(**self.batch, **({"support_size": self.support} if head == "ours" else {}))
            return
        self.model.zero_grad(set_to_none=True)
        if head == "ours":
            output = self.model(**self.batch, token_ids=self.token_ids)
            used = output.sparse_log_probs.masked_fill(output.sparse_log_probs == -torch.inf, 0.0)
            (used * self.upstream).sum().backward()
        else:
            output = self.model(**self.batch)
            (output.log_probs * self.upstream[..., 0]).sum().backward()


def paired_times(heads: Heads, name: str, repeats: int) -> dict:
    """Ratios ours/TRL of `repeats` pairs, after a warm-up of both, and the median seconds of each."""
    seconds = {"ours": [], "trl": []}
    for i in range(-1, repeats):
        for head in ("ours", "trl") if i % 2 else ("trl", "ours"):
            start = time.perf_counter()
            heads.run(head, name)
            if i >= 0:
                seconds[head].append(time.perf_counter() - start)
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["trl"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        **{f"{head}_seconds": statistics.median(values) for head, values in seconds.items()},
    }


def resident(field: str) -> int:
    """A field of this process's status in bytes: VmRSS, or VmHWM, its peak (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only.")


def peak_memory(args: argparse.Namespace, head: str, name: str) -> int:
    """Bytes that one pass adds to the peak of a process of its own."""
    shape = [f"--{key}={getattr(args, key)}" for key in ("tokens", "hidden", "vocabulary", "support")]
    command = [sys.executable, __file__, *shape, "--child", head, name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def child(args: argparse.Namespace) -> None:
    head, name = args.child
    heads = Heads(args.tokens, args.hidden, args.vocabulary, args.support)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    heads.run(head, name)
    print(resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--support", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--child", nargs=2, metavar=("HEAD", "PASS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    print(f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {versions}")
    print(f"{args.tokens} tokens, hidden size {args.hidden}, vocabulary {args.vocabulary}, support {args.support}\n")
    print("| pass | time, ours/TRL: median (min–max) | ours s | TRL s | peak memory, ours/TRL | ours MiB | TRL MiB |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for masked in (False, True):
        heads = Heads(args.tokens, args.hidden, args.vocabulary, args.support, masked)
        for name in PASSES:
            row = {
                "pass": name + (", half of the rows masked" if masked else ""),
                **paired_times(heads, name, args.repeats),
            }
            cells = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f}) | {row['ours_seconds']:.2f} | "
            cells += f"{row['trl_seconds']:.2f} | "
            if masked:
                cells += "– | – | –"
            else:
                ours, theirs = (peak_memory(args, head, name) for head in ("ours", "trl"))
                row |= {"memory_ratio": ours / theirs, "ours_bytes": ours, "trl_bytes": theirs}
                cells += f"{ours / theirs:.2f} | {ours / 2**20:.0f} | {theirs / 2**20:.0f}"
            print(f"| {row['pass']} | {cells} |", flush=True)
            results.append(row)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"versions": versions, **{k: v for k, v in vars(args).items() if k != "child"}, "rows": results}, file
            )


if __name__ == "__main__":
    main()

"""The sparse LM head against TRL's fused head, full logits, and what the authors' code does, on the same hidden states.

    python benchmarks/head.py                          # the sizes of this device
    python benchmarks/head.py --tokens 1024 --hidden 1024 --vocabulary 151936 --support 64 --repeats 5

The heads are on a Qwen3 without layers, because only the head should count. No row is masked. The training pass is a
forward pass and a backward pass with gradients for hidden states and head. The scoring pass has no gradient; ours also
selects the support. A ratio below 1 means that ours needs less. On a GPU, "device" is the time of the kernels alone.
"authors" is the dense log-softmax with a top-k per row of old and new policy; "full" is full logits without any
selection. The script leaves these two out if they need more than 8 GiB, and on a CPU if tokens or support vary.

Floor: 2·N·V·H FLOPs for each product (N tokens, vocabulary of V, hidden size H): one in the scoring pass, and four in
the training pass, one of them recomputed. The scoring pass writes and reads every logit once. The training pass does so
twice, and moves the gradient once.
"""

import itertools
from functools import partial

import torch
from common import MIB, Floor, Report, device_kernels, device_seconds, paired_seconds, parser, peak_bytes, ratio
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from troll_trl.lm_head import add_sparse_lm_head

PASSES = ("training", "scoring")
# Hidden size; vocabularies, numbers of tokens and sizes of the support. A GPU runs all combinations; a CPU varies one
# list at a time and takes the first of the others
SIZES = {
    "cuda": (1024, [151_936, 32_000, 128_256, 262_144], [4096, 1024, 16_384], [64, 16, 256]),
    "cpu": (512, [151_936, 32_000, 128_256, 262_144], [128, 512], [64, 16, 256]),
}
MOST_DENSE = 8 * 2**30  # bytes of float32 logits and what a backward keeps of them


class Heads:
    """A model with both heads, a batch, and every pass to be timed."""

    def __init__(self, device: str, dtype: torch.dtype, hidden: int, vocabulary: int, tokens: int, support: int):
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
        with torch.device(device):  # on a CPU, random numbers for a large head take seconds
            self.model = Qwen3ForCausalLM(config).to(dtype)
        # The norm after the frozen embeddings still requires the gradient of the hidden states
        self.model.model.embed_tokens.requires_grad_(False)
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        add_sparse_lm_head(self.model)
        self.ids = torch.randint(vocabulary, (1, tokens + 1), device=device)
        self.batch = {"input_ids": self.ids, "labels": self.ids.clone(), "fused_lm_head": True}
        self.support = support
        with torch.no_grad():
            self.token_ids = self.model(**self.batch, support_size=support).token_ids
        self.upstream = torch.randn((1, tokens, support + 1), device=device)
        self.floats = tokens * vocabulary

    def run(self, head: str, name: str) -> None:
        with torch.set_grad_enabled(name == "training"):
            loss = getattr(self, f"_{head}")(name)
        if name == "training":
            loss.backward()
            self.model.zero_grad(set_to_none=True)  # so that every run finds the memory as the first did

    def _ours(self, name):
        if name == "scoring":
            return self.model(**self.batch, support_size=self.support)
        log_probs = self.model(**self.batch, token_ids=self.token_ids).sparse_log_probs
        return (log_probs.masked_fill(log_probs == -torch.inf, 0.0) * self.upstream).sum()

    def _trl(self, name):
        return (self.model(**self.batch).log_probs * self.upstream[..., 0]).sum()

    def _full(self, name):
        log_probs = self.model(input_ids=self.ids).logits[:, :-1].float().log_softmax(-1)
        return (log_probs.gather(-1, self.ids[:, 1:, None]) * self.upstream[..., :1]).sum()

    def _authors(self, name):
        log_probs = self.model(input_ids=self.ids).logits[:, :-1].float().log_softmax(-1)
        best = log_probs.topk(self.support, -1)
        if name == "scoring":
            return best
        kept = log_probs.gather(-1, self.token_ids.long().clamp(min=0))
        return (kept * self.upstream[..., :-1]).sum() + best.values.sum()


def measure(report: Report, floor: Floor, args, dtype, hidden: int, vocabulary: int, tokens: int, support: int) -> None:
    heads = Heads(args.device, dtype, hidden, vocabulary, tokens, support)
    dense = heads.floats * 4 * 4 <= MOST_DENSE and (args.device == "cuda" or (tokens, support) == (128, 64))
    names = ("ours", "trl", "full", "authors") if dense else ("ours", "trl")
    for name in PASSES:
        runs = {head: partial(heads.run, head, name) for head in names}
        seconds = paired_seconds(runs, args.repeats, args.device)
        memory = {head: peak_bytes(run, args.device) for head, run in runs.items()}
        kernels = {}
        if args.device == "cuda":
            kernels = {head: device_kernels(runs[head], args.repeats) for head in ("ours", "trl")}
        on_device = {head: device_seconds(of) for head, of in kernels.items()}
        products, logits = (4, 5) if name == "training" else (1, 2)
        moved = logits * heads.floats * dtype.itemsize + products * vocabulary * hidden * dtype.itemsize
        least = floor.seconds(products * 2 * heads.floats * hidden, moved)
        ours = sorted(seconds["ours"])[args.repeats // 2]
        report.add(
            **{"pass": name, "V": vocabulary, "tokens": tokens, "K": support, "H": hidden},
            **{f"time/{head}": ratio(seconds["ours"], seconds[head])["ratio"] for head in runs if head != "ours"},
            **{key: ratio(seconds["ours"], seconds["trl"])[key] for key in ("ratio_min", "ratio_max")},
            **({"device/trl": on_device["ours"] / on_device["trl"]} if all(on_device.values()) and on_device else {}),
            **{f"{head} ms on device": 1e3 * seconds for head, seconds in on_device.items() if seconds},
            **{f"memory/{head}": memory["ours"] / memory[head] for head in runs if head != "ours"},
            **{"ours s": ours, "floor s": least, "ours/floor": ours / least, "ours MiB": memory["ours"] / MIB},
            seconds=seconds,
            peak_bytes=memory,
            device_seconds=on_device,
            kernels=kernels,
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--hidden", type=int)
    for name in ("vocabulary", "tokens", "support"):
        options.add_argument(
            f"--{name}", type=int, nargs="+", help="if you give any of these, the script runs only their combinations"
        )
    args = options.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    hidden, *axes = SIZES[args.device]
    given = [args.vocabulary, args.tokens, args.support]
    if any(given):
        sizes = list(itertools.product(*(g or [axis[0]] for g, axis in zip(given, axes, strict=True))))
    elif args.device == "cuda":
        sizes = list(itertools.product(*axes))
    else:  # one at a time
        centre = [axis[0] for axis in axes]
        sizes = [tuple(centre)] + [
            (*centre[:i], value, *centre[i + 1 :]) for i, axis in enumerate(axes) for value in axis[1:]
        ]
    columns = {"pass": "", "V": ",", "tokens": ",", "K": ""}
    columns |= {"time/trl": ".2f", "ratio_min": ".2f", "ratio_max": ".2f", "time/full": ".2f", "time/authors": ".2f"}
    columns |= {"device/trl": ".2f"} if args.device == "cuda" else {}
    columns |= {"memory/trl": ".2f", "memory/full": ".2f", "memory/authors": ".2f"}
    columns |= {"ours ms on device": ".2f", "trl ms on device": ".2f"} if args.device == "cuda" else {}
    report = Report("head", args, columns | {"ours MiB": ".0f", "ours s": ".3f", "floor s": ".3f", "ours/floor": ".2f"})
    floor = Floor(args.device, dtype)
    report.start(f"{floor}. Hidden size {args.hidden or hidden}, {dtype}.")
    for vocabulary, tokens, support in sizes:
        measure(report, floor, args, dtype, args.hidden or hidden, vocabulary, tokens, support)
    report.save()


if __name__ == "__main__":
    main()

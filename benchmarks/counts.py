"""Count what a GPU does in a training step and in each pass of the head, ours next to TRL's. This needs no GPU.

    python benchmarks/counts.py
    python benchmarks/counts.py --tokens 32768 131072

The GPU's code runs on tensors of the meta device, without memory or arithmetic. The script records every operation and
every kernel launch. It counts the FLOPs of matrix products and attention, the bytes of logits and block statistics
written and read, the bytes that all other operations write and read, launches, waits for the device, and the peak bytes
beyond the inputs. The prediction below them is for an H100. It uses FLOPs and bytes per second, and the time that
choosing a support was measured to take there. It assumes that launches hide behind the work.
"""

import argparse
import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from troll_trl import project
from troll_trl.kernels import (
    blocks,
    coefficients,
    dispatch,
    fold,
    gradient,
    outcomes,
    projection,
    support,
    tiles,
    topk,
)
from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head import add_sparse_lm_head, sparse_log_probs, support_selection
from troll_trl.trainers.trust_region_model import TrustRegionModel
from troll_trl.trust_region.ragged import RaggedDistribution
from troll_trl.trust_region.regions import MaskTrustRegion, ProjectionTrustRegion
from troll_trl.trust_region.sparse import SparseDistribution

MIB = 2**20
# Hidden size, vocabulary
SHAPES = {"qwen3-0.6b": (1024, 151_936), "qwen3-4b": (2560, 151_936)}
# The rest of these models; the embeddings are the head
CONFIGS = {
    "qwen3-0.6b": {"intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# An H100: dense bf16 FLOP/s that large matrix products reach of the peak of 989e12, and bytes/s of its data sheet
FLOPS_PER_SECOND, BYTES_PER_SECOND = 700e12, 3.35e12
# Seconds per token that the two kernels of the choice take there, for V = 151,936 and K = 64: their programs wait for
# their own sums, which no count shows
CHOICE_SECONDS = 0.52e-3 / 4096
SUPPORT = 64
# Passes over the tile of a kernel; the others touch a few entries of it
TILE_PASSES = {
    "_fold_kernel": 1,
    "_reduce_kernel": 1,
    "_gradient_kernel": 2,
    "_forward_kernel": 1,
    "_backward_kernel": 2,
}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "masked_scatter_backward", "unique2"}
PRODUCTS = {"mm", "addmm"}
_LOOKED_UP = ("embedding", "index_select", "gather")
_NOTHING_READ = ("new_", "zeros", "ones", "full", "arange", "scalar_tensor")


@dataclass
class Counts:
    """The counts of one pass."""

    flops: float = 0.0
    tile_bytes: float = 0.0
    other_bytes: float = 0.0  # of all operations but products and those on a tile
    peak_bytes: int = 0
    waits: int = 0
    launches: Counter = field(default_factory=Counter)

    @property
    def launched(self) -> int:
        return sum(self.launches.values())

    @property
    def seconds(self) -> float:
        """Products and what reads and writes memory one after the other."""
        return self.flops / FLOPS_PER_SECOND + (self.tile_bytes + self.other_bytes) / BYTES_PER_SECOND


class OldPolicyCache(TorchDispatchMode):
    """Counts what passes by; the memory of `inputs` was there before. `live` says of a number of positions how many
    have a label, if not all."""

    def __init__(self, inputs: list[torch.Tensor], live: dict[int, int]):
        super().__init__()
        self.live = live
        self.counts = Counts()
        self.inputs = {StorageWeakRef(x.untyped_storage()) for x in inputs}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if name in WAITS or _is_unknown(name, args) or _leaves_the_device(func, args, kwargs):
            self.counts.waits += 1
        result = _UNKNOWN[name](*args) if _is_unknown(name, args) else func(*args, **kwargs)
        if name == "nonzero":
            result = result[: self.live.get(len(result), len(result))]
        if name in PRODUCTS:
            a, b = args[:2] if name == "mm" else args[1:3]
            self.counts.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.counts.launches[name] += 1
            if name not in PRODUCTS:
                read = result if name.startswith(_LOOKED_UP) else (args, kwargs)  # of a table, what is written
                read = () if name.startswith(_NOTHING_READ) or name.endswith("_like") else read
                tensors = [x for x in tree_leaves((read, result)) if isinstance(x, torch.Tensor)]
                self.counts.other_bytes += sum(x.numel() * x.element_size() for x in tensors)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._hold(x.untyped_storage())
        return result

    def _hold(self, storage) -> None:
        if StorageWeakRef(storage) in self.inputs:
            return
        self.storages = {held: size for held, size in self.storages.items() if not held.expired()}
        self.storages[StorageWeakRef(storage)] = storage.nbytes()
        self.counts.peak_bytes = max(self.counts.peak_bytes, sum(self.storages.values()))

    def kernel(self, name: str, arguments) -> None:
        self.counts.launches[name] += 1
        first, *others = arguments
        if name == "_reduce_kernel":  # of the tile only this chunk
            first = first[:, : others[9]]
        elif name == "_best_blocks_kernel":  # three statistics of each block, written by `reduce` and read here
            self.moved(first, 6)
        elif name == "_best_tokens_kernel":  # the members of the best blocks
            self.moved(first[:, : blocks.BLOCK * others[8]], 1)
        self.moved(first, TILE_PASSES.get(name, 0))
        if name.startswith(("_project", "_support", "_outcomes", "_coefficients")):
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            self.counts.other_bytes += sum(x.numel() * x.element_size() for x in tensors)

    def moved(self, tensor: torch.Tensor, passes: int) -> None:
        self.counts.tile_bytes += passes * tensor.numel() * tensor.element_size()


# What a device would be waited for, and a meta tensor cannot say: positions are live unless `live` says otherwise, and
# every check passes
_UNKNOWN: dict[str, Callable] = {
    "nonzero": lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    "_local_scalar_dense": lambda x: False,
    "index": lambda x, indices: x.new_empty((indices[0].numel(), *x.shape[indices[0].dim() :])),
    "masked_scatter_backward": lambda gradient, mask, sizes: gradient.new_empty(sizes),
}


def _is_unknown(name: str, args) -> bool:
    return name in _UNKNOWN and (name != "index" or args[1][0].dtype == torch.bool)


def _leaves_the_device(func, args, kwargs) -> bool:
    if func._overloadpacket.__name__ not in ("_to_copy", "copy_"):
        return False
    devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    to = kwargs.get("device")
    return len(devices | ({torch.device(to).type} if to is not None else set())) > 1


class _Kernel:
    """In place of a Triton kernel: counts its launch."""

    def __init__(self, name: str, recorder: OldPolicyCache):
        self.name, self.recorder = name, recorder

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.recorder.kernel(self.name, arguments)

        return launch


@contextlib.contextmanager
def recorded(inputs: list[torch.Tensor], live: dict[int, int] | None = None) -> Iterator[OldPolicyCache]:
    """Count what runs inside, on tensors of the meta device, as on a GPU."""
    recorder = OldPolicyCache(inputs, live or {})

    def accumulate(acc, a, b):
        recorder.counts.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        recorder.counts.launches["addmm"] += 1
        recorder.moved(a, 1)  # of both products the first factor is the tile

    def product(out, hidden, weight):
        product_into(out, hidden, weight)
        recorder.moved(out, 1)

    product_into = sparse_log_probs.product_into
    with contextlib.ExitStack() as stack:
        ours = (blocks, coefficients, fold, gradient, outcomes, projection, support, topk)
        for module in (*ours, chunked_logprob):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, _Kernel(name, recorder)))
        for module in (sparse_log_probs, support_selection):
            stack.enter_context(mock.patch.object(module, "product_into", product))
        stack.enter_context(mock.patch.object(sparse_log_probs, "accumulate_product", accumulate))
        stack.enter_context(mock.patch.object(chunked_logprob, "_addmm_fp32", accumulate))
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda device: False))
        for module in (*ours, sparse_log_probs, support_selection, tiles):
            stack.enter_context(mock.patch.object(module, "use_triton", lambda device: True))
        for module in (chunked_logprob, trl_utils):
            stack.enter_context(mock.patch.object(module, "_use_triton", lambda device: True))
        stack.enter_context(mock.patch.object(dispatch, "on_device", lambda device: contextlib.nullcontext()))
        stack.enter_context(recorder)
        yield recorder


def count_passes(hidden_size: int, vocabulary: int, tokens: int, support: int = SUPPORT) -> dict[str, Counts]:
    """
    Every pass with all `tokens` live, in bf16.

    Returns:
        `dict[str, Counts]`: `"ours/scoring"`, `"ours/training"` (forward and backward), `"trl/scoring"`,
        `"trl/training"`, and `"projection"` (forward and backward).
    """
    device = torch.device("meta")
    new = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=device)
    hidden, weight = (new(n, hidden_size).requires_grad_() for n in (tokens, vocabulary))
    sampled, ids = new(tokens, dtype=torch.int64), new(tokens, support, dtype=torch.int32)
    transform = LogitTransform()
    gather = lambda *_: contextlib.nullcontext()
    theirs = lambda: chunked_logprob.ChunkedLogProbFunction.apply(
        hidden, weight, None, sampled, 1.0, 32_768, None, 1.0, ("entropy",)
    )
    policy, old = (new(tokens, support + 1, dtype=torch.float32).requires_grad_() for _ in range(2))

    inputs = [hidden, weight, sampled, ids, policy, old]

    def train(output):
        return torch.autograd.grad(output, [hidden, weight], torch.empty_like(output))

    runs: dict[str, Callable[[], object]] = {
        "ours/scoring": lambda: support_selection.select_support(
            hidden, weight, None, sampled, support, 1e-5, transform
        ),
        "ours/training": lambda: train(
            sparse_log_probs.SparseLogProbs.apply(hidden, weight, None, ids, transform, gather)[0]
        ),
        "trl/scoring": theirs,
        "trl/training": lambda: train(theirs()[0]),
        "projection": lambda: torch.autograd.grad(
            project(policy, old.detach(), 0.05).log_probs, policy, torch.empty_like(policy)
        ),
    }
    result = {}
    for name, run in runs.items():
        with torch.set_grad_enabled(not name.endswith("scoring")), recorded(inputs) as recorder:
            run()
        result[name] = recorder.counts
        if not name.startswith("ours"):
            _add_trls_products(result[name], vocabulary, tokens)
    return result


def _add_trls_products(counts: Counts, vocabulary: int, tokens: int) -> None:
    """TRL's products write their tile by `torch.mm` itself: one pass for each, two in the training pass."""
    products = counts.launches["mm"] / math.ceil(vocabulary / 32_768) / math.ceil(tokens / 4096)
    counts.tile_bytes += products * tokens * vocabulary * 2


class _Attention(torch.autograd.Function):
    """In place of a flash attention: its FLOPs, and what it keeps for the backward."""

    @staticmethod
    def forward(ctx, recorder, query, key, value):
        ctx.recorder, ctx.flops = recorder, 2 * query.numel() * query.shape[2]  # two products, half of them masked
        recorder.counts.flops += ctx.flops
        out, log_sum_exp = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, gradient):
        ctx.recorder.counts.flops += 2.5 * ctx.flops  # one product again, and two for each of the forward's
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def count_steps(shape: str, rows: int, length: int, layers: int | None = None) -> dict[str, Counts]:
    """
    The loss and its gradient for a micro-batch, and the pass that scores it, of a whole model with gradient
    checkpointing: all tokens live, in bf16, without the optimizer, which both share.

    Args:
        shape (`str`):
            A name of `SHAPES`.
        rows (`int`), length (`int`):
            Completions of the micro-batch, and their tokens.
        layers (`int`, *optional*):
            Layers of the model, where the shape's are not wanted.

    Returns:
        `dict[str, Counts]`: `"ours/scoring"`, `"ours/training"`, `"trl/scoring"`, `"trl/training"`, and
        `"mask/training"`, of DPPO's mask with a binary divergence, whose scoring is TRL's.
    """
    hidden_size, vocabulary = SHAPES[shape]
    config = {**CONFIGS[shape], "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, hidden_size=hidden_size, **config))
        model = model.to(torch.bfloat16).train()
        ids = torch.empty(rows, length + 1, dtype=torch.int64)
        support = torch.empty(rows, length, SUPPORT, dtype=torch.int32)
        log_probs = torch.empty(rows, length, SUPPORT + 1)
        old, advantages = torch.empty(rows, length), torch.empty(rows, 1)
        live = torch.ones(rows, length, dtype=torch.bool)
    kwargs = {"use_reentrant": False, "preserve_rng_state": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a name that old and new versions of transformers know
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model.config._attn_implementation = "counted"
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    add_sparse_lm_head(model)
    batch = {"input_ids": ids, "attention_mask": {"full_attention": None}, "labels": ids, "fused_lm_head": True}

    def clip():
        ratio = (model(**batch).log_probs - old).exp()
        limited = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-limited * live).sum().backward()

    def troll():
        this = TrustRegionModel(ProjectionTrustRegion(0.05), log_probs, support, live, advantages)
        ratio = (this.wrap(model, length)(**batch).log_probs - old).exp()
        ((this.bounded.regression - ratio * advantages) * live).sum().backward()

    def mask():
        this = TrustRegionModel(MaskTrustRegion("binary_tv", 0.15), old.unsqueeze(-1), None, live, advantages)
        ratio = (this.wrap(model, length)(**batch).log_probs - old).exp()
        limited = torch.min(ratio * advantages, ratio.clamp(-math.inf, math.inf) * advantages)
        (-limited * live).sum().backward()

    def pack():
        output = model(**batch, support_size=SUPPORT, check_finite=False)
        RaggedDistribution.pack(SparseDistribution(output.token_ids, output.sparse_log_probs))

    runs = {"ours/scoring": pack, "ours/training": troll, "trl/scoring": lambda: model(**batch), "trl/training": clip}
    runs["mask/training"] = mask
    result = {}
    for name, run in runs.items():
        inputs = [*model.parameters(), ids, support, log_probs, old, advantages, live]
        # Nothing follows the last token of a row
        labelled = {rows * (length + 1): rows * length}
        with torch.set_grad_enabled(name.endswith("training")), recorded(inputs, labelled) as recorder:
            attention = lambda module, q, k, v, mask, recorder=recorder, **_: (
                _Attention.apply(recorder, q, k, v).transpose(1, 2).contiguous(),
                None,
            )
            AttentionInterface.register("counted", attention)
            run()
        model.zero_grad(set_to_none=True)
        result[name] = recorder.counts
        if not name.startswith("ours"):
            heads_products = 1 if name.endswith("scoring") else 2
            result[name].tile_bytes += heads_products * rows * length * vocabulary * 2
    return result


def predicted_ratio(counts: dict[str, Counts], tokens: int) -> float:
    """Time of scoring and training `tokens` over that of TRL's, generation and optimizer not counted."""
    passes = ("scoring", "training")
    ours, theirs = (sum(counts[f"{whose}/{name}"].seconds for name in passes) for whose in ("ours", "trl"))
    return (ours + tokens * CHOICE_SECONDS) / theirs


def print_rows(shape: str, tokens: int, what: str, counts: dict[str, Counts]) -> None:
    for name, of in counts.items():
        print(
            f"| {shape} | {tokens:,} | {what}{name} | {of.flops / 1e15:.3f} | {of.tile_bytes / 1e9:.1f} | "
            f"{of.other_bytes / 1e9:.1f} | {of.launched:,} | {of.waits} | {of.peak_bytes / MIB:,.0f} |",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--tokens", type=int, nargs="+", default=[8 * 4096, 8 * 16_384], help="tokens of 8 completions together"
    )
    args = options.parse_args()
    print("| shape | tokens | pass | PFLOP | tile GB | other GB | launches | waits | peak MiB |\n|" + "---|" * 9)
    ratios = []
    for shape, (hidden_size, vocabulary) in SHAPES.items():
        for tokens in args.tokens:
            print_rows(shape, tokens, "head: ", count_passes(hidden_size, vocabulary, tokens))
            counts = count_steps(shape, 8, tokens // 8)
            print_rows(shape, tokens, "step: ", counts)
            ratios.append((shape, tokens, predicted_ratio(counts, tokens)))
    print("\n| shape | tokens | predicted step on an H100, ours/TRL |\n|" + "---|" * 3)
    for shape, tokens, ratio in ratios:
        print(f"| {shape} | {tokens:,} | {ratio:.4f} |")


if __name__ == "__main__":
    main()

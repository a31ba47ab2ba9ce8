"""What a GPU would do in one pass of the head and of the projection, counted without one, ours beside TRL's.

    python benchmarks/counts.py
    python benchmarks/counts.py --tokens 32768 131072

The GPU's code runs on tensors of the meta device: no memory, no arithmetic, but every operation and every kernel launch
passes by. Counted are the FLOPs of matrix products, the bytes of logits and block statistics written and read,
launches, waits for the device, and the most bytes held beyond the inputs. The prediction below them rests on the FLOPs
and bytes per second of `DEVICES`, and on launches that hide behind the work; a measurement on such a device may refute
it.
"""

import argparse
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl.kernels import chunked_logprob

from troll_trl.lm_head import sparse_log_probs, support_selection
from troll_trl.lm_head.kernels import blocks, candidates, fold, gradient, tiles
from troll_trl.lm_head.kernels.tiles import LogitTransform
from troll_trl.trust_region import dispatch, projection, projection_kernel

MIB = 2**20
# Hidden size, vocabulary, parameters beside head and embeddings
SHAPES = {"qwen3-0.6b": (1024, 151_936, 0.44e9), "qwen3-4b": (2560, 151_936, 3.6e9)}
# Dense bf16 FLOP/s that large matrix products reach of the peak (989e12 and 312e12), bytes/s of the data sheets
DEVICES = {"H100 SXM": (700e12, 3.35e12), "A100 SXM 80 GB": (250e12, 2.04e12)}
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


@dataclass
class Counts:
    """Of one pass."""

    flops: float = 0.0
    tile_bytes: float = 0.0
    peak_bytes: int = 0
    waits: int = 0
    launches: Counter = field(default_factory=Counter)

    @property
    def launched(self) -> int:
        return sum(self.launches.values())

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Products and passes over tiles one after the other, nothing else."""
        return self.flops / flops_per_second + self.tile_bytes / bytes_per_second


class Recorder(TorchDispatchMode):
    """Counts what passes by; the memory of `inputs` was there before."""

    def __init__(self, inputs: list[torch.Tensor]):
        super().__init__()
        self.counts = Counts()
        self.inputs = {StorageWeakRef(x.untyped_storage()) for x in inputs}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if name in WAITS or _leaves_the_device(func, args, kwargs):
            self.counts.waits += 1
        result = func(*args, **kwargs)
        if name in PRODUCTS:
            a, b = args[:2] if name == "mm" else args[1:3]
            self.counts.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.counts.launches[name] += 1
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

    def moved(self, tensor: torch.Tensor, passes: int) -> None:
        self.counts.tile_bytes += passes * tensor.numel() * tensor.element_size()


def _leaves_the_device(func, args, kwargs) -> bool:
    if func._overloadpacket.__name__ not in ("_to_copy", "copy_"):
        return False
    devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    to = kwargs.get("device")
    return len(devices | ({torch.device(to).type} if to is not None else set())) > 1


class _Kernel:
    """In place of a Triton kernel: counts its launch."""

    def __init__(self, name: str, recorder: Recorder):
        self.name, self.recorder = name, recorder

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.recorder.kernel(self.name, arguments)

        return launch


@contextlib.contextmanager
def recorded(inputs: list[torch.Tensor]) -> Iterator[Recorder]:
    """Count what runs inside, on tensors of the meta device, as on a GPU."""
    recorder = Recorder(inputs)

    def accumulate(acc, a, b):
        recorder.counts.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        recorder.counts.launches["addmm"] += 1
        recorder.moved(a, 1)  # of both products the first factor is the tile

    def product(out, hidden, weight):
        product_into(out, hidden, weight)
        recorder.moved(out, 1)

    product_into = sparse_log_probs.product_into
    with contextlib.ExitStack() as stack:
        for module in (fold, gradient, blocks, candidates, projection_kernel, chunked_logprob):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, _Kernel(name, recorder)))
        for module in (sparse_log_probs, support_selection):
            stack.enter_context(mock.patch.object(module, "product_into", product))
        stack.enter_context(mock.patch.object(sparse_log_probs, "accumulate_product", accumulate))
        stack.enter_context(mock.patch.object(chunked_logprob, "_addmm_fp32", accumulate))
        stack.enter_context(mock.patch.object(support_selection, "_columns", lambda *_: 16_384))  # an H100's
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda device: False))
        for module in (sparse_log_probs, blocks, candidates, fold, gradient, tiles, projection):
            stack.enter_context(mock.patch.object(module, "use_triton", lambda device: True))
        stack.enter_context(mock.patch.object(chunked_logprob, "_use_triton", lambda device: True))
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
            projection.project(policy, old.detach(), 0.05).log_probs, policy, torch.empty_like(policy)
        ),
    }
    result = {}
    for name, run in runs.items():
        with torch.set_grad_enabled(not name.endswith("scoring")), recorded(inputs) as recorder:
            run()
        result[name] = recorder.counts
        if name.startswith("trl"):
            _add_trls_products(result[name], vocabulary, tokens)
    return result


def _add_trls_products(counts: Counts, vocabulary: int, tokens: int) -> None:
    """TRL's products write their tile by `torch.mm` itself: one pass for each, two in the training pass."""
    products = counts.launches["mm"] / math.ceil(vocabulary / 32_768) / math.ceil(tokens / 4096)
    counts.tile_bytes += products * tokens * vocabulary * 2


def predicted_ratio(shape: str, counts: dict[str, Counts], tokens: int, device: str) -> float:
    """
    Time of a training step, scoring included and generation not, over that of TRL's. Both do the same model, counted by
    the FLOPs of its parameters (a forward in scoring; forward, recomputed forward and twice that for the backward in
    training; attention would add to both), and then what was counted of their heads.
    """
    flops_per_second, bytes_per_second = DEVICES[device]
    model = 2 * SHAPES[shape][2] * tokens * (1 + 4) / flops_per_second
    head = lambda whose: sum(
        counts[f"{whose}/{name}"].seconds(flops_per_second, bytes_per_second) for name in ("training", "scoring")
    )
    kept = tokens * (SUPPORT + 1) * 4
    # Reads and writes of (tokens, K + 1) float32: the projection's five, and some twenty in the loss around it
    small = 25 * kept / bytes_per_second
    return (model + head("ours") + small) / (model + head("trl"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, nargs="+", default=[8 * 4096, 8 * 16_384])
    args = options.parse_args()
    print("| shape | tokens | pass | PFLOP | tile GB | launches | waits | peak MiB |\n|" + "---|" * 8)
    ratios = []
    for shape, (hidden_size, vocabulary, _) in SHAPES.items():
        for tokens in args.tokens:
            counts = count_passes(hidden_size, vocabulary, tokens)
            for name, of in counts.items():
                print(
                    f"| {shape} | {tokens:,} | {name} | {of.flops / 1e15:.3f} | {of.tile_bytes / 1e9:.1f} | "
                    f"{of.launched:,} | {of.waits} | {of.peak_bytes / MIB:,.0f} |"
                )
            ratios += [(shape, tokens, device, predicted_ratio(shape, counts, tokens, device)) for device in DEVICES]
    print("\n| shape | tokens | device | predicted step, ours/TRL |\n|" + "---|" * 4)
    for shape, tokens, device, ratio in ratios:
        print(f"| {shape} | {tokens:,} | {device} | {ratio:.3f} |")


if __name__ == "__main__":
    main()

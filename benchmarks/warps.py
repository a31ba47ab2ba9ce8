"""The kernels of the LM head and of the projection with other numbers of warps, and the scoring pass with other tiles.

    python benchmarks/warps.py                            # on a GPU
    TRITON_INTERPRET=1 python benchmarks/warps.py --vocabulary 300 --tokens 8 --hidden 16 --support 4   # its checks

The script finds the kernels of a pass, and their warps, by running the pass. Then each kernel gets half and twice its
warps, while all others keep theirs, and sizes that a launcher derives from its warps stay. A row has the time of that
kernel alone, by PyTorch's profiler. "to default" above 1 says that the default was faster. "difference" is the largest
difference of the pass's result from the default's.

A scoring tile holds the logits of at most so many positions. Its rows have the time of all kernels of the pass.

Without a GPU, Triton's interpreter runs the kernels: there are differences, and no times.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from unittest import mock

import torch
from common import Report, device_kernels, device_seconds, parser
from head import Heads

from troll_trl import kernels, project
from troll_trl.kernels import blocks, dispatch
from troll_trl.lm_head import support_selection

MODULES = [import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__)]
FACTORS = (1, 0.5, 2)  # of the warps; the default first
TILE_ROWS = (256, 512, 640, 768, 1024, 1408)
MOST_WARPS = 32


@contextlib.contextmanager
def launches(warps_of: dict[str, int]) -> Iterator[dict[str, int]]:
    """Launch kernels with `warps_of` their names. Yields the warps of all kernels that are launched."""
    seen: dict[str, int] = {}

    def launch(kernel, grid, device, *arguments, **options):
        name = kernel.fn.__name__
        seen[name] = warps_of.get(name, options["num_warps"])
        options |= {"num_warps": seen[name]}
        dispatch.launch(kernel, grid, device, *arguments, **options)

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            if module is dispatch or not hasattr(module, "launch"):
                continue
            stack.enter_context(mock.patch.object(module, "launch", launch))
        yield seen


def make_passes(args) -> dict[str, Callable[[], torch.Tensor]]:
    """Passes by name; each returns what its kernels computed, as one tensor."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    heads = Heads(args.device, dtype, args.hidden, args.vocabulary, args.tokens, args.support)
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(args.tokens, args.support + 1, generator=generator).to(args.device)
    policy, old = (draw().log_softmax(1) for _ in range(2))
    policy.requires_grad_()

    def scoring():
        with torch.no_grad():
            return heads._ours("scoring").sparse_log_probs

    def training():
        heads._ours("training").backward()
        gradient = heads.model.lm_head.weight.grad.float()
        heads.model.zero_grad(set_to_none=True)
        return gradient

    def projecting():
        log_probs = project(policy, old, 0.05).log_probs
        return torch.autograd.grad(log_probs.sum(), policy)[0]

    return {"scoring": scoring, "training": training, "projection": projecting}


def largest_difference(result: torch.Tensor, default: torch.Tensor) -> float:
    same = result == default  # two infinities, too
    return torch.where(same, 0.0, result - default).abs().max().item()


class Settings:
    """The rows of one pass in several settings, the default first."""

    def __init__(self, report: Report, args, name: str, run: Callable[[], torch.Tensor]):
        self.report, self.args, self.name, self.run = report, args, name, run
        self.default = run()
        self.first: float | None = None

    def add(self, kernel: str | None, what: str) -> None:
        """Measure `kernel`, or all of them, in the current setting."""
        difference = largest_difference(self.run(), self.default)
        times = device_kernels(self.run, self.args.repeats) if self.args.device == "cuda" else {}
        seconds = device_seconds(times, kernel or "")
        self.first = self.first or seconds
        row = {"pass": self.name, "kernel": kernel or "all", "what": what}
        if seconds and self.first:
            row |= {"ms": 1e3 * seconds, "to default": seconds / self.first}
        self.report.add(**row, difference=difference)


def vary_warps(report: Report, args, name: str, run: Callable[[], torch.Tensor]) -> None:
    with launches({}) as defaults:
        run()
    for kernel, warps in defaults.items():
        settings = Settings(report, args, name, run)
        for chosen in dict.fromkeys(min(max(int(warps * factor), 1), MOST_WARPS) for factor in FACTORS):
            with launches({kernel: chosen}):
                settings.add(kernel, f"{chosen} warps")


def vary_rows(report: Report, args, run: Callable[[], torch.Tensor]) -> None:
    settings = Settings(report, args, "scoring", run)
    settings.add(None, "default tile")
    width = math.ceil(args.vocabulary / blocks.COLUMNS_STEP) * blocks.COLUMNS_STEP
    for rows in TILE_ROWS:
        if rows <= args.tokens:
            elements = dict.fromkeys(support_selection._TILE_ELEMENTS, rows * width)
            with mock.patch.dict(support_selection._TILE_ELEMENTS, elements):
                settings.add(None, f"tile of at most {rows} rows")


def main() -> None:
    options = parser(__doc__)
    for name, size in (("vocabulary", 151_936), ("tokens", 4096), ("hidden", 1024), ("support", 64)):
        options.add_argument(f"--{name}", type=int, default=size)
    args = options.parse_args()
    if not dispatch.use_triton(torch.device(args.device)):
        options.error(f"no Triton kernels run on {args.device} here. Use a GPU, or set TRITON_INTERPRET=1.")
    columns = {"pass": "", "kernel": "", "what": "", "ms": ".3f", "to default": ".3f", "difference": ".1e"}
    report = Report("warps", args, columns)
    report.start(f"V = {args.vocabulary:,}, H = {args.hidden:,}, {args.tokens:,} tokens, K = {args.support}.")
    passes = make_passes(args)
    vary_warps(report, args, "scoring", passes["scoring"])
    vary_rows(report, args, passes["scoring"])
    for name in ("training", "projection"):
        vary_warps(report, args, name, passes[name])
    report.save()


if __name__ == "__main__":
    main()

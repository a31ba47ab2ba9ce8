"""What the benchmarks share: paired timing, peak memory by the allocator, the floor of a device, and the report.

`head.py`, `projection.py` and `step.py` choose sizes for `--device` (by default a GPU if there is one), print a
markdown table, and with `--results FOLDER` add their rows to FOLDER/<device>-<date>.json. `check_gpu.py` runs all three
with one file of results.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import triton
import trl
from torch.profiler import ProfilerActivity, profile, supported_activities

MIB = 2**20


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    result.add_argument("--repeats", type=int, default=3, help="pairs per figure, after a warm-up (default: 3)")
    result.add_argument(
        "--results", type=Path, help="folder whose <device>-<date>.json takes the rows, or a .json file"
    )
    result.add_argument("--name", help="name of the rows in that file (default: the benchmark's)")
    return result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def paired_seconds(runs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Time every run `repeats` times, in turn and with alternating order, after a warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-1, repeats):
        for name in runs if i % 2 else reversed(runs):
            synchronize(device)
            start = time.perf_counter()
            runs[name]()
            synchronize(device)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median, smallest and largest ratio of pairs."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Most bytes that the allocator held during `run`, beyond what it held before."""
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def device_kernels(run: Callable[[], object], repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds and launches of each kernel in one `run` on a GPU, by name, the longest first. If launching the kernels
    takes longer than running them, the sum is less than the elapsed time. Empty if the profiler records no kernel."""
    if ProfilerActivity.CUDA not in supported_activities():
        return {}
    run()
    synchronize("cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            run()
        synchronize("cuda")
    events = [event for event in recorded.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {e.key: (e.self_device_time_total / 1e6 / repeats, e.count / repeats) for e in events}


def device_seconds(kernels: dict[str, tuple[float, float]], part: str = "") -> float | None:
    """Seconds of the `kernels` of [`device_kernels`] whose name contains `part`; `None` if there is none."""
    seconds = [value for name, (value, _) in kernels.items() if part in name]
    return sum(seconds) if seconds else None


class Floor:
    """What a device can do at best, measured: FLOPs of a matrix product in `dtype`, bytes moved by a copy."""

    def __init__(self, device: str, dtype: torch.dtype):
        size = 8192 if device == "cuda" else 1024
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        memory = torch.empty(2**30 if device == "cuda" else 2**27, device=device, dtype=torch.uint8)
        target = torch.empty_like(memory)
        runs = {"product": lambda: torch.mm(a, b), "copy": lambda: target.copy_(memory)}
        seconds = paired_seconds(runs, 5, device)
        self.flops_per_second = 2 * size**3 / min(seconds["product"])
        self.bytes_per_second = 2 * memory.numel() / min(seconds["copy"])

    def seconds(self, flops: float, moved: float) -> float:
        """Least time for this many FLOPs and bytes, which a kernel that does both can overlap."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"Floor by measured rates: {self.flops_per_second / 1e12:.3g} TFLOP/s, "
            f"{self.bytes_per_second / 1e9:.3g} GB/s"
        )


def environment(device: str) -> dict[str, str | int]:
    """Device and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl, triton)}
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
    }


class Report:
    """Rows of one benchmark, printed as a markdown table as they come in."""

    def __init__(self, name: str, args: argparse.Namespace, columns: dict[str, str], key: tuple[str, ...] = ()):
        """`columns`: key of a row and how to format it. A row replaces an earlier one in the file of results if both
        agree in all columns of `key`."""
        self.name = args.name or name
        self.args = args
        self.columns = columns
        self.key = key
        self.rows = []
        self.environment = environment(args.device)
        print(f"## {name}: " + ", ".join(f"{key} {value}" for key, value in self.environment.items()), flush=True)

    def start(self, note: str = "") -> None:
        print(f"{note}\n\n| " + " | ".join(self.columns) + " |")
        print("|" + "---|" * len(self.columns), flush=True)

    def add(self, **row) -> None:
        same = [bool(self.key) and all(old[k] == row[k] for k in self.key) for old in self.rows]
        self.rows = [old for old, replaced in zip(self.rows, same, strict=True) if not replaced] + [row]
        cells = (format(row[key], how) if row.get(key) is not None else "–" for key, how in self.columns.items())
        print("| " + " | ".join(cells) + " |", flush=True)
        self._write()  # after every row: an interrupted run keeps its rows

    def save(self) -> None:
        if self.args.results is not None:
            print(f"\nRows written to {self._write()}.\n")

    def _write(self) -> Path | None:
        if self.args.results is None:
            return None
        path = self.args.results
        if path.suffix != ".json":
            device = str(self.environment["device"]).lower().replace(" ", "-").replace("_", "-")
            path = path / f"{device}-{self.environment['date']}.json"
        options = {key: value for key, value in vars(self.args).items() if key not in ("results", "name")}
        for key in ("model", "problems"):  # only the name: the path is private
            if options.get(key):
                options[key] = Path(options[key]).name
        add_to(path, self.name, {"environment": self.environment, "options": options, "rows": self.rows})
        return path


def add_to(path: Path, name: str, entry: object) -> None:
    """Write `entry` as `name` into a file of results, atomically: another process may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(path.read_text()) if path.exists() else {}
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(content | {name: entry}, indent=1, default=str) + "\n")
    unfinished.replace(path)

"""The JSON record of a run, made from its `trainer_state.json` and its evaluation, and the files of records."""

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME

from evidence.grid import Run

Record = dict[str, Any]
UPDATES_PER_ROLLOUT_BATCH = 8  # of a cell that does not say it by `steps_per_generation`
_HELD_OUT = "eval_rewards/math_accuracy_reward/mean"
# Means over all updates, and maxima. A value is `None` if TRL logs none
_MEANS = {
    "projected_fraction": "troll/projected_fraction",
    "penalized_fraction": "troll/penalized_fraction",
    "clip_fraction": "clip_ratio/region_mean",
    "gradient_norm": "grad_norm",
}
_MAXIMA = {"policy_kl_max": "troll/policy_kl_max", "kl_max": "troll/kl_max"}


def describe(run: Run) -> Record:
    return {"task": run.task, "method": run.method, "varied": dict(run.varied), "seed": run.seed}


def run_of(record: Record) -> Run:
    """The run that [`describe`] described."""
    return Run(record["task"], record["method"], tuple(sorted(record["varied"].items())), record["seed"])


def make_record(run: Run, folder: Path) -> Record:
    """
    The record of a finished run.

    Returns:
        `dict`: `task`, `method`, `varied`, `seed`; `success` of the trained model, by `troll eval`; and of the log
        `curve`, pairs of updates and held-out success (one sample of each problem); `area`, the mean height of that
        curve; `start`, its first value; `others`, the curves of other reward functions, by name; `entropy` and
        `length`, means over the last quarter of the updates; the [`_MEANS`] and [`_MAXIMA`] over all updates;
        `seconds_per_update` after the first rollout batch, generation included, and `seconds_without_generation`, of
        these updates those that no generation precedes. A failed run has an `error` in place of `success`. The runner
        adds `studies`, `machine`, `start_chance` (the probability of the rewarded solutions at the start) and
        `start_digest` (of the weights there), and on a GPU `peak_gib`.
    """
    summary = json.loads((folder / "eval" / "summary.json").read_text())
    return {**describe(run), **of_log(run, folder), "success": summary["results"][0]["metrics"]["mean"]["value"]}


def of_log(run: Run, folder: Path) -> Record:
    """What [`make_record`] takes from the log: of a stopped run, of its updates so far; empty if it has no log yet."""
    file = folder / TRAINER_STATE_NAME
    log = json.loads(file.read_text())["log_history"] if file.exists() else []
    updates = [line for line in log if "loss" in line]
    names = [key for line in log for key in line if key.startswith("eval_rewards/") and key.endswith("/mean")]
    curves = {name: [(line["step"], line[name]) for line in log if name in line] for name in sorted(set(names))}
    curve = curves.pop(_HELD_OUT, [])
    if not curve or not updates:
        return {}
    late = updates[-math.ceil(len(updates) / 4) :]
    of_a_batch = dict(run.varied).get("steps_per_generation", UPDATES_PER_ROLLOUT_BATCH)
    timed = updates[of_a_batch:]
    others = {"others": {name.split("/")[1]: of_name for name, of_name in curves.items()}} if curves else {}
    return {
        "curve": curve,
        "area": mean_height(curve) if len(curve) > 1 else None,
        "start": curve[0][1],
        "entropy": _mean(late, "entropy"),
        "length": _mean(late, "completions/mean_length"),
        **{name: _mean(updates, key) for name, key in _MEANS.items()},
        **{name: max((line[key] for line in updates if key in line), default=None) for name, key in _MAXIMA.items()},
        "seconds_per_update": _mean(timed, "step_time"),
        "seconds_without_generation": _mean([u for i, u in enumerate(timed) if i % of_a_batch], "step_time"),
        **others,
    }


def _mean(lines: list[dict[str, float]], key: str) -> float | None:
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else None


def mean_height(curve: list[tuple[int, float]]) -> float:
    """The mean height of a curve of (update, success)."""
    steps, heights = np.array(curve).T
    return float(np.trapezoid(heights, steps) / (steps[-1] - steps[0]))


def machine() -> str:
    """
    Processor, its instruction set, the version of PyTorch, and the GPUs if any. Rounding differs between machines and a
    warm-up amplifies it, so a seed has another start elsewhere. Runs that are paired by seed should come from one
    machine.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus: list[str] = []
    # Not by PyTorch: a study forks its runs, which a process that has called CUDA cannot
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    processor = names[0] if names else platform.machine()
    return ", ".join([processor, torch.backends.cpu.get_cpu_capability(), torch.__version__, *gpus])


def read_records(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_records(file: Path, records: Iterable[Record]) -> None:
    """Replace the file as a whole: a study that is killed keeps the old one or has the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(unfinished, file)

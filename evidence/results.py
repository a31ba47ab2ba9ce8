"""The JSON record of a run, made from its `trainer_state.json` and its evaluation."""

import json
import math
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.grid import Run
from math_answers.whole_files import write_text

RESULT = "result.json"
DEFAULTS = {"steps_per_generation": 8, "kl_bound": 0.05, "regression_coef": 1.0, "support_size": 64}  # of a cell
_HELD_OUT = "eval_rewards/math_accuracy_reward/mean"


def make_record(run: Run, folder: Path) -> dict[str, Any]:
    """
    The record of a finished run. The record of a failed run has an `error` in place of what follows the seed.

    Returns:
        `dict`: `task`, `method`, `varied`, `seed`; `curve`, pairs of updates and held-out success (one sample of each
        problem); `area`, the mean height of that curve; `start`, its first value; `success` of the trained model, by
        scripts/evaluate.py; means over the last quarter of the updates (`entropy`, `length`) or over all updates
        (`projected_fraction`, `clip_fraction`, `gradient_norm`), maxima over all (`policy_kl_max`, `kl_max`), `None` if
        TRL logs none; `seconds_per_update`, the mean after the first rollout batch, generation included. Newer records
        also have `penalized_fraction`, another mean over all updates, `seconds_without_generation`, the mean over those
        of these updates that follow another one of their rollout batch, `start_chance`, the probability of the rewarded
        solutions at the start, `start_digest`, of the weights there, and `machine`. With several reward functions,
        `others` holds the curves of those other than `math_accuracy`, by name. The trainer `share` adds
        `regression_share`, the mean length of the regression's gradient as a part of the whole gradient's.
    """
    summary = json.loads((folder / "eval" / "summary.json").read_text())
    success = summary["results"][0]["metrics"]["pass@1"]["value"]
    return {**describe(run), **of_log(run, folder), "success": success}


def of_log(run: Run, folder: Path) -> dict[str, Any]:
    """What [`make_record`] takes from the log: of a stopped run, of its updates so far; empty if it has no log yet."""
    file = folder / "trainer_state.json"
    log = json.loads(file.read_text())["log_history"] if file.exists() else []
    curve = [(line["step"], line[_HELD_OUT]) for line in log if _HELD_OUT in line]
    updates = [line for line in log if "loss" in line]
    if not curve or not updates:
        return {}
    held_out = {key for line in log for key in line if key.startswith("eval_rewards/") and key.endswith("/mean")}
    others = {
        key.split("/")[1]: [(line["step"], line[key]) for line in log if key in line]
        for key in sorted(held_out - {_HELD_OUT})
    }
    shares = [
        line["troll/regression_grad_norm"] / line["grad_norm"]
        for line in updates
        if "troll/regression_grad_norm" in line and line["grad_norm"] > 0
    ]
    late = updates[-math.ceil(len(updates) / 4) :]
    of_a_batch = (DEFAULTS | dict(run.varied))["steps_per_generation"]
    timed = updates[of_a_batch:]
    return {
        "curve": curve,
        "area": mean_height(curve) if len(curve) > 1 else None,
        "start": curve[0][1],
        "entropy": mean_logged(late, "entropy"),
        "length": mean_logged(late, "completions/mean_length"),
        "projected_fraction": mean_logged(updates, "troll/projected_fraction"),
        "penalized_fraction": mean_logged(updates, "troll/penalized_fraction"),
        "clip_fraction": mean_logged(updates, "clip_ratio/region_mean"),
        "gradient_norm": mean_logged(updates, "grad_norm"),
        "policy_kl_max": _max(updates, "troll/policy_kl_max"),
        "kl_max": _max(updates, "troll/kl_max"),
        "seconds_per_update": mean_logged(timed, "step_time"),
        "seconds_without_generation": mean_logged([u for i, u in enumerate(timed) if i % of_a_batch], "step_time"),
        **({"others": others} if others else {}),
        **({"regression_share": float(np.mean(shares))} if shares else {}),
    }


def mean_height(curve: Sequence[tuple[int, float]]) -> float:
    """The mean height of a curve of (update, success)."""
    steps, heights = np.array(curve).T
    return float(np.trapezoid(heights, steps) / (steps[-1] - steps[0]))


def describe(run: Run) -> dict[str, Any]:
    return {"task": run.task, "method": run.method, "varied": dict(run.varied), "seed": run.seed}


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


def run_of(record: dict[str, Any]) -> Run:
    """The run that [`describe`] described."""
    return Run(record["task"], record["method"], tuple(sorted(record["varied"].items())), record["seed"])


def write_records(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _values(lines: list[dict[str, float]], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


def mean_logged(lines: list[dict[str, float]], key: str) -> float | None:
    values = _values(lines, key)
    return float(np.mean(values)) if values else None


def _max(lines: list[dict[str, float]], key: str) -> float | None:
    return max(_values(lines, key), default=None)

"""What is kept of a run: one JSON record, from its `trainer_state.json` and its evaluation."""

import json
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.grid import Run

RESULT = "result.json"
DEFAULTS = {"steps_per_generation": 8, "kl_bound": 0.05, "regression_coef": 1.0, "support_size": 64}  # of a cell
_HELD_OUT = "eval_rewards/math_accuracy_reward/mean"


def make_record(run: Run, folder: Path) -> dict[str, Any]:
    """
    The record of a finished run. That of a run that failed has its `error` in place of what follows the seed.

    Returns:
        `dict`: `task`, `method`, `varied`, `seed`; `curve`, pairs of updates and held-out success (one sample of each
        problem); `area`, the mean height of that curve; `start`, its first value; `success`, that of the trained model
        by scripts/evaluate.py; means over the last quarter of the updates (`entropy`, `length`) or all
        (`projected_fraction`, `clip_fraction`, `gradient_norm`), maxima over all (`policy_kl_max`, `kl_max`), `None`
        where TRL logs none; `seconds_per_update`, the mean, generation included, after the first rollout batch.
        Newer records also have `start_chance`, the probability of the rewarded solutions at the start, and `machine`;
        with several reward functions `others`, the curves of those that are not `math_accuracy`, by name.
    """
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [(line["step"], line[_HELD_OUT]) for line in log if _HELD_OUT in line]
    updates = [line for line in log if "loss" in line]
    held_out = {key for line in log for key in line if key.startswith("eval_rewards/") and key.endswith("/mean")}
    others = {
        key.split("/")[1]: [(line["step"], line[key]) for line in log if key in line]
        for key in sorted(held_out - {_HELD_OUT})
    }
    late = updates[-math.ceil(len(updates) / 4) :]
    summary = json.loads((folder / "eval" / "summary.json").read_text())
    steps, heights = np.array(curve).T
    return {
        **describe(run),
        "curve": curve,
        "area": float(np.trapezoid(heights, steps) / (steps[-1] - steps[0])),
        "start": curve[0][1],
        "success": summary["results"][0]["metrics"]["pass@1"]["value"],
        "entropy": _mean(late, "entropy"),
        "length": _mean(late, "completions/mean_length"),
        "projected_fraction": _mean(updates, "troll/projected_fraction"),
        "clip_fraction": _mean(updates, "clip_ratio/region_mean"),
        "gradient_norm": _mean(updates, "grad_norm"),
        "policy_kl_max": _max(updates, "troll/policy_kl_max"),
        "kl_max": _max(updates, "troll/kl_max"),
        "seconds_per_update": _mean(updates[(DEFAULTS | dict(run.varied))["steps_per_generation"] :], "step_time"),
        **({"others": others} if others else {}),
    }


def describe(run: Run) -> dict[str, Any]:
    return {"task": run.task, "method": run.method, "varied": dict(run.varied), "seed": run.seed}


def machine() -> str:
    """
    Processor, its instructions and PyTorch. Rounding differs between them, a warm-up makes much of little, and so a
    seed has another start elsewhere: what is paired by seed should be of one machine.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.__version__}"
    )


def run_of(record: dict[str, Any]) -> Run:
    """The run that [`describe`] was given."""
    return Run(record["task"], record["method"], tuple(sorted(record["varied"].items())), record["seed"])


def write_records(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    unfinished.replace(file)  # whole or not at all


def read_records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _values(lines: list[dict[str, float]], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


def _mean(lines: list[dict[str, float]], key: str) -> float | None:
    values = _values(lines, key)
    return float(np.mean(values)) if values else None


def _max(lines: list[dict[str, float]], key: str) -> float | None:
    return max(_values(lines, key), default=None)

"""The JSON record of a run, made from its `trainer_state.json` and its evaluation, and the files of records."""

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME

from evidence.grid import Run

Record = dict[str, Any]
_HELD_OUT, _COMPLETIONS = "eval_reward", "cost/completions"
# Means over all updates, and maxima. A value is `None` if TRL logs none
_MEANS = {
    "projected_fraction": "troll/projected_fraction",
    "penalized_fraction": "troll/penalized_fraction",
    "clip_fraction": "clip_ratio/region_mean",
    "gradient_norm": "grad_norm",
}
_WINDOW = 512  # completions: a rollout batch of 8 updates of 64
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
        `dict`:

        - `task`, `method`, `varied`, `seed`;
        - `success` of the trained model, by `troll eval` or, without an evaluation, the last point of the curve. A
          failed run has an `error` instead;
        - `curve`: pairs of an update and the held-out success, with one sample of each problem;
        - `seconds` and `completions`: for each point of the curve, the update, and the time of all updates and the
          number of completions generated so far;
        - `area`: the mean height of the curve; `start`: its first value;
        - `others`: the curves of other reward functions, by name;
        - `rollouts`: for each rollout batch, its first update, its mean reward, the share of groups whose rewards
          differ, and the completions and seconds up to the end of that update;
        - `entropy` and `length`: means over the last quarter of the updates;
        - the [`_MEANS`] and [`_MAXIMA`] over all updates;
        - `seconds_per_update`: the mean after the first rollout batch, generation included;
        - `seconds_without_generation`: the mean over the updates among these that no generation precedes.

        Seconds are processor time on a CPU, which other work shares, and elapsed time on a GPU. The runner adds
        `studies`, `machine`, `start_chance` (the probability of the rewarded solutions at the start), `start_digest`
        (of the weights at the start) and, on a GPU, `peak_gib`.
    """
    record, summary = {**describe(run), **of_log(run, folder)}, folder / "eval" / "summary.json"
    if not summary.exists():
        return record | {"success": record["curve"][-1][1]}
    return record | {"success": json.loads(summary.read_text())["results"][0]["metrics"]["mean"]["value"]}


def of_log(run: Run, folder: Path) -> Record:
    """What [`make_record`] takes from the log. For a stopped run, this covers its updates so far. Empty without a
    log."""
    file = folder / TRAINER_STATE_NAME
    log = json.loads(file.read_text())["log_history"] if file.exists() else []
    curve = [(line["step"], line[_HELD_OUT]) for line in log if _HELD_OUT in line]
    updates = [line for line in log if "loss" in line]
    if not curve or not updates:
        return {}
    names = sorted({key for line in log for key in line if key.startswith("eval_rewards/") and key.endswith("/mean")})
    others = {name.split("/")[1]: [(line["step"], line[name]) for line in log if name in line] for name in names}
    seconds = _update_seconds(log)
    until = lambda at: sum(took for step, took in seconds.items() if step <= at)
    generated = [line["step"] for line in updates if "reward" in line]  # the first update of each rollout batch
    timed = {step: took for step, took in seconds.items() if len(generated) > 1 and step >= generated[1]}
    late = updates[-math.ceil(len(updates) / 4) :]
    return {
        "curve": curve,
        "seconds": [(at, until(at)) for at, _ in curve],
        "completions": [(line["step"], line[_COMPLETIONS]) for line in log if _HELD_OUT in line],
        "area": mean_height(curve) if len(curve) > 1 else None,
        "start": curve[0][1],
        "rollouts": [
            (line["step"], line["reward"], 1 - line["frac_reward_zero_std"], line[_COMPLETIONS], until(line["step"]))
            for line in updates
            if "reward" in line
        ],
        "entropy": _mean(late, "entropy"),
        "length": _mean(late, "completions/mean_length"),
        **{name: _mean(updates, key) for name, key in _MEANS.items()},
        **{name: max((line[key] for line in updates if key in line), default=None) for name, key in _MAXIMA.items()},
        "seconds_per_update": _average(timed.values()),
        "seconds_without_generation": _average(took for step, took in timed.items() if step not in generated),
        "others": {name: of_name for name, of_name in others.items() if of_name != curve},
    }


def _update_seconds(log: list[dict[str, float]]) -> dict[int, float]:
    """The seconds of each update, without the evaluation after it: the time since the previous line of the log."""
    pairs = pairwise(log)
    return {int(line["step"]): line["seconds"] - before["seconds"] for before, line in pairs if "loss" in line}


def _mean(lines: list[dict[str, float]], key: str) -> float | None:
    return _average(line[key] for line in lines if key in line)


def _average(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None


def seconds_to_reward(record: Record, reward: float) -> float | None:
    """The seconds of training until the mean `reward` of the last [`_WINDOW`] completions is reached: `None` if it
    never is. A smaller rollout batch would reach it earlier by chance."""
    rollouts = record.get("rollouts", [])
    for _, _, _, completions, seconds in rollouts:
        last = [of for _, of, _, made, _ in rollouts if completions - _WINDOW < made <= completions]
        if completions >= _WINDOW and np.mean(last) >= reward:
            return seconds
    return None


def mean_height(curve: list[tuple[int, float]]) -> float:
    """The mean height of a curve of (update, success)."""
    steps, heights = np.array(curve).T
    return float(np.trapezoid(heights, steps) / (steps[-1] - steps[0]))


def machine() -> str:
    """
    Processor, its instruction set, the version of PyTorch, and the GPUs if any. Rounding differs between machines and a
    warm-up amplifies it, so a seed has another start on another machine. Runs that are paired by seed should come from
    one machine.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus: list[str] = []
    # PyTorch is not asked: a study forks its runs, and the forks of a process that has called CUDA cannot use a GPU
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    processor = names[0] if names else platform.machine()
    return ", ".join([processor, torch.backends.cpu.get_cpu_capability(), torch.__version__, *gpus])


def read_records(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_records(file: Path, records: Iterable[Record]) -> None:
    """Replace the file as a whole: a study that is killed leaves either the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(unfinished, file)

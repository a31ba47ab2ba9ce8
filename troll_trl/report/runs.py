"""Run folders: which lines a training run has logged, robustly, and which runs are seeds of one configuration."""

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

STATE_FILE = "trainer_state.json"
# What the lines themselves lack, derived from them
TOKENS_PER_SECOND = "derived/tokens_per_second"
PEAK_MEMORY = "derived/peak_memory_gib"
# Settings in which the seeds of one configuration may differ
RUN_SETTINGS = {"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "hub_model_id"}
_LAST = re.compile(r"(\d+)$")
_OF_A_RESUME = {"resume", "resume_from_checkpoint", "output_dir"}  # no change of the run
_SEED = re.compile(r"(^|[-_.])seed[-_.=]?\d+$", re.IGNORECASE)


class ReportError(ValueError):
    """What a user can set right: a run that cannot be read, a reward function that does not exist."""


@dataclass
class Run:
    """One training run, as its log lines tell it."""

    folder: Path  # as the user named it
    state_file: Path  # that was read
    # Finite numbers by update (optimizer step), ascending, and metric: training and evaluation lines merged
    updates: dict[int, dict[str, float]]
    settings: dict[str, Any]  # what `scripts/train.py` saved as `config.yaml`; empty for other runs
    notes: list[str] = field(default_factory=list)  # what a reader of its curves should know
    changed: set[str] = field(default_factory=set)  # names of settings that were others before it was resumed

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Updates `(n,)` and values `(n,)` of the metric `key`; empty if it was never logged."""
        points = [(step, line[key]) for step, line in self.updates.items() if key in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def logs(self, key: str) -> bool:
        return any(key in line for line in self.updates.values())

    @property
    def last_update(self) -> int:
        return max(self.updates)

    @cached_property
    def clock(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Updates `(n + 1,)`, from 0, and the training seconds that passed by then; `None` if no time was logged."""
        steps, step_time = self.points("step_time")
        if len(steps) == 0:
            return None
        # A line's `step_time` is the mean over the updates since the line before. Lines without one (a torn record)
        # are bridged by the next line that has one.
        return np.insert(steps, 0, 0.0), np.insert(np.cumsum(step_time * np.diff(steps, prepend=0.0)), 0, 0.0)

    def seconds(self, steps: np.ndarray) -> np.ndarray | None:
        """Training seconds `(n,)` that had passed by the updates `steps` `(n,)`; `None` if no time was logged."""
        return None if self.clock is None else np.interp(steps, *self.clock)

    @property
    def method(self) -> str:
        """`"troll"`, `"clip"`, or `"unknown"`."""
        if "method" in self.settings:
            return str(self.settings["method"])
        keys = {key for line in self.updates.values() for key in line}
        if any(key.startswith("troll/") for key in keys):
            return "troll"
        return "clip" if any(key.startswith("clip_ratio/") for key in keys) else "unknown"

    @property
    def key_settings(self) -> dict[str, str | None]:
        """Model, dataset and learning rate; `None` for what is not known, and the largest rate that was logged."""
        rate = self.settings.get("learning_rate", max(self.points("learning_rate")[1], default=None))
        try:
            rate = rate if rate is None else f"{float(rate):g}"
        except (TypeError, ValueError):
            rate = str(rate)
        model, dataset = (self.settings.get(name) for name in ("model_name_or_path", "dataset_name"))
        return {"model": model and str(model), "dataset": dataset and str(dataset), "learning rate": rate}


@dataclass
class Group:
    """The runs of one configuration, which differ in their seeds."""

    label: str
    runs: list[Run]

    @cached_property
    def kl_bound(self) -> tuple[float, bool] | None:
        """
        The KL bound in nats and whether it was inferred, from the largest KL after a projection; `None` if unknown, or
        not the same from update to update.

        `training_args.bin`, which holds it too, is a pickle: loading it would run whatever code it names.
        """
        if any("kl_bound" in run.changed for run in self.runs):
            return None  # it had several, one after the other
        saved = {bound for run in self.runs if (bound := _saved_bound(run)) is not None}
        if saved:
            return (saved.pop(), False) if len(saved) == 1 else None
        lines = [line for run in self.runs for line in run.updates.values()]
        largest = [line["troll/kl_max"] for line in lines if line.get("troll/projected_fraction", 0) > 0]
        return (max(largest), True) if largest else None

    @property
    def key_settings(self) -> dict[str, str]:
        """As those of its runs: all of them, where they differ."""
        of_runs = [run.key_settings for run in self.runs]
        known = {name: dict.fromkeys(value for run in of_runs if (value := run[name])) for name in of_runs[0]}
        return {name: " or ".join(values) or "not recorded" for name, values in known.items()}

    def differing_settings(self) -> list[str]:
        """Names of saved settings in which its runs differ, other than seeds and folders."""
        saved = [run.settings for run in self.runs if run.settings]
        names = sorted({name for settings in saved for name in settings} - RUN_SETTINGS)
        return [name for name in names if any(run.get(name) != saved[0].get(name) for run in saved)]


def _saved_bound(run: Run) -> float | None:
    if not run.settings or run.method != "troll":
        return None
    if "kl_bound" not in run.settings:
        from troll_trl.trainers.config import (
            TrollGRPOConfig,  # imports TRL, which takes seconds: only where it is needed
        )

        return TrollGRPOConfig.kl_bound
    try:
        return float(run.settings["kl_bound"])
    except (TypeError, ValueError):
        return None


# -- Reading ----------------------------------------------------------------------------------------------------------


def load_run(path: Path) -> Run:
    """
    Read a run from its folder: `trainer_state.json`, or that of the newest checkpoint.

    A run that was resumed, and stopped before it could write its own state again, is continued from its newest
    checkpoint if that one's log begins with the folder's. A torn file is passed over, with a note. `path` is a run's
    `output_dir`, one of its checkpoints, or a `trainer_state.json`.
    """
    folder = path.parent if os.path.isfile(path) else path
    if not os.path.isdir(folder):
        raise ReportError(f"{path}: there is no such run folder.")
    files = [path] if path.is_file() else [folder / STATE_FILE, *_checkpoint_states(folder)]
    files = [file for file in files if file.is_file()]
    if not files:
        raise ReportError(_no_state(folder))
    notes: list[str] = []
    history, state_file = _read_newest(files, notes)
    if not history:
        raise ReportError(f"{state_file}: its `log_history` is empty. Was the run stopped before its first log line?")
    updates = _merge(history, notes)
    if not updates:
        raise ReportError(f"{state_file}: no line of its `log_history` holds a `step` and a finite number.")
    _derive_memory(updates)
    settings, changed = _read_settings(folder, notes)
    run = Run(path, state_file, updates, settings, notes, changed)
    _derive_throughput(run)
    return run


def _checkpoint_states(folder: Path) -> list[Path]:
    """The states of its checkpoints, newest first."""
    numbered = [
        (int(match[1]), file) for file in folder.iterdir() if (match := re.fullmatch(r"checkpoint-(\d+)", file.name))
    ]
    return [file / STATE_FILE for _, file in sorted(numbered, reverse=True)]


def _no_state(folder: Path) -> str:
    message = (
        f"{folder}: there is no {STATE_FILE} in this folder or in a checkpoint-* below it, which a Trainer writes."
    )
    inner = sorted({file.relative_to(folder).parts[0] for file in folder.glob(f"*/{STATE_FILE}")})
    if inner:
        message += f" Some of its subfolders hold one: name these, as in {folder / inner[0]} ({', '.join(inner)})."
    return message


def _read_newest(files: Sequence[Path], notes: list[str]) -> tuple[list[dict], Path]:
    """The log of the first readable file, or of the next if that one continues it, and the file."""
    histories: list[tuple[list[dict], Path]] = []
    errors = []
    for file in files:
        try:
            histories.append((_read_history(file), file))
        except (OSError, ValueError) as error:
            errors.append(f"{file} cannot be read ({error})")  # a UnicodeDecodeError is a ValueError, too
        if len(histories) == 2:
            break
    if not histories:
        raise ReportError(f"{'; '.join(errors)}. There is no other checkpoint to fall back to.")
    history, file = histories[0]
    if file.parent.name.startswith("checkpoint-") and errors:
        notes.append(f"{'; '.join(errors)}: read {file} instead.")
        return history, file
    notes.extend(f"{error}: not used." for error in errors)
    if len(histories) == 2:
        later, later_file = histories[1]
        if len(later) > len(history) and _without_summary(history) == later[: len(_without_summary(history))]:
            notes.append(f"{later_file} continues {file}: the run was resumed and stopped. Read the former.")
            return later, later_file
    return history, file


def _without_summary(history: list[dict]) -> list[dict]:
    """The log without the line at the end of a training, which is not part of a checkpoint."""
    return history[:-1] if history and "train_runtime" in history[-1] else history


def _read_history(file: Path) -> list[dict]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"torn, or no JSON: {error}") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError("it holds no list `log_history`, so it is no trainer's state")
    return [line for line in history if isinstance(line, dict)]


def _merge(history: list[dict], notes: list[str]) -> dict[int, dict[str, float]]:
    """Finite numbers by update and metric; later lines win, as a resumed run repeats updates."""
    updates: dict[int, dict[str, float]] = {}
    dropped: dict[str, int] = {}
    repeated = set()
    without_step = 0
    for line in history:
        step = line.get("step")
        if not isinstance(step, int) or step < 0:
            without_step += 1
            continue
        merged = updates.setdefault(step, {})
        for key, value in line.items():
            if key in ("step", "epoch") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                dropped[key] = dropped.get(key, 0) + 1
                continue
            if key in merged and merged[key] != value:
                repeated.add(step)
            merged[key] = float(value)
    if without_step:
        notes.append(f"{without_step} log lines without a `step` are left out.")
    if dropped:
        counts = ", ".join(f"{key} ({count})" for key, count in sorted(dropped.items()))
        notes.append(f"Values that are NaN or infinite are left out: {counts}.")
    if repeated:
        notes.append(
            f"{len(repeated)} updates from {min(repeated)} on were logged more than once (by a resumed run, or by "
            "several evaluation sets): the last value counts."
        )
    return {step: updates[step] for step in sorted(updates) if updates[step]}


def _derive_memory(updates: dict[int, dict[str, float]]) -> None:
    """Peak memory in GiB: `PeakMemory`'s lines, or the summary of the Trainer with `skip_memory_metrics=False`."""
    for line in updates.values():
        for device in ("gpu", "cpu"):
            if f"memory/{device}_peak_gib" in line:
                line[PEAK_MEMORY] = line[f"memory/{device}_peak_gib"]
                break
            if f"train_mem_{device}_peaked_delta" in line:
                parts = ("before_init_mem_{}", "init_mem_{}_alloc_delta", "train_mem_{}_alloc_delta")
                used = sum(line.get(part.format(device), 0.0) for part in parts)
                line[PEAK_MEMORY] = (used + line[f"train_mem_{device}_peaked_delta"]) / 2**30
                break


def _derive_throughput(run: Run) -> None:
    """Tokens per second, from one generation to the next: the tokens of a rollout batch over all its updates' time.

    `num_tokens` counts the tokens of prompts and completions on all ranks, and is logged when there was a generation.
    """
    if run.clock is None:
        return
    steps, tokens = run.points("num_tokens")
    logged, seconds = run.clock
    # A line with a generation begins where the one before it ended; the last one's batch ends with the run
    begin = [int(np.searchsorted(logged, step, side="left")) - 1 for step in steps]
    for i, step in enumerate(steps):
        end = begin[i + 1] if i + 1 < len(steps) else len(logged) - 1
        if i + 1 == len(steps) > 1 and logged[end] - logged[begin[i]] < logged[begin[i]] - logged[begin[i - 1]]:
            continue  # the run ended within a rollout batch
        duration = seconds[end] - seconds[begin[i]]
        count = tokens[i] - (tokens[i - 1] if i > 0 else 0.0)
        if duration > 0 and count > 0:
            run.updates[int(step)][TOKENS_PER_SECOND] = count / duration


def _read_settings(folder: Path, notes: list[str]) -> tuple[dict[str, Any], set[str]]:
    """What a run was trained with, of a resumed one at its end, and what of it was changed on the way."""
    roots = (folder, folder.parent) if folder.name.startswith("checkpoint-") else (folder,)
    file = next((root / "config.yaml" for root in roots if (root / "config.yaml").is_file()), None)
    if file is None:
        return {}, set()
    settings = _read_yaml(file, notes)
    names: set[str] = set()
    # `scripts/train.py` keeps what it had until the checkpoint from which it went on with other settings
    files = file.parent.glob("config-until-checkpoint-*.yaml")
    earlier = {int(digits[1]): path for path in files if (digits := _LAST.search(path.stem))}
    parts = [(step, _read_yaml(earlier[step], notes)) for step in sorted(earlier)] + [(0, settings)]
    for (step, before), (_, after) in pairwise([part for part in parts if part[1]]):
        changed = [n for n in sorted({**before, **after}.keys() - _OF_A_RESUME) if before.get(n) != after.get(n)]
        said = "; ".join(f"`{name}` {before.get(name)!r} → {after.get(name)!r}" for name in changed)
        notes.append(f"It went on from checkpoint-{step} with other settings: {said}. The page names the last ones.")
        names.update(changed)
    return settings, names


def _read_yaml(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict):
        notes.append(f"{file} cannot be read as settings: the run is reported without them.")
        return {}
    return settings


# -- Grouping ---------------------------------------------------------------------------------------------------------


def load_groups(arguments: Sequence[str]) -> list[Group]:
    """
    Read the runs of a command line, and group the seeds of one configuration.

    `LABEL=RUN[,RUN…]` names a group and its runs; the same label again adds to it. Runs without a label are seeds of
    one configuration if their paths are equal but for `seed0`, `-seed-1`, `_seed2` … at the end of a part:
    `out/troll-seed0 out/troll-seed1`, or `seed0/troll seed1/troll`. The label is then what is left of the path. Groups
    are in the order of the command line; the ReportError names all runs that cannot be read, or are there twice.
    """
    paths: dict[str, list[Path]] = {}
    automatic = set()  # the keys of `paths` that are no labels, but paths without their seeds
    for argument in arguments:
        label, equals, value = argument.partition("=")
        if os.path.exists(argument) or not equals:  # and not Path.exists(), which raises for a long label
            key = _without_seed(Path(argument))
            automatic.add(key)
            paths.setdefault(key, []).append(Path(argument))
        elif not label or not value:
            raise ReportError(f"{argument!r} is no run: give RUN or LABEL=RUN[,RUN…].")
        else:
            runs = [value] if os.path.exists(value) else value.split(",")
            paths.setdefault(label, []).extend(Path(run) for run in runs if run)
    errors: list[str] = []
    groups: list[Group] = []
    labels = {key: _short_label(key, paths) if key in automatic else key for key in paths}
    for key, folders in paths.items():
        group = Group(labels[key], [])
        for number, folder in enumerate(folders):
            if folder.resolve() in {other.resolve() for other in folders[:number]}:
                errors.append(f"{folder}: given twice for {labels[key]!r}; it is one seed, not two.")
                continue
            try:
                group.runs.append(load_run(folder))
            except (OSError, ReportError) as error:
                errors.append(str(error))
        groups.append(group)
    if errors:
        raise ReportError("\n".join(errors))
    return groups


def _without_seed(path: Path) -> str:
    parts = [_SEED.sub("", part) for part in path.resolve().parts]
    return "/".join(part for part in parts if part and part != "/")


def _short_label(key: str, keys: Iterable[str]) -> str:
    """The shortest ending of a path, in whole parts, that no other key has."""
    parts = key.split("/")
    endings = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    return next((end for end in endings if not any(("/" + k).endswith("/" + end) for k in keys if k != key)), key)

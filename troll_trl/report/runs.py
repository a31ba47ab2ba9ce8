"""Run folders: reads the log lines of training runs, and groups the runs that are seeds of one configuration."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from troll_trl.resilience.checkpoint_folder import CHECKPOINT, checkpoints
from troll_trl.trust_region import DEFAULT_KL_BOUND

STATE_FILE = "trainer_state.json"
# What the log lines themselves lack, derived from them
TOKENS_PER_SECOND = "derived/tokens_per_second"
PEAK_MEMORY = "derived/peak_memory_gib"
# Settings in which the seeds of one configuration may differ
RUN_SETTINGS = {"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "hub_model_id"}
_SET_BY_A_RESUME = {"resume", "resume_from_checkpoint", "output_dir"}  # no change of the run
_SEED = re.compile(r"(^|[-_.])seed[-_.=]?\d+$", re.IGNORECASE)


class ReportError(ValueError):
    """What a user can set right: a run that cannot be read, a reward function that does not exist."""


@dataclass
class Run:
    """One training run, from its log lines."""

    folder: Path  # as the user named it
    state_file: Path  # that was read
    log: pd.DataFrame  # a row for each update (optimizer step), a column for each metric; NaN if it was not logged
    settings: dict[str, Any]  # what `troll grpo` saved as `config.yaml`; empty for other runs
    notes: list[str] = field(default_factory=list)  # what a reader of its curves should know
    changed: set[str] = field(default_factory=set)  # names of settings that were others before it was resumed

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Updates `(n,)` and values `(n,)` of the metric `key`; empty if it was never logged."""
        values = self.log[key].dropna() if key in self.log else pd.Series(dtype=float)
        return values.index.to_numpy(dtype=float), values.to_numpy()

    @property
    def last_update(self) -> int:
        return int(self.log.index[-1])

    @cached_property
    def clock(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Updates `(n + 1,)`, from 0, and the training seconds that had passed by then; `None` without logged times."""
        steps, step_time = self.points("step_time")
        if len(steps) == 0:
            return None
        # The `step_time` of a line is the mean over the updates since the line before it. The next line with a time
        # bridges lines without one (a torn record).
        return np.insert(steps, 0, 0.0), np.insert(np.cumsum(step_time * np.diff(steps, prepend=0.0)), 0, 0.0)

    def seconds(self, steps: np.ndarray) -> np.ndarray | None:
        """Training seconds `(n,)` that had passed by the updates `steps` `(n,)`; `None` without logged times."""
        return None if self.clock is None else np.interp(steps, *self.clock)

    @property
    def method(self) -> str:
        """`"troll"`, `"clip"`, or `"unknown"`."""
        if "method" in self.settings:
            return str(self.settings["method"])
        prefixes = {"troll/": "troll", "clip_ratio/": "clip"}
        return next(
            (name for prefix, name in prefixes.items() if self.log.columns.str.startswith(prefix).any()), "unknown"
        )

    @property
    def kl_bound(self) -> float | None:
        """The bound of a saved config, in nats."""
        if not self.settings or self.method != "troll" or self.settings.get("trust_region") == "mask":
            return None
        try:
            return float(self.settings.get("kl_bound", DEFAULT_KL_BOUND))
        except (TypeError, ValueError):
            return None

    @property
    def key_settings(self) -> dict[str, str | None]:
        """Model, dataset and learning rate; `None` if unknown. Without a config the rate is the largest logged one."""
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
    def log(self) -> pd.DataFrame:
        """The log lines of all runs, one below the other."""
        return pd.concat([run.log for run in self.runs])

    @cached_property
    def kl_bound(self) -> tuple[float, bool] | None:
        """
        The KL bound in nats, and whether it was inferred from the largest KL after a projection. `None` if it is
        unknown, or changed during a run. (`training_args.bin` holds it too, but loading a pickle runs its code.)
        """
        if any("kl_bound" in run.changed for run in self.runs):
            return None
        saved = {run.kl_bound for run in self.runs} - {None}
        if saved:
            return (saved.pop() or 0.0, False) if len(saved) == 1 else None
        if not {"troll/projected_fraction", "troll/kl_max"} <= set(self.log):
            return None
        largest = self.log.loc[self.log["troll/projected_fraction"] > 0, "troll/kl_max"].max()
        return None if np.isnan(largest) else (float(largest), True)

    @property
    def key_settings(self) -> dict[str, str]:
        """The key settings of its runs: all values, if they differ."""
        of_runs = [run.key_settings for run in self.runs]
        known = {name: dict.fromkeys(value for run in of_runs if (value := run[name])) for name in of_runs[0]}
        return {name: " or ".join(values) or "not recorded" for name, values in known.items()}

    def differing_settings(self) -> list[str]:
        """Names of saved settings in which its runs differ, other than seeds and folders."""
        saved = [run.settings for run in self.runs if run.settings]
        names = sorted({name for settings in saved for name in settings} - RUN_SETTINGS)
        return [name for name in names if any(run.get(name) != saved[0].get(name) for run in saved)]


# -- Reading ----------------------------------------------------------------------------------------------------------


def load_run(path: Path) -> Run:
    """
    Read a run from its folder: `trainer_state.json`, or the one of the newest checkpoint.

    If a run was resumed and stopped before it wrote its own state again, its newest checkpoint continues the log of the
    folder. A torn file is skipped with a note. `path` is a run's `output_dir`, a checkpoint, or a `trainer_state.json`.
    """
    folder = path.parent if os.path.isfile(path) else path
    if not os.path.isdir(folder):
        raise ReportError(f"{path}: there is no such run folder.")
    states = [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in reversed(checkpoints(folder)))]
    files = [path] if path.is_file() else [file for file in states if file.is_file()]
    if not files:
        message = (
            f"{folder}: there is no {STATE_FILE} in this folder or in a {CHECKPOINT}* below it, which a Trainer writes."
        )
        if inner := sorted({file.relative_to(folder).parts[0] for file in folder.glob(f"*/{STATE_FILE}")}):
            message += f" Some of its subfolders hold one: name these, as in {folder / inner[0]} ({', '.join(inner)})."
        raise ReportError(message)
    notes: list[str] = []
    history, state_file = _read_newest(files, notes)
    if not history:
        raise ReportError(f"{state_file}: its `log_history` is empty. Was the run stopped before its first log line?")
    log = _merge(history, notes)
    if log.empty:
        raise ReportError(f"{state_file}: no line of its `log_history` holds a `step` and a finite number.")
    _derive_memory(log)
    settings, changed = _read_settings(folder, notes)
    run = Run(path, state_file, log, settings, notes, changed)
    _derive_throughput(run)
    return run


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
    if file.parent.name.startswith(CHECKPOINT) and errors:
        notes.append(f"{'; '.join(errors)}: read {file} instead.")
        return history, file
    notes.extend(f"{error}: not used." for error in errors)
    # A checkpoint lacks the line that a Trainer logs at the end of a training
    finished = history[:-1] if history and "train_runtime" in history[-1] else history
    for later, later_file in histories[1:]:
        if len(later) > len(history) and finished == later[: len(finished)]:
            notes.append(f"{later_file} continues {file}: the run was resumed and stopped. Read the former.")
            return later, later_file
    return history, file


def _read_history(file: Path) -> list[dict]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"torn, or no JSON: {error}") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError("it holds no list `log_history`, so it is no trainer's state")
    return [line for line in history if isinstance(line, dict)]


def _merge(history: list[dict], notes: list[str]) -> pd.DataFrame:
    """Finite numbers by update and metric. Later lines win, because a resumed run repeats updates."""
    lines = [line for line in history if isinstance(line.get("step"), int) and line["step"] >= 0]
    if len(lines) < len(history):
        notes.append(f"{len(history) - len(lines)} log lines without a `step` are left out.")
    is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    numbers = [
        (line["step"], key, float(value))
        for line in lines
        for key, value in line.items()
        if key not in ("step", "epoch") and is_number(value)
    ]
    cells = pd.DataFrame(numbers, columns=["step", "key", "value"]).astype({"value": float})
    finite = np.isfinite(cells["value"])
    if not finite.all():
        counts = cells[~finite].groupby("key").size()
        said = ", ".join(f"{key} ({count})" for key, count in counts.items())
        notes.append(f"Values that are NaN or infinite are left out: {said}.")
    by_cell = cells[finite].groupby(["step", "key"])["value"]
    if len(repeated := by_cell.nunique().loc[lambda count: count > 1].index.unique("step")):
        notes.append(
            f"{len(repeated)} updates from {repeated.min()} on were logged more than once (by a resumed run, or by "
            "several evaluation sets): the last value counts."
        )
    return by_cell.last().unstack() if finite.any() else pd.DataFrame()


def _derive_memory(log: pd.DataFrame) -> None:
    """Peak memory in GiB: from `PeakMemory`'s lines, or a Trainer's summary with `skip_memory_metrics=False`."""
    for device in ("cpu", "gpu"):  # a line with both shows the GPU's
        peak = f"train_mem_{device}_peaked_delta"
        if peak in log:
            parts = ("before_init_mem_{}", "init_mem_{}_alloc_delta", "train_mem_{}_alloc_delta")
            used = log.reindex(columns=[part.format(device) for part in parts]).sum(axis=1) + log[peak]
            log[PEAK_MEMORY] = (used / 2**30).fillna(log.get(PEAK_MEMORY))
        if f"memory/{device}_peak_gib" in log:
            log[PEAK_MEMORY] = log[f"memory/{device}_peak_gib"].fillna(log.get(PEAK_MEMORY))


def _derive_throughput(run: Run) -> None:
    """
    Tokens per second, from one generation to the next: the tokens of a rollout batch over the time of all its updates.
    `num_tokens` counts prompts and completions on all ranks. A run logs it when it has generated.
    """
    steps, tokens = run.points("num_tokens")
    if run.clock is None or len(steps) == 0:
        return
    logged, seconds = run.clock
    # A line with a generation begins where the line before it ended; the last batch ends with the run
    bounds = np.append(np.searchsorted(logged, steps) - 1, len(logged) - 1)
    updates, duration, count = np.diff(logged[bounds]), np.diff(seconds[bounds]), np.diff(tokens, prepend=0.0)
    known = (duration > 0) & (count > 0)
    if len(steps) > 1 and updates[-1] < updates[-2]:
        known[-1] = False  # the run ended within a rollout batch
    run.log[TOKENS_PER_SECOND] = pd.Series(count[known] / duration[known], index=steps[known].astype(int))


def _read_settings(folder: Path, notes: list[str]) -> tuple[dict[str, Any], set[str]]:
    """What a run was trained with, at the end of a resumed one, and the names of the settings that changed."""
    roots = (folder, folder.parent) if folder.name.startswith(CHECKPOINT) else (folder,)
    file = next((root / "config.yaml" for root in roots if (root / "config.yaml").is_file()), None)
    if file is None:
        return {}, set()
    settings = _read_yaml(file, notes)
    names: set[str] = set()
    # A training keeps the settings that held until the checkpoint from which it resumed with others
    earlier = {int(path.stem.rpartition("-")[2]): path for path in file.parent.glob(f"config-until-{CHECKPOINT}*.yaml")}
    parts = [(step, _read_yaml(earlier[step], notes)) for step in sorted(earlier)] + [(0, settings)]
    for (step, before), (_, after) in pairwise([part for part in parts if part[1]]):
        changed = [n for n in sorted({**before, **after}.keys() - _SET_BY_A_RESUME) if before.get(n) != after.get(n)]
        said = "; ".join(f"`{name}` {before.get(name)!r} → {after.get(name)!r}" for name in changed)
        notes.append(f"It resumed from checkpoint-{step} with other settings: {said}. The page names the last ones.")
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
    one configuration if their paths are equal except `seed0`, `-seed-1`, `_seed2` … at the end of a part:
    `out/troll-seed0 out/troll-seed1`, or `seed0/troll seed1/troll`. The rest of the path is then the label. Groups
    keep the order of the command line. The ReportError names all runs that cannot be read, or are there twice.
    """
    paths: dict[str, list[Path]] = defaultdict(list)
    automatic = set()  # the keys of `paths` that are no labels, but paths without their seeds
    for argument in arguments:
        label, equals, value = argument.partition("=")
        if os.path.exists(argument) or not equals:  # and not Path.exists(), which raises for a long label
            parts = [_SEED.sub("", part) for part in Path(argument).resolve().parts]
            key = "/".join(part for part in parts if part and part != "/")
            automatic.add(key)
            paths[key].append(Path(argument))
        elif not label or not value:
            raise ReportError(f"{argument!r} is no run: give RUN or LABEL=RUN[,RUN…].")
        else:
            runs = [value] if os.path.exists(value) else value.split(",")
            paths[label].extend(Path(run) for run in runs if run)
    errors: list[str] = []
    groups = []
    for key, folders in paths.items():
        group = Group(_short_label(key, list(paths)) if key in automatic else key, [])
        for number, folder in enumerate(folders):
            if folder.resolve() in {other.resolve() for other in folders[:number]}:
                errors.append(f"{folder}: given twice for {group.label!r}; it is one seed, not two.")
                continue
            try:
                group.runs.append(load_run(folder))
            except (OSError, ReportError) as error:
                errors.append(str(error))
        groups.append(group)
    if errors:
        raise ReportError("\n".join(errors))
    return groups


def _short_label(key: str, keys: Sequence[str]) -> str:
    """The shortest ending of a path, in whole parts, that no other key has."""
    parts = key.split("/")
    endings = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    return next((end for end in endings if not any(("/" + k).endswith("/" + end) for k in keys if k != key)), key)

"""Run folders: reads the log lines of training runs, and groups the runs that are seeds of one configuration."""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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
RUN_SETTINGS = ["seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "hub_model_id"]
_SET_BY_A_RESUME = {"resume", "resume_from_checkpoint", "output_dir"}  # no change of the run
_SEED = re.compile(r"(^|[-_.])seed[-_.=]?\d+$", re.IGNORECASE)


class ReportError(ValueError):
    """A mistake that a user can correct: a run that cannot be read, a reward function that does not exist."""


@dataclass
class Run:
    """One training run, from its log lines."""

    folder: Path  # as the user named it
    state_file: Path  # that was read
    log: pd.DataFrame  # a row for each update (optimizer step), a column for each metric; NaN if it was not logged
    settings: dict[str, Any]  # from the `config.yaml` of `troll grpo`; method and learning rate from the log without it
    changed: set[str]  # names of settings that changed when it resumed
    notes: list[str]  # for readers of its curves

    def values(self, key: str, against_time: bool = False) -> pd.Series:
        """The values of a metric by update, or by seconds of training; empty if these were not logged."""
        values = self.log[key].dropna() if key in self.log else pd.Series(dtype=float)
        if against_time:
            return values.iloc[:0] if self.clock.empty else values.set_axis(self.seconds(values.index))
        return values

    @property
    def last_update(self) -> int:
        return int(self.log.index[-1])

    @cached_property
    def clock(self) -> pd.Series:
        """The training seconds that had passed by an update, from update 0 on; empty without logged times."""
        step_time = self.values("step_time")
        # The `step_time` of a line is the mean over the updates since the line before it. The next line with a time
        # bridges lines without one (a torn record).
        seconds = (step_time * np.diff(step_time.index, prepend=0)).cumsum()
        return seconds if seconds.empty else pd.concat([pd.Series({0: 0.0}), seconds])

    def seconds(self, updates: Sequence[int] | pd.Index) -> np.ndarray:
        """The training seconds that had passed by some updates, for a run with logged times."""
        return np.interp(updates, self.clock.index, self.clock)


@dataclass
class Group:
    """The runs of one configuration, which differ in their seeds."""

    label: str
    runs: list[Run]

    @cached_property
    def log(self) -> pd.DataFrame:
        """The log lines of all runs, one below the other."""
        return pd.concat([run.log for run in self.runs])

    @property
    def kl_bound(self) -> float | None:
        """The bound in nats that all runs have; `None` if it was not saved, or changed when a run resumed."""
        bounds = {None if "kl_bound" in run.changed else run.settings.get("kl_bound") for run in self.runs}
        return bounds.pop() if len(bounds) == 1 else None

    @cached_property
    def settings(self) -> pd.DataFrame:
        """The settings as text, a row for each run, other than seeds and folders."""
        texts = [{name: str(value) for name, value in run.settings.items()} for run in self.runs]
        return pd.DataFrame(texts).drop(columns=RUN_SETTINGS, errors="ignore")


# -- Reading ----------------------------------------------------------------------------------------------------------


def load_run(path: Path) -> Run:
    """
    Read a run from its folder: `trainer_state.json`, or the one of the newest checkpoint.

    If a run was resumed and stopped before it wrote its own state again, its newest checkpoint continues the log of the
    folder. A torn file is skipped with a note. `path` is a run's `output_dir`, a checkpoint, or a `trainer_state.json`.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise ReportError(f"{path}: there is no such run folder.")
    states = [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in reversed(checkpoints(folder)))]
    files = [path] if path.is_file() else [file for file in states if file.is_file()]
    if not files:
        where = f"in this folder or in a {CHECKPOINT}* below it, which a Trainer writes."
        if inner := sorted(file.parent.name for file in folder.glob(f"*/{STATE_FILE}")):
            where += f" Some of its subfolders hold one: name these, as in {folder / inner[0]} ({', '.join(inner)})."
        raise ReportError(f"{folder}: there is no {STATE_FILE} {where}")
    notes: list[str] = []
    history, state_file = _read_newest(files, notes)
    if not history:
        raise ReportError(f"{state_file}: its `log_history` is empty. Was the run stopped before its first log line?")
    log = _merge(history, notes)
    if log.empty:
        raise ReportError(f"{state_file}: no line of its `log_history` holds a `step` and a finite number.")
    run = Run(path, state_file, log, *_read_settings(folder, notes), notes)
    is_logged = lambda prefix: log.columns.str.startswith(prefix).any()
    method = "troll" if is_logged("troll/") else "clip" if is_logged("clip_ratio/") else "unknown"
    run.settings.setdefault("method", method)
    run.settings.setdefault("learning_rate", max(run.values("learning_rate"), default="unknown"))
    log[PEAK_MEMORY] = run.values("memory/gpu_peak_gib").combine_first(run.values("memory/cpu_peak_gib"))
    log[TOKENS_PER_SECOND] = _throughput(run)
    run.log = log.dropna(axis=1, how="all")
    return run


def _read_newest(files: Sequence[Path], notes: list[str]) -> tuple[list[dict], Path]:
    """The log of the first readable file, or of the next if that one continues it, and the file."""
    readable: list[tuple[list[dict], Path]] = []
    errors = []
    for file in files:
        try:
            # A NaN as an infinity: in a table, a NaN is what a line lacks
            state = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: math.inf)
            readable.append(([line for line in state["log_history"] if isinstance(line, dict)], file))
        except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
            errors.append(f"{file} is torn, or not a trainer's state ({error!r})")
        if len(readable) == 2:
            break
    if not readable:
        raise ReportError(f"{'; '.join(errors)}. There is no other checkpoint to fall back to.")
    history, file = readable[0]
    if errors:
        notes.append(f"{'; '.join(errors)}: the report reads {file} instead.")
    finished = [line for line in history if "train_runtime" not in line]  # a line that no checkpoint holds
    for later, later_file in readable[1:]:
        if len(later) > len(finished) and finished == later[: len(finished)]:
            notes.append(f"{later_file} continues {file}: the run was resumed and stopped. Read the former.")
            return later, later_file
    return history, file


def _merge(history: list[dict], notes: list[str]) -> pd.DataFrame:
    """Finite numbers by update and metric. Later lines win, because a resumed run repeats updates."""
    lines = pd.DataFrame([{"step": None} | line for line in history]).drop(columns="epoch", errors="ignore")
    numbers = lines.apply(pd.to_numeric, errors="coerce")
    if without := numbers["step"].isna().sum():
        notes.append(f"{without} log lines without a `step` are left out.")
    infinite = np.isinf(numbers)
    if infinite.any(axis=None):
        counts = infinite.sum().loc[lambda count: count > 0].sort_index()
        said = ", ".join(f"{key} ({count})" for key, count in counts.items())
        notes.append(f"Values that are NaN or infinite are left out: {said}.")
    by_update = numbers.mask(infinite).groupby("step")
    if len(repeated := by_update.nunique().max(axis=1).loc[lambda count: count > 1].index):
        notes.append(
            f"{len(repeated)} updates from {repeated[0]:.0f} on were logged more than once (by a resumed run, or by "
            "several evaluation sets): the last value counts."
        )
    log = by_update.last().dropna(how="all").dropna(how="all", axis=1)
    return log.set_axis(log.index.astype(int))


def _throughput(run: Run) -> pd.Series:
    """
    Tokens per second, from one generation to the next: the tokens of a rollout batch over the time of all its updates.
    `num_tokens` counts prompts and completions on all ranks. A run logs it when it has generated.
    """
    tokens, clock = run.values("num_tokens"), run.clock
    if clock.empty or tokens.empty:
        return pd.Series(dtype=float)
    # A line with a generation begins where the line before it ended; the last batch ends with the run
    bounds = np.append(clock.index.searchsorted(tokens.index) - 1, len(clock) - 1)
    updates, seconds = np.diff(clock.index[bounds]), np.diff(clock.iloc[bounds])
    if len(tokens) > 1 and updates[-1] < updates[-2]:
        seconds[-1] = 0.0  # the run ended within a rollout batch
    count = tokens.diff().fillna(tokens)
    return (count / seconds)[(seconds > 0) & (count > 0)]


def _read_settings(folder: Path, notes: list[str]) -> tuple[dict[str, Any], set[str]]:
    """The settings of a run, at its end if it resumed, and the names of the settings that changed."""
    folder = folder.parent if folder.name.startswith(CHECKPOINT) else folder
    # A training keeps the settings that held until the checkpoint from which it resumed with others
    earlier = {int(path.stem.rpartition("-")[2]): path for path in folder.glob(f"config-until-{CHECKPOINT}*.yaml")}
    parts = [(step, _read_yaml(earlier[step], notes)) for step in sorted(earlier)]
    settings = _read_yaml(folder / "config.yaml", notes)
    changed: set[str] = set()
    for (step, before), (_, after) in pairwise([part for part in (*parts, (0, settings)) if part[1]]):
        names = [n for n in sorted({**before, **after}.keys() - _SET_BY_A_RESUME) if before.get(n) != after.get(n)]
        said = "; ".join(f"`{name}` {before.get(name)!r} → {after.get(name)!r}" for name in names)
        notes.append(f"It resumed from checkpoint-{step} with other settings: {said}. The page names the last ones.")
        changed.update(names)
    return settings, changed


def _read_yaml(file: Path, notes: list[str]) -> dict[str, Any]:
    """Settings of a file, with the KL bound only if the training reads it; empty if there is no file."""
    try:
        settings = {"kl_bound": DEFAULT_KL_BOUND} | yaml.safe_load(file.read_text(encoding="utf-8"))
        if settings.get("method", "troll") == "troll" and settings.get("trust_region") != "mask":
            return settings | {"kl_bound": float(settings["kl_bound"])}
        return {name: value for name, value in settings.items() if name != "kl_bound"}
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        notes.append(f"{file} cannot be read as settings: the run is reported without them.")
        return {}


# -- Grouping ---------------------------------------------------------------------------------------------------------


def load_groups(arguments: Sequence[str]) -> list[Group]:
    """
    Read the runs of a command line, and group the seeds of one configuration.

    `LABEL=RUN[,RUN…]` names a group and its runs; the same label again adds to it. Runs without a label are seeds of
    one configuration if their paths are equal except `seed0`, `-seed-1`, `_seed2` … at the end of a part:
    `out/troll-seed0 out/troll-seed1`, or `seed0/troll seed1/troll`. The rest of the path, within the folder that these
    runs share, is then the label. The ReportError names all runs that cannot be read.
    """
    # By label, or by the path without its seeds; a run that is named twice is one seed
    labelled: dict[str | Path, dict[Path, Path]] = defaultdict(dict)
    for argument in arguments:
        label, equals, value = argument.partition("=")
        if os.path.exists(argument) or not equals:  # and not Path.exists(), which raises for a long label
            parts = [_SEED.sub("", part) for part in Path(argument).resolve().parts]
            labelled[Path(*parts)][Path(argument).resolve()] = Path(argument)
        elif not label or not value:
            raise ReportError(f"{argument!r} is not a run: give RUN or LABEL=RUN[,RUN…].")
        else:
            runs = [value] if os.path.exists(value) else value.split(",")
            labelled[label] |= {Path(run).resolve(): Path(run) for run in runs if run}
    parents = [key.parent for key in labelled if isinstance(key, Path)]
    errors: list[str] = []
    groups = []
    for key, folders in labelled.items():
        group = Group(key if isinstance(key, str) else str(key.relative_to(os.path.commonpath(parents))), [])
        for folder in folders.values():
            try:
                group.runs.append(load_run(folder))
            except (OSError, ReportError) as error:
                errors.append(str(error))
        groups.append(group)
    if errors:
        raise ReportError("\n".join(errors))
    return groups

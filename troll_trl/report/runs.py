"""Run folders: reads the log lines of training runs, and groups the runs that are seeds of one configuration."""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from math_answers.printable import printable
from troll_trl.resilience.checkpoint_folder import CHECKPOINT, checkpoints
from troll_trl.trust_region import DEFAULT_KL_BOUND

STATE_FILE = "trainer_state.json"
# What the log lines themselves lack, derived from them
TOKENS_PER_SECOND = "derived/tokens_per_second"
PEAK_MEMORY = "derived/peak_memory_gib"
# Settings in which the seeds of one configuration may differ
RUN_SETTINGS = ["seed", "data_seed", "output_dir", "run_name", "logging_dir", "hub_model_id"]
RUN_SETTINGS += ["resume", "resume_from_checkpoint"]
# A YAML alias repeats what it names. With this many, settings become at most a few hundred times as long; lists of
# aliases of lists of aliases would become ten times as long a level
MAX_ALIASES = 16
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
        # The `step_time` of a line is the mean over the updates since the line before it
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

    @property
    def kl_bound(self) -> float | None:
        """The bound in nats that all runs have; `None` if it was not saved, or changed when a run resumed."""
        bound, *others = {run.settings.get("kl_bound") for run in self.runs}
        return bound if isinstance(bound, float) and not others else None

    @property
    def settings(self) -> pd.DataFrame:
        """The settings as text, a row for each run, other than seeds and folders."""
        texts = [{name: str(value) for name, value in run.settings.items()} for run in self.runs]
        return pd.DataFrame(texts).drop(columns=RUN_SETTINGS, errors="ignore")


def load_run(path: Path) -> Run:
    """Read a run from its `output_dir`, a checkpoint, or a `trainer_state.json`. The newest checkpoint counts if the
    folder's own state is missing, torn, or older, because the run was resumed and stopped."""
    folder = path.parent if path.is_file() else path
    states = [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in reversed(checkpoints(folder)))]
    files = [path] if path.is_file() else [file for file in states if file.is_file()]
    if not files:
        raise ReportError(f"{path} is not a run: it holds no {STATE_FILE}, and no {CHECKPOINT}* with one.")
    notes: list[str] = []
    history, state_file = _read_newest(files, notes)
    log = _by_update(history, notes)
    if log.empty:
        raise ReportError(f"{state_file}: no line of its `log_history` holds a `step` and a finite number.")
    run = Run(path, state_file, log, {}, notes)
    prefixes = {key.partition("/")[0] for key in log}
    method = "troll" if "troll" in prefixes else "clip" if "clip_ratio" in prefixes else "unknown"
    learning_rate = max(run.values("learning_rate"), default="unknown")
    run.settings = {"method": method, "learning_rate": learning_rate} | _read_settings(folder, notes)
    log[PEAK_MEMORY] = run.values("memory/gpu_peak_gib").combine_first(run.values("memory/cpu_peak_gib"))
    log[TOKENS_PER_SECOND] = _throughput(run)
    run.log = log.dropna(axis=1, how="all")
    notes[:] = map(printable, notes)
    return run


def _read_newest(files: Sequence[Path], notes: list[str]) -> tuple[list[dict], Path]:
    """The log of the first readable file, or of the next if that one continues it, and the file."""
    readable: list[tuple[list[dict], list[dict], Path]] = []
    for file in files:
        try:
            # A NaN as an infinity: in a table, a NaN is what a line lacks
            state = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: math.inf)
            history = state["log_history"]
            # The line that ends a training is in no checkpoint. It has the metrics of the updates since the one before.
            readable.append(([line for line in history if "train_runtime" not in line], history, file))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            notes.append(f"{file} is torn, or not a trainer's state ({error!r}).")
        if len(readable) == 2:
            break
    if not readable:
        raise ReportError(printable(" ".join(notes)))
    common = readable[0][0]
    _, history, file = max((one for one in readable if one[0][: len(common)] == common), key=lambda one: len(one[0]))
    of_training = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
    return [{key: line[key] for key in line if key not in of_training} for line in history], file


def _by_update(history: list[dict], notes: list[str]) -> pd.DataFrame:
    """Finite numbers by update and metric. Later lines win: a training may evaluate its last weights once more."""
    lines = pd.DataFrame([{"step": None}, *history]).drop(columns="epoch", errors="ignore")
    numbers = lines.apply(pd.to_numeric, errors="coerce")
    infinite = np.isinf(numbers)
    if len(names := sorted(numbers.columns[infinite.any()])):
        notes.append(f"Values that are NaN or infinite are left out: {', '.join(names)}.")
    log = numbers.mask(infinite).groupby("step").last().dropna(how="all").dropna(how="all", axis=1)
    return log.set_axis(log.index.astype(int))


def _throughput(run: Run) -> pd.Series:
    """Tokens per second by the first update of each rollout batch: its tokens over the time of all its updates.
    `num_tokens` counts prompts and completions on all ranks. A run logs it when it has generated."""
    tokens, seconds = run.values("num_tokens"), run.clock.diff().iloc[1:]
    first = seconds.index.to_series().where(seconds.index.isin(tokens.index)).ffill()
    batches = seconds.groupby(first)
    seconds, sizes = batches.sum(), batches.size()
    if len(sizes) > 1 and sizes.iloc[-1] < sizes.iloc[-2]:
        seconds = seconds.iloc[:-1]  # the run ended within a rollout batch
    rates = tokens.diff().fillna(tokens) / seconds
    return rates[(rates > 0) & np.isfinite(rates)]


def _read_settings(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The settings of a run; for one that changed when the run resumed, a text with all values."""
    folder = folder.parent if folder.name.startswith(CHECKPOINT) else folder
    # A training keeps the settings that held until the checkpoint from which it resumed with others
    earlier = folder.glob(f"config-until-{CHECKPOINT}*.yaml")
    files = [*sorted(earlier, key=lambda file: int(file.stem.rpartition("-")[2])), folder / "config.yaml"]
    parts = [settings for file in files if file.is_file() and (settings := _read_yaml(file, notes))]
    names = {name for part in parts for name in part}
    values = {name: [value for value, _ in groupby(part.get(name, "default") for part in parts)] for name in names}
    shown = {name: one[0] if len(one) == 1 else ", then ".join(map(str, one)) for name, one in values.items()}
    changed = [f"`{name}` {shown[name]}" for name in sorted(names.difference(RUN_SETTINGS)) if len(values[name]) > 1]
    if changed:
        notes.append(f"It resumed with other settings: {'; '.join(changed)}.")
    return shown


def _read_yaml(file: Path, notes: list[str]) -> dict[str, Any]:
    """Settings of a file, with the KL bound only if the training reads it."""
    try:
        text = file.read_text(encoding="utf-8")
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > MAX_ALIASES:
            raise ValueError("too many aliases")
        settings = {"kl_bound": DEFAULT_KL_BOUND} | yaml.safe_load(text)
        has_bound = settings.get("trust_region", "projection") in ("projection", "penalty")
        if settings.get("method", "troll") == "troll" and has_bound:
            return settings | {"kl_bound": float(settings["kl_bound"])}
        return {name: value for name, value in settings.items() if name != "kl_bound"}
    except (TypeError, ValueError, RecursionError, yaml.YAMLError):
        notes.append(f"{file} cannot be read as settings: the run is reported without them.")
        return {}


def load_groups(arguments: Sequence[str]) -> list[Group]:
    """Read the runs of a command line: `LABEL=RUN[,RUN…]`, or runs whose paths are equal except `seed0`, `-seed-1`,
    `_seed2` … at the end of a part, such as `out/troll-seed0 out/troll-seed1` or `seed0/troll seed1/troll`. The rest of
    the path, within the folder that the runs without a label share, is then their label."""
    # By label, or by the path without its seeds; then by place: a run that is named twice is one seed
    groups: dict[str | Path, dict[Path, Run]] = defaultdict(dict)
    for argument in arguments:
        label, equals, value = argument.partition("=")
        key: str | Path = label
        names = value.split(",")
        if os.path.exists(argument) or not equals:  # and not Path.exists(), which raises for a long label
            key = Path(*(_SEED.sub("", part) for part in Path(argument).resolve().parts))
            names = [argument]
        elif not label or not all(names):
            raise ReportError(f"{argument!r} is not a run: give RUN or LABEL=RUN[,RUN…].")
        groups[key] |= {Path(name).resolve(): load_run(Path(name)) for name in names}
    parents = [key.parent for key in groups if isinstance(key, Path)]
    labels = [key if isinstance(key, str) else str(key.relative_to(os.path.commonpath(parents))) for key in groups]
    return [Group(label, list(runs.values())) for label, runs in zip(labels, groups.values(), strict=True)]

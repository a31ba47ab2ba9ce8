"""The grid of a study: a YAML file, read strictly, and the runs that it defines."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Task:
    """
    Problems, and the model that learns to solve them.

    The problems are generated (`family`), or the first ones of a `dataset`. The model is given, or a new small one that
    supervised training warms up until it solves some of the generated problems.

    Args:
        settings (`dict[str, Any]`):
            Settings of `troll grpo`; at least `max_completion_length`.
        train, test (`int`):
            Numbers of training problems and of held-out problems.
        family (`str`, *optional*):
            A key of `evidence.problems.FAMILIES`.
        dataset (`str`, *optional*):
            Folder with `train.jsonl` and `test.jsonl`.
        model (`str`, *optional*):
            Folder or hub name. The arguments that follow are for the small models.
        architecture (`str`, *optional*):
            `qwen3` or `llama`.
        start_success (`float`, *optional*):
            Success rate at which the warm-up ends.
        share (`float`, *optional*):
            Share of the warm-up's solutions in the form that earns the reward (`evidence.problems.RARE`); by default
            all of them. With a share, `start_success` is the success of solutions in the form that the model chose.
        wording (`int`, *optional*, defaults to `0`):
            Number of random letters in front of every solution. They do not affect the reward.
    """

    settings: dict[str, Any]
    train: int
    test: int
    family: str | None = None
    dataset: str | None = None
    model: str | None = None
    architecture: str | None = None
    start_success: float | None = None
    share: float | None = None
    wording: int = 0

    def __post_init__(self):
        if (self.family is None) is (self.dataset is None):
            raise TypeError("a task has either a `family` or a `dataset`")
        if (self.model is None) is (self.architecture is None or self.start_success is None):
            raise TypeError("a task has either a `model`, or an `architecture` and a `start_success`")
        if self.model is None and self.family is None:
            raise TypeError("a new model is warmed up on a `family`: a `dataset` has no solutions for it")


@dataclass(frozen=True)
class Cell:
    """Every combination of these tasks, methods and `settings`, which map options of `troll grpo` to lists of values;
    `learning_rate` is one of them."""

    tasks: list[str]
    methods: list[str]
    settings: dict[str, list[Any]]


@dataclass(frozen=True)
class Study:
    """Cells of the grid with their `seeds`, which decide problems, warm-up and training."""

    seeds: list[int]
    cells: list[Cell]


@dataclass(frozen=True)
class Run:
    """One training run and its evaluation: names of task and method, the settings of its cell, sorted by name, and the
    seed."""

    task: str
    method: str
    varied: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def folder(self) -> Path:
        """Relative to the study's folder. The seeds of a cell differ only in the last part."""
        cell = ",".join(f"{key}={value}" for key, value in self.varied)
        return Path(self.task, self.method, cell, f"seed{self.seed}")


@dataclass(frozen=True)
class Grid:
    """
    The studies of a YAML file.

    Args:
        training (`Path`):
            YAML file of `troll grpo` that every run uses, relative to the grid's file.
        tasks (`dict[str, Task]`), studies (`dict[str, Study]`):
            By name.
        methods (`dict[str, dict[str, Any]]`):
            Settings of `troll grpo`, by name.
        evaluation (`Path`, *optional*):
            YAML file of `troll eval` for a trained model. Without it, a run's success is the end of its curve.
        tables (`dict[str, Any]`, *optional*):
            What `evidence.tables` groups and compares.
    """

    training: Path
    tasks: dict[str, Task]
    methods: dict[str, dict[str, Any]]
    studies: dict[str, Study]
    evaluation: Path | None = None
    tables: dict[str, Any] = field(default_factory=dict)

    def runs(self, seeds: list[int] | None = None) -> dict[Run, list[str]]:
        """Every run with the names of its studies, in the order of the file. `seeds` replace the seeds of the
        studies."""
        studies: dict[Run, list[str]] = {}
        for name, study in self.studies.items():
            for seed, cell in itertools.product(seeds or study.seeds, study.cells):
                for values in itertools.product(*cell.settings.values()):
                    varied = tuple(sorted(zip(cell.settings, values, strict=True)))
                    for task, method in itertools.product(cell.tasks, cell.methods):
                        studies.setdefault(Run(task, method, varied, seed), []).append(name)
        return studies

    def settings(self, run: Run) -> dict[str, Any]:
        """The settings of a run, in addition to the file `training`. The cell overrides the method, and the method the
        task."""
        return self.tasks[run.task].settings | self.methods[run.method] | dict(run.varied) | {"seed": run.seed}


def read_grid(file: Path) -> Grid:
    """Read a YAML file with the keys of [`Grid`]. A `ValueError` names a key that is unknown or missing, and a task or
    method that does not exist."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key in {"training", "evaluation"} & content.keys():
        content[key] = file.parent / content[key]
    for part, kind in (("tasks", Task), ("studies", _make_study)):
        content[part] = {
            name: _make(kind, entry, f"{file}: {part}: {name}") for name, entry in content.get(part, {}).items()
        }
    grid = _make(Grid, content, str(file))
    for name, study in grid.studies.items():
        for cell in study.cells:
            _check_names(cell.tasks, grid.tasks, f"{file}: studies: {name}: tasks")
            _check_names(cell.methods, grid.methods, f"{file}: studies: {name}: methods")
    return grid


def _make_study(seeds: list[int], cells: list[dict[str, Any]]) -> Study:
    return Study(seeds, [_make_cell(**cell) for cell in cells])


def _make_cell(tasks: list[str], methods: list[str], learning_rate: list[float], **settings: list[Any]) -> Cell:
    return Cell(tasks, methods, {"learning_rate": learning_rate, **settings})


def _make(kind: Callable[..., Any], entry: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**entry)
    except TypeError as error:  # names the key that is unknown or missing
        raise ValueError(f"{where}: {error}") from None


def _check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {name!r}; there are {', '.join(known)}.")

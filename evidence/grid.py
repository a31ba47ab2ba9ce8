"""A study's grid: a YAML file, read strictly, and the runs that it asks for."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from troll_trl.cli.settings.layers import read_layers


@dataclass(frozen=True)
class Task:
    """
    Generated problems, and a small model that is warmed up on them, or a given model.

    Args:
        family (`str`):
            The problems, a key of `evidence.problems.FAMILIES`.
        train, test (`int`):
            Numbers of problems to learn from and of held-out ones.
        settings (`dict[str, Any]`):
            Settings of scripts/train.py; `max_completion_length` at least.
        model (`str`, *optional*):
            Folder or hub name of a model that is trained as it is. The arguments that follow are for the small models.
        architecture (`str`, *optional*):
            `qwen3` or `llama`.
        start_success (`float`, *optional*):
            Success rate at which the supervised warm-up ends.
        sizes (`dict[str, int]`, *optional*):
            Sizes of the model, in place of the quickstart's.
        share (`float`, *optional*):
            Share of the warm-up's solutions in the form that earns the reward (`evidence.problems.RARE`); by default
            all of them. With a share, `start_success` is the success of solutions in the form that the model chose.
        wording (`int`, *optional*, defaults to `0`):
            Number of random letters in front of every solution. They decide nothing.
    """

    family: str
    train: int
    test: int
    settings: dict[str, Any]
    model: str | None = None
    architecture: str | None = None
    start_success: float | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    share: float | None = None
    wording: int = 0

    def __post_init__(self):
        if (self.model is None) is (self.architecture is None or self.start_success is None):
            raise TypeError("a task has either a `model`, or an `architecture` and a `start_success`")


@dataclass(frozen=True)
class GivenTask:
    """
    A given model, and the problems of a dataset.

    Args:
        model (`str`):
            Folder or hub name.
        dataset (`str`):
            Folder with `train.jsonl` and `test.jsonl`.
        candidates (`int`):
            Number of problems of `train.jsonl`, the first ones.
        test (`int`):
            Number of problems of `test.jsonl`, the first ones.
        settings (`dict[str, Any]`):
            Settings of scripts/train.py; `max_completion_length` at least.
    """

    model: str
    dataset: str
    candidates: int
    test: int
    settings: dict[str, Any]


def prompt_of(task: Task | GivenTask) -> dict[str, Any]:
    """The settings that scripts/evaluate.py must share with the training."""
    shared = {key: value for key, value in task.settings.items() if key in ("instruction", "system_prompt")}
    return {"max_new_tokens": task.settings["max_completion_length"], **shared}


def content_of(file: Path) -> list[dict[str, Any]]:
    """The content, without comments, of a YAML file and of those that it is based on."""
    contents = [yaml.safe_load(layer.path.read_text(encoding="utf-8")) for layer in read_layers(file)]
    return [{name: value for name, value in content.items() if name != "base"} for content in contents]


@dataclass(frozen=True)
class Method:
    """
    One of the methods that a study compares.

    Args:
        settings (`dict[str, Any]`, *optional*):
            Settings of scripts/train.py.
        variant (`str`, *optional*):
            Trainer in place of `TrollGRPOTrainer`, a key of `evidence.variants.VARIANTS`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    variant: str | None = None


@dataclass(frozen=True)
class Study:
    """
    Some cells of the grid: every task with every method, every alternative of `vary` and every seed; or chosen cells.

    Args:
        seeds (`list[int]`):
            Seeds of the problems, the warm-up and the training. All runs of a seed come before the runs of the next.
        tasks, methods (`list[str]`):
            Names.
        vary (`list[dict[str, Any]]`):
            Alternatives: settings of scripts/train.py with lists of values. Every combination of the values is run.
        cells (`list[dict[str, Any]]`):
            Replaces the other three. Each cell has a `task` or `tasks`, a `method` or `methods`, and settings as in
            `vary`. All runs of a cell follow each other.
    """

    seeds: list[int]
    tasks: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    vary: list[dict[str, list[Any]]] = field(default_factory=lambda: [{}])
    cells: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        if bool(self.cells) is bool(self.methods):
            raise TypeError("a study has either `cells`, or `tasks` and `methods`")
        self.alternatives()  # a wrong cell is refused now

    def alternatives(self) -> list[tuple[list[str], list[str], dict[str, list[Any]]]]:
        """Tasks, methods and settings. Every combination of them is run."""
        if not self.cells:
            return [(self.tasks, self.methods, alternative) for alternative in self.vary]
        return [_alternative(**cell) for cell in self.cells]


@dataclass(frozen=True)
class Run:
    """
    One training run and its evaluation.

    Args:
        task, method (`str`):
            Names.
        varied (`tuple[tuple[str, Any], ...]`):
            Settings of its cell, sorted by name; the learning rate is always one of them.
        seed (`int`):
            Seed of the problems, the warm-up and the training.
    """

    task: str
    method: str
    varied: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def folder(self) -> Path:
        """Relative to the study's folder. Seeds of a cell differ in the last part alone, as scripts/report.py wants."""
        cell = ",".join(f"{key}={value}" for key, value in self.varied)
        return Path(self.task, self.method, cell, f"seed{self.seed}")


def _alternative(
    task: str | None = None,
    method: str | None = None,
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
    **varied: list[Any],
) -> tuple[list[str], list[str], dict[str, list[Any]]]:
    """Tasks, methods and settings of a cell."""
    if (task is None) is not bool(tasks) or (method is None) is not bool(methods):
        raise TypeError("a cell has either a `task` or `tasks`, and either a `method` or `methods`")
    return [*tasks] if task is None else [task], [*methods] if method is None else [method], varied


@dataclass(frozen=True)
class Grid:
    """
    The studies of a YAML file.

    Args:
        file (`Path`):
            That file.
        training, evaluation (`Path`):
            YAML files for scripts/train.py and scripts/evaluate.py in every run.
        tasks, methods, studies (`dict`):
            By name.
        tuning (`list[str]`):
            The studies whose runs choose the learning rates of all others. The file may have a single name.
    """

    file: Path
    training: Path
    evaluation: Path
    tasks: dict[str, Task | GivenTask]
    methods: dict[str, Method]
    tuning: list[str]
    studies: dict[str, Study]

    def tuning_runs(self) -> list[Run]:
        """The runs that choose the learning rates."""
        return [run for name in self.tuning for run in self.runs(name)]

    def runs(self, study: str, rates: Mapping[tuple[str, str], float] = {}) -> list[Run]:
        """
        The runs of a study.

        Args:
            study (`str`):
                Its name.
            rates (`Mapping[tuple[str, str], float]`):
                Tuned learning rate of each task and method. A cell whose rate is neither varied nor tuned is left out.
        """
        asked, runs = self.studies[study], []
        for seed, (tasks, methods, alternative) in itertools.product(asked.seeds, asked.alternatives()):
            for values in itertools.product(*alternative.values()):
                varied = dict(zip(alternative, values, strict=True))
                for task, method in itertools.product(tasks, methods):
                    if (rate := varied.get("learning_rate", rates.get((task, method)))) is not None:
                        runs.append(Run(task, method, tuple(sorted((varied | {"learning_rate": rate}).items())), seed))
        return runs

    def waiting(self, rates: Mapping[tuple[str, str], float]) -> int:
        """The number of runs whose learning rates are not tuned yet."""
        every = dict.fromkeys(itertools.product(self.tasks, self.methods), 0.0)
        return sum(len(self.runs(name, every)) - len(self.runs(name, rates)) for name in self.studies)

    def settings(self, run: Run) -> dict[str, Any]:
        """The settings of a run, in addition to the file `training`. The cell overrides the method, that the task."""
        return self.tasks[run.task].settings | self.methods[run.method].settings | dict(run.varied) | {"seed": run.seed}

    def all_runs(self, rates: Mapping[tuple[str, str], float]) -> dict[Run, list[str]]:
        """Every run with the names of its studies, in the order of the file. A run of two studies is run once."""
        studies: dict[Run, list[str]] = {}
        for name in self.studies:
            for run in self.runs(name, rates):
                studies.setdefault(run, []).append(name)
        return studies


def read_grid(file: Path) -> Grid:
    """
    Read a grid.

    Args:
        file (`Path`):
            YAML file with the keys of [`Grid`].

    Raises:
        ValueError: A key is unknown or missing, or a study names an unknown task or method.
    """
    (content,) = content_of(file)
    parts: dict[str, dict[str, Any]] = {}
    for part, kind in (("tasks", _make_task), ("methods", Method), ("studies", Study)):
        parts[part] = {
            name: _make(kind, entry, f"{file}: {part}: {name}") for name, entry in content.pop(part, {}).items()
        }
    for key in {"training", "evaluation"} & content.keys():
        content[key] = file.parent / content[key]
    if isinstance(content.get("tuning"), str):
        content["tuning"] = [content["tuning"]]
    grid = _make(Grid, {"file": file, **parts, **content}, str(file))
    for name, study in grid.studies.items():
        for tasks, methods, _ in study.alternatives():
            _check_names(tasks, grid.tasks, f"{file}: studies: {name}: tasks")
            _check_names(methods, grid.methods, f"{file}: studies: {name}: methods")
    _check_names(grid.tuning, grid.studies, f"{file}: tuning")
    return grid


def _make_task(**entry: Any) -> Task | GivenTask:
    return GivenTask(**entry) if "dataset" in entry else Task(**entry)


def _make(kind: Callable[..., Any], entry: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**entry)
    except TypeError as error:  # names the key that is unknown or missing
        raise ValueError(f"{where}: {error}") from None


def _check_names(names: Iterable[str], known: Iterable[str], where: str):
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {name!r}; there are {', '.join(known)}.")


def tuned_rates(results: Iterable[Mapping[str, Any]], tuning: Iterable[str]) -> dict[tuple[str, str], float]:
    """
    For each task and method the learning rate whose runs in the studies `tuning` have the largest area under the curve
    of held-out success, averaged over seeds. A failed run counts as 0. If areas are equal, the smallest rate is chosen.

    Args:
        results (`Iterable[Mapping[str, Any]]`):
            Records of `evidence.results`.
        tuning (`Iterable[str]`):
            Names of the studies.
    """
    areas: dict[tuple[str, str], dict[float, list[float]]] = {}
    tuning = set(tuning)
    for result in results:
        if not tuning.isdisjoint(result["studies"]):
            rates = areas.setdefault((result["task"], result["method"]), {})
            rates.setdefault(result["varied"]["learning_rate"], []).append(result.get("area") or 0.0)
    mean = lambda values: sum(values) / len(values)
    return {cell: max(sorted(rates), key=lambda rate: mean(rates[rate])) for cell, rates in areas.items()}

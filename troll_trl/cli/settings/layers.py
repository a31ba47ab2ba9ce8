"""
Reads a command line and its YAML files, which are layers: a file's key `base` names the files whose settings it takes
over and may replace. Some files come with the package: in the wheel next to its code, in a checkout at its top level.
`MODEL/DATASET` names a combination of them, and no file. Nothing here imports torch, which reads variables under `env`.
"""

import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import troll_trl
from troll_trl.cli.settings.command import CommandParser, nearest, stop


@dataclass
class Command:
    """A program's `--config`s and its other flags, and the layers of the files."""

    program: str  # name in messages
    configs: list[str]
    flags: list[str]
    layers: list["Layer"]  # each replaces the settings of those before
    launcher: list[str] = field(default_factory=list)  # flags of `accelerate launch`, which `parser.py` takes out

    def algorithm(self) -> Any:
        """Return the algorithm that flags or files name, or `None`. The names of the other settings depend on it."""
        parser = CommandParser(prog=self.program, add_help=False)
        parser.add_argument("--algorithm")
        named = [parser.parse_known_args(self.flags)[0].algorithm]
        named += [layer.values.get("algorithm") for layer in reversed(self.layers)]
        return next((algorithm for algorithm in named if algorithm is not None), None)


def read_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """Split a command line, by default the process's, into `--config` and the other flags, read the files and set the
    variables under their `env`; a later `--config` replaces the settings of those before. Ends with code 2 and one
    message if a file cannot be read."""
    parser = CommandParser(prog=program or Path(sys.argv[0]).name, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    options, flags = parser.parse_known_args(argv)
    try:
        layers = [layer for config in options.config for layer in read_layers(config)]
    except ValueError as error:
        stop(parser.prog, error)
    for _, values in layers:
        os.environ |= values.pop("env", {})  # the next imports read some of these variables
    return Command(parser.prog, options.config, flags, layers)


# -- Which files ------------------------------------------------------------------------------------------------------


def configs_folder() -> Path:
    """Return the folder of the configs. A wheel holds a copy of the checkout's folder (see `pyproject.toml`)."""
    package = Path(troll_trl.__file__).parent
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """List the configs to train or evaluate with, such as `qwen3-0.6b/gsm8k`; not their parts."""
    folder = configs_folder()
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml")]
    names = {str(file) for file in files if file.parts[0] not in ("accelerate", "base", "data", "models", "paper")}
    names |= {f"{model.stem}/{data.stem}" for model in folder.glob("models/*") for data in folder.glob("data/*")}
    return sorted(names)


def find_config(name: str | Path) -> Path:
    """Find the file or combination that `--config` names: a path, or the name of a config that comes with the package.
    Both may lack `.yaml`. If there is neither, the `ValueError` names the nearest."""
    for folder in (Path(), configs_folder()):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file() or combined_files(path):
                return path
    what = f"{name or repr(name)} is a folder" if Path(name).is_dir() else f"There is no file {name}"
    raise ValueError(f"{what}, and no config that comes with the package has this name.{nearest_config(name)}")


def nearest_config(name: str | Path) -> str:
    """Name the nearest config, and where all names are."""
    near = nearest(str(name).removesuffix(".yaml").removeprefix("configs/"), config_names(), likeness=0.6)
    return (f" The nearest is {near}." if near else "") + " `troll configs` lists all."


def combined_files(path: Path) -> list[Path]:
    """List the files that `configs/MODEL/DATASET.yaml` stands for, if its folder `configs` has them; else none."""
    folder = path.parent.parent
    files = [folder / "paper.yaml", folder / f"models/{path.parent.name}.yaml", folder / f"data/{path.stem}.yaml"]
    return files if path.suffix == ".yaml" and all(file.is_file() for file in files) else []


# -- What a file says -------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """
    The settings of one file, except what its bases set.

    A value, and each item of a list or under `env`, is the text in the file, as a flag's value is: the field's type
    converts both. A `null` is `None`. Only what is below a mapping is read here: `{min_lr: 1e-7}` holds a number,
    `{enable_thinking: false}` a boolean, `{start: 12:30}` text.
    """

    path: Path
    values: dict[str, Any]


class _Plain(str):
    """A text that has no quotes in its file."""


class _Loader(yaml.SafeLoader):
    """Reads every value as text, unless a tag such as `!!int` says otherwise, and refuses equal keys."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # merge keys

    def construct_scalar(self, node):
        text = super().construct_scalar(node)
        return _Plain(text) if node.style is None else text

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                problem = f"the key `{key.value}` occurs twice, remove one"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def read_layers(name: str | Path) -> list[Layer]:
    """
    Read a YAML file, or a config that comes with the package, such as `qwen3-0.6b/gsm8k`, and before it the files that
    its key `base` names; each replaces the settings of those before. Raises a `ValueError` for a file that is missing,
    no YAML mapping, with a key twice, or its own base. A combination has a path, and no file.
    """
    try:
        return _layers_of(find_config(name), ())
    except RecursionError:
        raise ValueError(f"{name}: a value nests too deep, or holds itself by an anchor.") from None


def _layers_of(path: Path, named_by: tuple[Path, ...]) -> list[Layer]:
    if path.resolve() in named_by:
        way = " -> ".join(file.name for file in (*named_by, path))
        raise ValueError(f"{path} is its own `base`: {way}. Remove one of these.")
    if not path.is_file() and (parts := combined_files(path)):
        layers = [layer for part in parts for layer in _layers_of(part, (*named_by, path.resolve()))]
        return [*layers, Layer(path, {"output_dir": f"outputs/{path.parent.name}-{path.stem}"})]
    if not path.is_file():
        raise ValueError(f"There is no file {path}, the `base` of {named_by[-1]} (relative to that file).")
    values = _values_of(path)
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ValueError(f"{path}: `base` must be a path or a list of paths.")
    layers = [layer for base in bases for layer in _layers_of(path.parent / base, (*named_by, path.resolve()))]
    return [*layers, Layer(path, values)]


def read_mapping(path: Path) -> dict[Any, Any]:
    """Read a YAML file, whose values without quotes are texts. Raises a `ValueError` for a file that is no mapping."""
    text = ""
    try:
        values = yaml.load(text := path.read_text(encoding="utf-8"), _Loader)
    # PyYAML raises the middle three for `!!int abc` and `!!bool abc`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_without_values(error, text)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must map names to values (`name: value`).")
    return values


def _values_of(path: Path) -> dict[str, Any]:
    """Read the settings of one file, with its `base` and its `env`."""
    values = read_mapping(path)
    variables = values.get("env", {})
    if not isinstance(variables, dict):
        raise ValueError(f"{path}: `env` must map names to values.")
    if wrong := [f"`{name}`" for name, item in variables.items() if not isinstance(_converted(name, item), str)]:
        raise ValueError(f"{path}: `env` must map names to values, and {', '.join(wrong)} has no single one.")
    try:
        return {str(name): value if name == "env" else _converted(name, value) for name, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _without_values(error: Exception, text: str) -> str:
    """Say what is wrong with a file of this text, where, and at which key, but no value: it may be a token."""
    if isinstance(error, OSError | UnicodeDecodeError | yaml.reader.ReaderError):
        return " ".join(str(error).split())
    if not isinstance(error, yaml.MarkedYAMLError):
        return "a value is not what its tag says, such as `!!int`"
    mark = error.problem_mark or error.context_mark
    said = error.problem or ""
    if said.startswith("but "):  # the second half of a sentence
        said = f"{error.context}, {said}"
    said = re.sub(r"(alias|anchor|tag|handle) '.*?'(?=;|$| )", r"\1", said, flags=re.DOTALL)
    key = re.match(r"[\s{-]*([\"']?[\w.-]+[\"']?)\s*:(\s|$)", [*text.splitlines(), ""][mark.line])
    return f"line {mark.line + 1}, column {mark.column + 1}" + (f", at the key `{key[1]}`" if key else "") + f": {said}"


# Below a mapping, a text without quotes may mean one of these, or a number
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}
_WORDS |= {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*\.?[0-9]*)(e[-+]?[0-9]+)?|0x[0-9a-f]+|0o[0-7]+", re.IGNORECASE)


def _converted(key: str, value: Any, below: bool = False) -> Any:
    """Convert the value of this key to what [`Layer`] holds. Below a mapping, YAML 1.2 and Python say what a text
    means."""
    if isinstance(value, dict):
        return {str(name): _converted(name, inner, below=True) for name, inner in value.items()}
    if isinstance(value, list):
        return [_converted(key, item, below) for item in value]
    if not isinstance(value, _Plain):
        return value
    word = value.lower()
    if word in _WORDS and (below or _WORDS[word] is None):
        return _WORDS[word]
    if word in (".inf", "-.inf", ".nan"):  # the option's own type reads the rest, as Python writes it
        return word.replace(".", "")
    if below and word in ("yes", "no", "on", "off"):  # a boolean to YAML 1.1; as text, it counts as true
        raise ValueError(f"`{key}` is {value}. Write true or false, or quotes around it for the text.")
    if not below or not _NUMBER.fullmatch(value) or math.isinf(number := _number(value)):  # a commit may be 12e5678
        return str(value)
    return number


def _number(text: str) -> int | float:
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return int(text, 0)

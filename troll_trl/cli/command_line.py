"""
Reads a command line: the YAML files that `--config` names, and flags that override them. The module is stricter than
TRL's parser.

A file's `base` may name the files that it builds on. Later values replace earlier ones, but `env` mappings are merged.
Some files come with the package, and `MODEL/DATASET` names a combination of three of them. This module does not import
torch: on import, torch and other libraries read variables that a file's `env` sets.
"""

import argparse
import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

import troll_trl

_PACKAGE = Path(troll_trl.__file__).parent


def warn(message: str) -> None:
    """Print a line to stderr. If a machine runs several processes, only the first one prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)


def stop(program: str, message: object, code: int = 2) -> NoReturn:
    """Exit with one message. If a machine runs several processes, only the first one prints it."""
    warn(f"{program}: error: {' '.join(str(message).split())}")
    raise SystemExit(code)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a sentence with the valid name that is most like `name`, or an empty string."""
    near = difflib.get_close_matches(name.replace("-", "_"), valid, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def name_of(word: str) -> str:
    """Return the option name of a flag: `max_steps` for `--max-steps=3`."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


# -- Files ------------------------------------------------------------------------------------------------------------


def configs_folder() -> Path:
    """Return the folder of the configs. A wheel holds a copy of the checkout's folder (see `pyproject.toml`)."""
    return _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """List the configs to train or evaluate with, such as `qwen3-0.6b/gsm8k`; not their parts."""
    folder = configs_folder()
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml")]
    parts = ("accelerate", "base", "data", "models", "paper")
    names = {str(file) for file in files if file.parts[0] not in parts and file.name != "base"}
    names |= {f"{model.stem}/{data.stem}" for model in folder.glob("models/*") for data in folder.glob("data/*")}
    return sorted(names)


def read_config(name: str | Path) -> dict[str, Any]:
    """
    Read a YAML file or a config that comes with the package, merged with the files that its `base` names.

    Args:
        name (`str` or `Path`): a path, or a name such as `qwen3-0.6b/gsm8k`; `.yaml` may be left out

    Raises:
        ValueError: a file is missing, is not a mapping of names to values, has a key twice, or is its own base.
    """
    return _merged(_find_config(name, Path()), ())


def _find_config(name: str | Path, folder: Path) -> Path:
    """Find a file in `folder` or among the package's. The path of a combination of files is not a file itself."""
    for path in (parent / file for parent in (folder, configs_folder()) for file in (str(name), f"{name}.yaml")):
        if path.is_file() or _combined_files(path):
            return path
    short = str(name).removesuffix(".yaml").removeprefix("configs/")
    raise ValueError(f"there is no config {folder / name}.{nearest(short, config_names())} `troll configs` lists all.")


def _combined_files(path: Path) -> list[Path]:
    """List the files that `configs/MODEL/DATASET.yaml` combines, or none if one of them is missing."""
    folder = path.parent.parent
    files = [folder / "paper.yaml", folder / f"models/{path.parent.name}.yaml", folder / f"data/{path.stem}.yaml"]
    return files if path.suffix == ".yaml" and all(file.is_file() for file in files) else []


def _merged(path: Path, named_by: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in named_by:
        raise ValueError(f"{path} is its own `base`, via {' -> '.join(file.name for file in named_by)}.")
    merged: dict[str, Any] = {}
    if path.is_file():
        values = _read_file(path)
        bases = values.pop("base", [])
        bases = [bases] if isinstance(bases, str) else bases
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            raise ValueError(f"{path}: `base` must be a path or a list of paths, got {bases!r}.")
        files = [_find_config(base, path.parent) for base in bases]
    else:
        files = _combined_files(path)
        values = {"output_dir": f"outputs/{path.parent.name}-{path.stem}"}
    for file in files:
        merged = _over(merged, _merged(file, (*named_by, path.resolve())), file)
    return _over(merged, values, path)


def _over(merged: dict[str, Any], later: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """Return `merged` with the values of a later file. The variables of both `env` mappings apply. Any other mapping is
    replaced, and a warning names it."""
    for name in merged.keys() & later.keys():
        before, now = merged[name], later[name]
        if name != "env" and isinstance(before, dict) and isinstance(now, dict) and before != now:
            warn(f"{file}: `{name}` {now} replaces all of {before}.")
    env = {"env": {**merged.get("env", {}), **later["env"]}} if "env" in later else {}
    return merged | later | env


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice. PyYAML would take the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                problem = f"the key `{key.value}` occurs twice: remove one"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("env", {}), dict):
        raise ValueError(f"{path} must map names to values (`name: value`), and so must its `env`.")
    return {str(name): value for name, value in values.items()}


# -- Flags ------------------------------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses abbreviations and repeated flags, and reports a mistake in one line."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **(options | {"allow_abbrev": False}))
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse would read -1e-5 as a flag

    def parse_args(self, args=None, namespace=None):
        """Check the names of the flags, which argparse's own messages would not show, and parse as argparse does."""
        flags = [word.partition("=")[0] for word in args or () if re.match("--?[A-Za-z]", word)]
        for flag in flags:
            if flag not in self._option_string_actions:
                self.error(f"unknown flag {flag}.{nearest(name_of(flag), self.names())}")
        names = [name_of(flag) for flag in flags]
        if twice := [name for name in names if names.count(name) > 1]:
            self.error(f"--{twice[0]} is given twice. Remove one.")
        return super().parse_args(args, namespace)

    def names(self) -> list[str]:
        """List the names that a misspelt flag may mean."""
        return [name_of(flag) for flag in self._option_string_actions]

    def error(self, message: str) -> NoReturn:
        stop(self.prog, message)


def read_command(argv: Sequence[str] | None, program: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Read the files of `--config`, and set the variables under their `env`. Return the merged values of the files,
    their names, and the other words of the command line. A later file replaces values of an earlier one, and
    adds to its `env`."""
    parser = CommandParser(prog=program, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    options, words = parser.parse_known_args(argv)
    values: dict[str, Any] = {}
    try:
        for name in options.config:
            values = _over(values, read_config(name), name)
    except ValueError as error:
        stop(program, error)
    os.environ.update({str(name): str(value) for name, value in values.pop("env", {}).items()})
    return values, options.config, words


# TRL types these as text, but a boolean has a meaning of its own
_TEXT_OR_BOOLEAN = ("scale_rewards", "resume_from_checkpoint", "fsdp")
# A string in place of these mappings may be the path of a file, which transformers reads
MAPPING_OR_PATH = ("accelerator_config", "deepspeed", "fsdp_config")


def json_mapping(text: str) -> dict[str, Any]:
    """Read a flag's JSON mapping. If this raises a `ValueError`, argparse's message names the flag."""
    if not isinstance(value := json.loads(text), dict):
        raise ValueError
    return value


def _types_of(hint: Any) -> set[Any]:
    """Return the alternatives of a field's type. YAML has no tuple."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {get_origin(alternative) or alternative for alternative in alternatives}
    return types | ({list} if tuple in types else set())


def _is_text(hint: Any) -> bool:
    """Return whether a field takes only text: no number, boolean or mapping, not even in a list."""
    if get_origin(hint) in (Union, UnionType, list):
        return all(map(_is_text, get_args(hint)))
    return hint is type(None) or (isinstance(hint, type) and issubclass(hint, str | Enum))


class OptionParser(CommandParser, TrlParser):
    """
    TRL's parser of dataclasses, which checks a file's keys and values as strictly as flags.

    Args:
        dataclass_types (`Sequence[type]`): their fields are the options
        program (`str`): name in messages
        launcher (`Iterable[str]`, *optional*): the launcher's flags, which a misspelt flag may mean and which are
        refused as keys
    """

    def __init__(self, dataclass_types: Sequence[Any], program: str, launcher: Iterable[str] = ()):
        use = "--config takes a YAML file, or a name from `troll configs`. Each option is a key in a file and a flag. "
        super().__init__(dataclass_types, prog=program, description=f"{use}A flag overrides the file.")
        self.usage = f"{program} [--config FILE] [--NAME VALUE ...]"
        types = {name: hint for kind in dataclass_types for name, hint in get_type_hints(kind).items()}
        self.hints = {field.name: types[field.name] for kind in dataclass_types for field in fields(kind) if field.init}
        self.only_launcher = {*launcher} - {*self.hints, "help"}
        for name, hint in self.hints.items():
            if dict in _types_of(hint) and name not in MAPPING_OR_PATH:
                self._option_string_actions[f"--{name}"].type = json_mapping
        if "datasets" in self.hints:  # what a run saves is plain YAML
            self._option_string_actions["--datasets"].type = lambda path: {"path": path}

    def names(self) -> list[str]:
        return [*super().names(), *self.only_launcher]

    def read(self, values: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
        """Return the options that are set, by name and converted to their types. `flags` override the `values` of
        files. A mistake ends the process with code 2 and one message."""
        if {"-h", "--help"} & {*flags}:
            self.print_help()
            raise SystemExit(0)
        for name in values:
            if name in self.only_launcher:
                self.error(f"unknown key `{name}`. It is a flag of `accelerate launch`: --{name} {values[name]}")
            if name not in self.hints:
                self.error(f"unknown key `{name}`.{nearest(name, self.hints)}")
        for action in self._actions:
            action.default = argparse.SUPPRESS  # the namespace gets only the options that are set
        options = argparse.Namespace(**{name: self._converted(name, value) for name, value in values.items()})
        return vars(self.parse_args(flags, options))

    def _converted(self, name: str, value: Any) -> Any:
        """Convert a file's value to the option's type, as argparse converts a flag's text."""
        hint, several = self.hints[name], self._option_string_actions[f"--{name}"].nargs == "+"
        takes_boolean = name in _TEXT_OR_BOOLEAN
        types = _types_of(hint) | ({bool} if takes_boolean else set())
        if not isinstance(value, str | list) and type(value) in types:
            return value
        items = value if isinstance(value, list) and list in types else [value]
        if _is_text(hint) and not takes_boolean and not all(isinstance(item, str) for item in items):
            self.error(
                f"`{name}` must be text, got {value!r}. In a file, quote it: YAML reads `off` as False, 0123 as 83 and "
                "1:30 as 90."
            )
        if not all(isinstance(item, dict if name == "datasets" else str | int | float) for item in items):
            self.error(f"`{name}` must be {inspect.formatannotation(hint)}, got {value!r}.")
        if name == "datasets" or (isinstance(value, list) and not several):
            return value
        converted = [getattr(self.parse_args([f"--{name}={item}"]), name) for item in items]
        return [one for texts in converted for one in texts] if several else converted[0]

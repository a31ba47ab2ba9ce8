"""YAML files in layers: a file's key `base` names the files whose settings it takes over and may replace."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from troll_trl.cli.settings.shipped import find_config


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses equal keys."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key `{key_node.value}` occurs twice, remove one", problem_mark=key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _TextLoader(_UniqueKeyLoader):
    """Keeps every value except null as it is written, as a shell does."""


for _tag in ("bool", "int", "float", "timestamp"):
    _TextLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.construct_yaml_str)


class Value(NamedTuple):
    """A value of a file: as it is written, like a flag's, and as YAML reads it."""

    text: Any
    typed: Any


class Layer(NamedTuple):
    """One file's own settings, without those of its bases."""

    path: Path
    values: dict[str, Value]


def read_layers(name: str | Path) -> list[Layer]:
    """
    Read a YAML file, or a config that comes with the package, such as `qwen3-0.6b/gsm8k`, and before it the files that
    its key `base` names; each replaces the settings of those before. Raises a `ValueError` for a file that is missing,
    no YAML mapping, with a key twice, or its own base.
    """
    return _read(find_config(name), ())


def _read(path: Path, named_by: tuple[Path, ...]) -> list[Layer]:
    if path.resolve() in named_by:
        way = " -> ".join(file.name for file in (*named_by, path))
        raise ValueError(f"{path} is its own `base`: {way}. Remove one of these.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}, the `base` of {named_by[-1]} (relative to that file).")
    try:
        source = path.read_text(encoding="utf-8")
        text, typed = (yaml.load(source, Loader=loader) for loader in (_TextLoader, _UniqueKeyLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(text, dict):
        raise ValueError(f"{path} must map names to values, got {text!r}.")
    values = {name: Value(*both) for name, *both in zip(text, text.values(), typed.values(), strict=True)}
    bases = values.pop("base", Value([], [])).typed
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ValueError(f"{path}: `base` must be a path or a list of paths, got {bases!r}.")
    layers = [layer for base in bases for layer in _read(path.parent / base, (*named_by, path.resolve()))]
    return [*layers, Layer(path, values)]

"""YAML files in layers: a file's key `base` names the files whose settings it takes over and may replace."""

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which would keep the last of two equal keys."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key `{key_node.value}` stands twice, remove one", problem_mark=key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_layers(path: Path, named_by: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """
    Read a YAML file and, before it, the files that its key `base` names.

    Args:
        path (`Path`):
            YAML file.
        named_by (`tuple[Path, ...]`, *optional*):
            Files that led to this one.

    Returns:
        `list[tuple[Path, dict]]`: files with their settings, each replacing those before.

    Raises:
        ValueError: a file that is missing, no YAML mapping, with a key twice, or its own base.
    """
    if path.resolve() in named_by:
        way = " -> ".join(file.name for file in (*named_by, path))
        raise ValueError(f"{path} is its own `base`: {way}. Remove one of these.")
    if not path.is_file():
        origin = f", the `base` of {named_by[-1]} (relative to that file)" if named_by else ""
        raise ValueError(f"There is no file {path}{origin}. Check the path.")
    try:
        layer = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(layer, dict):
        raise ValueError(f"{path} must map names to values, got {layer!r}.")
    bases = layer.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ValueError(f"{path}: `base` must be a path or a list of paths, got {bases!r}.")
    layers = [layer for base in bases for layer in read_layers(path.parent / base, (*named_by, path.resolve()))]
    return [*layers, (path, layer)]

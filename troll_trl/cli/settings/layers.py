"""
YAML files in layers: a file's key `base` names the files whose settings it takes over and may replace. Some files come
with the package: in the wheel next to its code, in a checkout at its top level. `MODEL/DATASET` names a combination of
them, and no file.
"""

import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import troll_trl


def configs_folder() -> Path:
    """The folder of the configs. A wheel holds a copy of the checkout's folder (see `pyproject.toml`)."""
    package = Path(troll_trl.__file__).parent
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """The names of the configs to train or evaluate with, such as `qwen3-0.6b/gsm8k`; not their parts."""
    folder = configs_folder()
    files = (path.relative_to(folder) for path in folder.rglob("*.yaml"))
    names = {
        str(file.with_suffix("")) for file in files if file.parts[0] not in ("accelerate", "base", "data", "models")
    }
    names |= {f"{model.stem}/{data.stem}" for model in folder.glob("models/*") for data in folder.glob("data/*")}
    return sorted(names - {"paper"})


def find_config(name: str | Path) -> Path:
    """The file or combination that `--config` names: a path, or the name of a config that comes with the package;
    either without `.yaml`, too. If there is neither, the `ValueError` names the nearest."""
    for folder in (Path(), configs_folder()):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file() or combined_files(path):
                return path
    what = f"{name or repr(name)} is a folder" if Path(name).is_dir() else f"There is no file {name}"
    raise ValueError(f"{what}, and no config that comes with the package has this name.{nearest_config(name)}")


def nearest_config(name: str | Path) -> str:
    """Where to find the right name of a config."""
    near = difflib.get_close_matches(str(name).removesuffix(".yaml").removeprefix("configs/"), config_names(), n=1)
    return "".join(f" The nearest is {name}." for name in near) + " `troll configs` lists all."


def combined_files(path: Path) -> list[Path]:
    """The files that `configs/MODEL/DATASET.yaml` stands for, in a folder `configs` that has them; else none."""
    folder = path.parent.parent
    files = [folder / "paper.yaml", folder / f"models/{path.parent.name}.yaml", folder / f"data/{path.stem}.yaml"]
    return files if path.suffix == ".yaml" and all(file.is_file() for file in files) else []


class Layer(NamedTuple):
    """
    The settings of one file, except what its bases set.

    A scalar, and each scalar of a list or under `env`, is the text in the file, as a flag's value is; null is `None`.
    YAML reads only what is nested deeper: `7`, `no` and `0123456` are text, `{enable_thinking: false}` holds a boolean.
    It reads as YAML 1.2 does, and numbers as Python does: `{min_lr: 1e-7}` holds a number, `{start: 12:30}` text.
    """

    path: Path
    values: dict[str, Any]


# As many as a report reads. Each repeats what it names: lists of aliases of lists of aliases grow with every level
MAX_ALIASES = 16


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses equal keys. YAML 1.1, which it reads by itself, has numbers to the base
    of 60 and of 8, dates, and text for `1e-7`."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

    def __init__(self, stream):
        super().__init__(stream)
        self._aliases = 0

    def compose_node(self, parent, index):
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if alias is not None:
            self._aliases += 1
            inside = node.end_mark is None  # the node is not complete yet
            if inside or self._aliases > MAX_ALIASES:
                problem = "an alias names what contains it" if inside else f"there are more than {MAX_ALIASES} aliases"
                raise yaml.composer.ComposerError(problem=problem, problem_mark=alias.start_mark)
        return node

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key `{key.value}` occurs twice, remove one", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node):
        text = self.construct_scalar(node)
        return int(text, 0 if text.lstrip("+-")[:2] in ("0x", "0o") else 10)


_WHOLE = r"[0-9]+(_[0-9]+)*"
for _name, _text in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": rf"[-+]?({_WHOLE}|0x[0-9a-fA-F]+|0o[0-7]+)",
    "float": rf"[-+]?(({_WHOLE}(\.({_WHOLE})?)?|\.{_WHOLE})([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"({_text})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_layers(name: str | Path) -> list[Layer]:
    """
    Read a YAML file, or a config that comes with the package, such as `qwen3-0.6b/gsm8k`, and before it the files that
    its key `base` names; each replaces the settings of those before. Raises a `ValueError` for a file that is missing,
    no YAML mapping, with a key twice, or its own base. A combination has a path, and no file.
    """
    return _read(find_config(name), ())


def _read(path: Path, named_by: tuple[Path, ...]) -> list[Layer]:
    if path.resolve() in named_by:
        way = " -> ".join(file.name for file in (*named_by, path))
        raise ValueError(f"{path} is its own `base`: {way}. Remove one of these.")
    if not path.is_file() and (parts := combined_files(path)):
        layers = [layer for part in parts for layer in _read(part, (*named_by, path.resolve()))]
        return [*layers, Layer(path, {"output_dir": f"outputs/{path.parent.name}-{path.stem}"})]
    if not path.is_file():
        raise ValueError(f"There is no file {path}, the `base` of {named_by[-1]} (relative to that file).")
    text = ""
    try:
        values = _load(text := path.read_text(encoding="utf-8"))
    # PyYAML's own, of `!!bool abc`, and of a file that one may not read
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_without_values(error, text)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must map names to values (`name: value`), got {_kind(values)}.")
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ValueError(f"{path}: `base` must be a path or a list of paths, got {_kind(bases)}.")
    layers = [layer for base in bases for layer in _read(path.parent / base, (*named_by, path.resolve()))]
    return [*layers, Layer(path, values)]


def _without_values(error: Exception, text: str) -> str:
    """What is wrong with a file of this text, where, and at which key. A value may be a token."""
    if isinstance(error, OSError | UnicodeDecodeError | yaml.reader.ReaderError):
        return " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:  # of a conversion
        return "a value is not what its tag says, such as `!!int`"
    said = getattr(error, "problem", None) or "no YAML"
    if said.startswith("but "):  # the second half of a sentence
        said = f"{getattr(error, 'context', None)}, {said}"
    said = re.sub(r"(alias|anchor|tag|handle) '.*?'(?=;|$| )", r"\1", said, flags=re.DOTALL)
    key = re.match(r"[\s{-]*([\"']?[\w.-]+[\"']?)\s*:(\s|$)", [*text.splitlines(), ""][mark.line])
    return f"line {mark.line + 1}, column {mark.column + 1}" + (f", at the key `{key[1]}`" if key else "") + f": {said}"


def _kind(value: Any) -> str:
    """A value in words, without what it holds, which may be a token."""
    if isinstance(value, dict):
        return f"a mapping with the keys {', '.join(f'`{key}`' for key in value)}"
    return {list: "a list", str: "a text", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")


def _load(source: str) -> Any:
    loader = _Loader(source)
    node = loader.get_single_node()
    if isinstance(node, yaml.MappingNode):
        node.value = [(key, _as_text(value)) for key, value in node.value]
        for key, value in node.value:
            if key.value == "env" and isinstance(value, yaml.MappingNode):
                value.value = [(name, _as_text(text)) for name, text in value.value]
    return node and loader.construct_document(node)


def _as_text(node: yaml.Node) -> yaml.Node:
    """A copy, because an anchor makes the same node a value elsewhere."""
    if isinstance(node, yaml.SequenceNode):
        items = [_as_text(item) if isinstance(item, yaml.ScalarNode) else item for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null":
        return yaml.ScalarNode("tag:yaml.org,2002:str", node.value, node.start_mark, node.end_mark)
    return node

"""
The names of all settings, read from the sources of the dataclasses that declare them: to import these takes torch,
transformers and TRL with it, many seconds, and a mistyped name should be told before.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from troll_trl.cli.settings.renamed import EVALUATION, RENAMED

# Package, file and class
_TRAINER = (
    ("troll_trl", "cli/settings/arguments.py", "TrollScriptArguments"),
    ("troll_trl", "trainers/config.py", "TrollOptions"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
SOURCES = {
    "grpo": (
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
        ("troll_trl", "trainers/config.py", "TrollGRPOConfig"),
        *_TRAINER,
    ),
    "rloo": (("trl", "trainer/rloo_config.py", "RLOOConfig"), *_TRAINER),
    "eval": (("troll_trl", "evaluation/arguments.py", "EvaluationArguments"),),
}
_CUTOFF = 0.75  # of difflib's ratio: below, the nearest name is seldom the one that was meant


@cache
def declared_names(command: str) -> frozenset[str]:
    """
    The names of the settings of a command, `"grpo"`, `"rloo"` or `"eval"`; none if a library has moved its classes,
    since then only the dataclasses themselves can tell.
    """
    names: set[str] = set()
    for package, file, class_name in SOURCES[command]:
        found = fields_of(package, file, class_name)
        if not found:
            return frozenset()
        names |= found.keys()
    return frozenset(names)


@cache
def fields_of(package: str, file: str, class_name: str) -> dict[str, ast.AnnAssign]:
    """The fields of a dataclass that an argument can set, with their source; none if it is not in this file."""
    path = find_package(package) / file
    if not path.is_file():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {
                statement.target.id: statement
                for statement in node.body
                if isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and "ClassVar" not in ast.unparse(statement.annotation)
                and not (statement.value is not None and "init=False" in ast.unparse(statement.value))
            }
    return {}


def find_package(package: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(package)  # does not import it
    return Path(next(iter((spec and spec.submodule_search_locations) or [""])))


@cache
def launcher_names() -> frozenset[str]:
    """The names of the options of `accelerate launch`."""
    path = find_package("accelerate") / "commands" / "launch.py"
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    return frozenset(name.replace("-", "_") for name in re.findall(r'"--([a-z][\w-]+)"', source)) - {"help"}


def name_of(flag: str) -> str:
    """`--max-steps=3` is `max_steps`."""
    return flag.partition("=")[0].lstrip("-").replace("-", "_")


def is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def describe_unknown(name: str, valid: Iterable[str], prefix: str = "", algorithm: str = "") -> str:
    """What to write in place of a name that is not valid with the `algorithm` in force."""
    if algorithm == "rloo" and name in fields_of("troll_trl", "trainers/config.py", "TrollGRPOConfig"):
        return (
            "It is an option of grpo alone: a mask decides token by token, and RLOO's ratio is that of a whole "
            "completion. Remove it: RLOO has TROLL's projection."
        )
    for other in ("grpo", "rloo"):
        if algorithm and algorithm != other and name in declared_names(other):
            return f"It is an option of {other}: set `algorithm: {other}`, or remove it."
    if algorithm and (name in launcher_names() or name == "accelerate_config"):
        return "It belongs to the launcher: give it to `troll grpo`, `troll rloo` or `accelerate launch`."
    if name in (table := RENAMED if algorithm else EVALUATION):
        return table[name]
    near = nearest(name, valid)
    return f"The nearest valid name is {prefix}{near}." if near else "No valid name is near it."


def nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=_CUTOFF)), None)

"""What configs are made of: fields that YAML files and flags fill, and the user's own code."""

import importlib
import os
import sys
from dataclasses import MISSING, field
from importlib.util import find_spec
from numbers import Real
from typing import Any, TypeGuard


def setting(
    default: Any = MISSING, help: str = "", choices: list[str] | None = None, default_factory: Any = MISSING
) -> Any:
    """Make a dataclass field with its `--help` text and its allowed values."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, default_factory=default_factory, metadata=metadata)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether an option is a number. A boolean is not. NaN is, but no range contains it."""
    return isinstance(value, Real) and not isinstance(value, bool)


def imported(path: str) -> Any:
    """Import the object that a dotted path such as `my_lib.rewards.custom_reward` names. If the package is not found,
    append the working directory to `sys.path` and import from there. Raises an `ImportError` or `AttributeError` that
    names what is missing."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ImportError("it is not a dotted import path such as my_lib.regions.MyRegion")
    package = module.partition(".")[0]
    here = os.getcwd()
    if package not in sys.modules and here not in sys.path:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # not found, or a folder without code
            sys.path.append(here)  # keep it: the module, or a worker process, may import from here later
    return getattr(importlib.import_module(module), attribute)

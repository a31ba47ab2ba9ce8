"""Dataclass fields that YAML files and flags fill, and helpers for their values."""

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
    """Make a dataclass field with the text of its `--help`, and with the values that it may have."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, default_factory=default_factory, metadata=metadata)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether an option is a number, which a boolean is not. NaN is one, and lies in no range."""
    return isinstance(value, Real) and not isinstance(value, bool)


class OmitHubToken:
    """Mixin for a config of transformers. Its pickles and copies omit the `hub_token`, since a push uploads a pickle of
    the config, `training_args.bin`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}


# -- The user's own code -----------------------------------------------------------------------------------------------


def imported(path: str) -> Any:
    """Import what a dotted path such as `my_lib.rewards.custom_reward` names. A module that is nowhere else is looked
    for in the working directory, which is then the last place for other imports, too. An `ImportError` or
    `AttributeError` says what is missing."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ImportError("it is no dotted import path such as my_lib.regions.MyRegion")
    package = module.partition(".")[0]
    here = os.getcwd()
    if package not in sys.modules and here not in sys.path:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # it is nowhere, or a folder without code
            sys.path.append(here)  # it stays: the module may import others later, and a worker process this one
    return getattr(importlib.import_module(module), attribute)

"""Fields of dataclasses that files and flags set: one text documents a field, for `--help` and for the docstring."""

import importlib
import inspect
import os
import sys
import textwrap
from dataclasses import MISSING, field, fields
from numbers import Real
from typing import Any, TypeGuard


def setting(
    default: Any = MISSING, help: str = "", choices: list[str] | None = None, default_factory: Any = MISSING
) -> Any:
    """A dataclass field with the text of its `--help`, and with the values that it may have."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, default_factory=default_factory, metadata=metadata)


def document(cls: type) -> type:
    """Class decorator: writes the settings of `cls` and of this package's bases into its docstring's `Args:`."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("troll_trl.")]
    lines = []
    for option in fields(cls):
        if not option.init or not any(option.name in base.__annotations__ for base in ours):
            continue
        kind = option.type if isinstance(option.type, str) else getattr(option.type, "__name__", str(option.type))
        default = "" if option.default in (None, MISSING) else f", defaults to `{option.default!r}`"
        lines.append(f"    {option.name} (`{kind}`, *optional*{default}):")
        lines.append(textwrap.indent(textwrap.fill(option.metadata["help"].replace("%%", "%"), 112), " " * 8))
    before, raises, after = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
    cls.__doc__ = "\n".join([before, "", "Args:", *lines]) + raises + after + "\n"
    return cls


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an option is a number, which a boolean is not. NaN is one, and lies in no range."""
    return isinstance(value, Real) and not isinstance(value, bool)


def imported(path: str) -> Any:
    """What a dotted import path such as `my_lib.rewards.custom_reward` names. The working directory is searched, too.
    An `ImportError` or `AttributeError` says what is missing."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ImportError("it is no dotted import path such as my_lib.regions.MyRegion")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), attribute)

"""Files and flags set fields of dataclasses. One text documents a field, for `--help` and for the docstring."""

import importlib
import inspect
import os
import sys
import textwrap
from dataclasses import MISSING, fields
from importlib.util import find_spec
from numbers import Real
from typing import Any, TypeGuard


def document(cls: type) -> type:
    """Decorate a class: write the settings of `cls` and of this package's bases into its docstring's `Args:`."""
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
    """Return whether an option is a number, which a boolean is not. NaN is one, and lies in no range."""
    return isinstance(value, Real) and not isinstance(value, bool)


class TokenStays:
    """Mixin for a config of transformers. The Trainer pickles it into `training_args.bin`, which a push uploads: no
    pickle and no copy has the `hub_token`."""

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
    package, here = module.partition(".")[0], os.getcwd()
    if package not in sys.modules and here not in sys.path:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # it is nowhere, or a folder without code
            sys.path.append(here)  # it stays: the module may import others later, and a worker process this one
    return getattr(importlib.import_module(module), attribute)

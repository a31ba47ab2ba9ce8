"""Files and flags set fields of dataclasses. One text documents a field, for `--help` and for the docstring."""

import ast
import copy
import importlib
import inspect
import os
import re
import sys
import textwrap
from dataclasses import MISSING, fields
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:  # a config of transformers, which follows in the list of bases
    from transformers import TrainingArguments as _Config
else:
    _Config = object


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


# -- What must not leave the machine ----------------------------------------------------------------------------------

_SECRET = re.compile(
    r"(token|passw(or)?ds?|passphrase|secrets?|credentials?|authorization|cookies?|signature"
    r"|(^|[_-])(auth|bearer|jwt|pass|pwd|sig)|(api|access|account|private|secret|auth|encryption|ssh)[_-]?keys?)$",
    re.IGNORECASE,
)
_HINT = re.compile(r"token|passw|passphrase|secret|credential|auth|cookie|key|://", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"(^|[_-])(bos|eos|pad|unk|sep|cls|mask|image|video|audio|stop|start|end|think)_token$", re.IGNORECASE
)
_USER = re.compile(r"(?<=://)[^/\s?#]*@")  # user and password in an address
_PARAMETER = re.compile(r"(?<=[?&;#])([\w.-]+)=[^&;\s#]*[&;]?")  # a parameter of an address


def is_secret(name: Any, value: Any = "") -> bool:
    """Return whether a setting of this name holds a token, a password or a key. `token: true` does not."""
    if not isinstance(name, str) or value is None or isinstance(value, bool):
        return False
    return _SECRET.search(name) is not None and _NO_SECRET.search(name) is None


def may_hold_secret(text: str) -> bool:
    """Return whether a text that no parser can read has the name of a secret in it, or an address."""
    return _HINT.search(text) is not None


def without_secrets(value: Any) -> Any:
    """Copy a setting without the tokens, passwords and keys of mappings in it, of addresses, and of the calls of
    `reward_funcs`. All else stays as it is."""
    if isinstance(value, dict):
        return {name: without_secrets(inner) for name, inner in value.items() if not is_secret(name, inner)}
    if type(value) in (list, tuple):
        return type(value)(map(without_secrets, value))
    if not isinstance(value, str):
        return value
    if "://" in value:
        value = _USER.sub("", value)
        value = _PARAMETER.sub(lambda found: "" if is_secret(found[1]) else found[0], value).rstrip("?&;#")
    return _call_without_secrets(value) if re.fullmatch(r"[\w.]+\(.*\)", value.strip(), re.DOTALL) else value


def _call_without_secrets(text: str) -> str:
    try:
        call: Any = ast.parse(text.strip(), mode="eval").body
        given = [ast.literal_eval(argument) for argument in call.args]
        named = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (AttributeError, SyntaxError, ValueError):
        return text
    kept = without_secrets(given), without_secrets(named)
    if kept == (given, named):
        return text
    arguments = [*map(repr, kept[0]), *(f"{name}={value!r}" for name, value in kept[1].items())]
    return f"{ast.unparse(call.func)}({', '.join(arguments)})"


class KeepsSecrets(_Config):
    """Mixin for a config of transformers: no pickle of it has its tokens and passwords, and no tracker gets them. A
    copy has them."""

    def __getstate__(self) -> dict[str, Any]:
        """The Trainer saves its config as `training_args.bin`, which a push uploads. A secret is `None` there."""
        state = vars(self).items()
        return {name: None if is_secret(name, value) else without_secrets(value) for name, value in state}

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]):
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Return the options for Weights & Biases and the like."""
        options = super().to_dict().items()  # transformers masks the names that end in `_token`
        return {name: None if is_secret(name, value) else without_secrets(value) for name, value in options}


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
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        found = next(iter(getattr(sys.modules.get(package), "__path__", [])), None)
        found = getattr(sys.modules.get(package), "__file__", None) or found
        own = [name for name in (f"{package}.py", package) if Path(here, name).exists()]
        if found is None or not own or Path(found).resolve().is_relative_to(Path(here).resolve()):
            raise
        # Another module has the name
        raise type(error)(f"{error}. {found} comes before {own[0]} of the working directory: rename yours") from error

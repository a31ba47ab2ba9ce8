"""Fields of dataclasses that files and flags set: one text documents a field, for `--help` and for the docstring."""

import textwrap
from dataclasses import MISSING, field, fields
from typing import Any


def setting(
    default: Any = MISSING, help: str = "", choices: list[str] | None = None, default_factory: Any = None
) -> Any:
    """A dataclass field with the text of its `--help`, and with the values that it may have."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def document(cls: type) -> type:
    """Class decorator: writes the fields that `cls` itself declares, with their help, into its docstring's `Args:`."""
    lines = []
    for option in fields(cls):
        if option.name not in cls.__annotations__ or not option.init:
            continue
        kind = option.type if isinstance(option.type, str) else getattr(option.type, "__name__", str(option.type))
        default = "" if option.default in (None, MISSING) else f", defaults to `{option.default!r}`"
        lines.append(f"    {option.name} (`{kind}`, *optional*{default}):")
        lines.append(textwrap.indent(textwrap.fill(option.metadata["help"].replace("%%", "%"), 112), " " * 8))
    cls.__doc__ = f"{textwrap.dedent(cls.__doc__ or '').strip()}\n\nArgs:\n" + "\n".join(lines) + "\n"
    return cls

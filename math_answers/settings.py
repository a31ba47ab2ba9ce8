"""setting(): a field of a dataclass that YAML files and flags fill."""

from dataclasses import MISSING, field
from typing import Any


def setting(
    default: Any = MISSING, help: str = "", choices: list[str] | None = None, default_factory: Any = MISSING
) -> Any:
    """A dataclass field with the text of its `--help`, and with the values that it may have."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, default_factory=default_factory, metadata=metadata)

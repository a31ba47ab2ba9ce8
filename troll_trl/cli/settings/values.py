"""convert(): a value of a YAML file, checked against the type hint of its field."""

import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin


def convert(value: Any, hint: Any) -> Any:
    """
    Check a YAML value against a type hint. Text that reads as a number is one where a number belongs, since YAML reads
    `1e-6` as text; nothing else changes its type.

    Args:
        value (`Any`):
            What YAML made of the file.
        hint (`Any`):
            Type hint of the field.

    Returns:
        `Any`: the value, of the type asked for.

    Raises:
        ValueError: "a number, got 'abc'"; the caller knows the name.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_to_one_of(value, arguments)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        choices = arguments or [member.value for member in hint]
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise ValueError(f"{_spoken(hint)}, {_seen(value)}")
        return value
    if hint in (int, float):
        return _convert_to_number(value, hint)
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{_spoken(hint)}, {_seen(value)}")
        return [convert(item, arguments[0]) for item in value]
    if not isinstance(value, origin or hint):
        raise ValueError(f"{_spoken(hint)}, {_seen(value)}")
    return value


def _convert_to_one_of(value: Any, hints: Sequence[Any]) -> Any:
    # `SchedulerType | str` means the names of a scheduler, not any text
    if any(isinstance(hint, type) and issubclass(hint, Enum) for hint in hints):
        hints = [hint for hint in hints if hint is not str]
    # The type that the value has comes before a type that it can be read as
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):
        try:
            return convert(value, hint)
        except ValueError:
            continue
    raise ValueError(f"{' or '.join(_spoken(hint) for hint in hints)}, {_seen(value)}")


def _convert_to_number(value: Any, hint: type) -> int | float:
    if isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"{_spoken(hint)}, {_seen(value)}") from None
    # To Python a boolean is an int
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        raise ValueError(f"{_spoken(hint)}, {_seen(value)}")
    return value


_SPOKEN = {
    bool: "true or false",
    dict: "a mapping",
    float: "a number",
    int: "a whole number",
    str: "text",
    types.NoneType: "null",
}


def _spoken(hint: Any) -> str:
    if get_origin(hint) is list:
        return f"a list (each {_spoken(get_args(hint)[0])})"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(member.value) for member in hint)}"
    return _SPOKEN.get(get_origin(hint) or hint, str(hint))


def _seen(value: Any) -> str:
    if isinstance(value, bool):
        return f"got {value!r} (YAML reads yes, no, on and off as booleans; quote them to mean the words)"
    return f"got {value!r}"

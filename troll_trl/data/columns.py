"""Columns by their names, in which a dot may reach into a nested column."""

from collections.abc import Mapping
from typing import Any


def column_value(row: Any, path: str) -> Any:
    """The value of a column in a row, or in the features of a dataset; `None` if there is no such column. If no column
    has this name, `a.b` is the column `b` of the nested column `a`."""
    if not isinstance(row, Mapping):
        return None
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    return column_value(row[head], rest) if dot and head in row else None

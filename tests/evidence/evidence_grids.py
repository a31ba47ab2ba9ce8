"""The grids of the study in evidence/, for its tests."""

import functools

from repository import ROOT

from evidence.grid import read_grid

EVIDENCE = ROOT / "evidence"


@functools.cache  # a long file takes PyYAML half a second
def grid_of(name):
    return read_grid(EVIDENCE / f"{name}.yaml")


def cells_of(table):
    """The texts of a markdown table, by row, without the header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


TASK = {"family": "sorting", "architecture": "llama", "start_success": 0.2, "train": 2048, "test": 64}

"""The table of lora.yaml."""

from collections.abc import Sequence
from itertools import product

from evidence.tables import (
    Record,
    Table,
    difference,
    markdown,
    mean,
    methods_of,
    percent,
    rates_of,
    select,
    signed,
    tasks_of,
)

STUDY, DROPOUT = "dropout", 0.05


def dropout(records: Sequence[Record]) -> str:
    """What LoRA's dropout of 0.05 does to either method: sums with Qwen3, LoRA of rank 16 on all layers."""
    rows = []
    cells = product(tasks_of(records, STUDY), methods_of(records, STUDY), rates_of(records, STUDY))
    for task, method, rate in cells:
        without, with_dropout = (
            select(records, STUDY, task, method, learning_rate=rate, lora_dropout=p) for p in (0.0, DROPOUT)
        )
        if not without.records or not with_dropout.records:
            continue  # not run yet
        areas = [percent(mean(cell, "area")) for cell in (without, with_dropout)]
        costs = [signed(*difference(with_dropout, without, key)) for key in ("area", "success")]
        rows.append([method, f"{rate:g}", str(len(with_dropout.records)), *areas, *costs])
    header = ["method", "learning rate", "seeds", "area without dropout %", "with 0.05 %", "difference in area"]
    return markdown([*header, "in success"], rows)


TABLES: dict[str, Table] = {"dropout": dropout}

"""The tables of age.yaml: how wide a bound, the more updates a rollout batch serves."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from evidence.grid import read_grid
from evidence.rate import RARE
from evidence.tables import Cell, Record, Table, markdown, points, pooled_difference, signed

AGES = (8, 16, 32)  # updates per rollout batch
GEOMETRIES = {"projection": "tuned projection", "clip": "clip", "tv": "mask, total variation", "kl": "mask, KL"}
RATE = 4e-4
TUNING_SEEDS, SEEDS = (102, 103), tuple(range(20, 30))
MARGIN = 0.02


class Runs:
    """The records by task, age, method and learning rate, then by seed. A method is a geometry with its bound."""

    def __init__(self, records: Iterable[Record]):
        self.cells: dict[tuple[str, int, str, float], dict[int, Record]] = {}
        for record in records:
            varied = record["varied"]
            key = record["task"], varied["steps_per_generation"], record["method"], varied["learning_rate"]
            self.cells.setdefault(key, {})[record["seed"]] = record

    def area(self, task: str, age: int, method: str) -> float | None:
        """Mean area of the tuning seeds; `None` until both exist."""
        runs = self.cells.get((task, age, method, RATE), {})
        if not all(seed in runs for seed in TUNING_SEEDS):
            return None
        return float(Cell([runs[seed] for seed in TUNING_SEEDS]).values("area").mean())

    def mean_area(self, age: int, methods: Sequence[str | None]) -> float | None:
        """Mean of `area` over the tasks, of one method each."""
        areas = [
            None if method is None else self.area(task, age, method) for task, method in zip(RARE, methods, strict=True)
        ]
        return None if None in areas else float(np.mean(np.array(areas, dtype=float)))

    def best(self, task: str, age: int, geometry: str) -> str | None:
        """The method of a geometry with the largest area; `None` until all of its bounds are run."""
        areas = {method: self.area(task, age, method) for method in bounds_of(geometry, age)}
        return None if None in areas.values() else max(areas, key=lambda method: areas[method] or 0.0)

    def exponent(self) -> int | None:
        """The rule's k, 1 or 2: it has the larger mean area at 16 and 32 updates."""
        areas = {(k, age): self.mean_area(age, [rule(age, k)] * len(RARE)) for k, age in product((1, 2), (16, 32))}
        if None in areas.values():
            return None
        return max((1, 2), key=lambda k: sum(areas[k, age] or 0.0 for age in (16, 32)))

    def pairs(self, age: int) -> list[tuple[Cell, Cell]]:
        """For each task the deciding runs of the tuned projection and of the rule, which may be the same."""
        found = []
        for task in RARE:
            deciding = {
                method: Cell([runs[seed] for seed in SEEDS])
                for (of_task, of_age, method, _), runs in self.cells.items()
                if (of_task, of_age) == (task, age) and all(seed in runs for seed in SEEDS)
            }
            of_rule = deciding.pop(rule(age), None)
            if of_rule is not None:
                found.append((next(iter(deciding.values()), of_rule), of_rule))
        return found


@cache
def bounds_of(geometry: str, age: int) -> list[str]:
    """The methods of a geometry that the grid tunes at this age."""
    study = read_grid(Path(__file__).with_name("age.yaml")).studies[f"bounds-{age}"]
    return [method for method in study.methods if method.partition("-")[0] == geometry]


def rule(age: int, k: int = 2) -> str:
    """The projection whose bound is 0.05·(n/8)^k."""
    return f"projection-{0.05 * (age / 8) ** k:g}"


def verdicts(records: Sequence[Record]) -> str:
    """The tuned projection minus the rule, on the deciding seeds, over the three tasks."""
    runs, rows = Runs(records), []
    for age in AGES:
        if len(pairs := runs.pairs(age)) == len(RARE):
            area, p_value = pooled_difference(pairs, "area")
            success = pooled_difference(pairs, "success")[0]
            rows.append([str(age), signed(area, p_value), points(success), "holds" if area.high < MARGIN else "fails"])
    return markdown(["updates", "area, points", "success, points", "the rule"], rows)


def best_bounds(records: Sequence[Record]) -> str:
    """Mean area in percent over the tasks at 4e-4, with each geometry's best bound on each task; tuning seeds."""
    runs = Runs(records)
    rows = {
        name: [runs.mean_area(age, [runs.best(task, age, geometry) for task in RARE]) for age in AGES]
        for geometry, name in GEOMETRIES.items()
    }
    rows |= {f"the rule, k = {k}": [runs.mean_area(age, [rule(age, k)] * len(RARE)) for age in AGES] for k in (1, 2)}
    texts = [[name, *("" if a is None else f"{100 * a:.1f}" for a in areas)] for name, areas in rows.items()]
    return markdown(["trust region", *(f"{age} updates" for age in AGES)], texts)


def tuning(records: Sequence[Record]) -> str:
    """Area in percent of every bound at 4e-4, mean of the two tuning seeds. The best bound of a geometry is bold."""
    runs, rows = Runs(records), []
    for age, geometry in product(AGES, GEOMETRIES):
        for method in bounds_of(geometry, age):
            areas = {task: area for task in RARE if (area := runs.area(task, age, method)) is not None}
            best = [task for task in areas if runs.best(task, age, geometry) == method]
            texts = {task: f"**{100 * a:.1f}**" if task in best else f"{100 * a:.1f}" for task, a in areas.items()}
            rows += [[str(age), method, *(texts.get(task, "") for task in RARE)]] if areas else []
    return markdown(["updates per rollout batch", "geometry and bound", *RARE], rows)


TABLES: dict[str, Table] = {"verdicts": verdicts, "best-bounds": best_bounds, "tuning": tuning}

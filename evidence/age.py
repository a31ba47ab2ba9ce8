"""
The choices, tables and verdicts of age.yaml. As a command, the studies that come next, as YAML for that file:

    python -m evidence.age
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evidence.grid import read_grid
from evidence.results import read_records
from evidence.tables import Cell, Record, Table, markdown, mean, percent, points, pooled_difference, signed

RARE = ("label-2", "sorting-label-2", "steps-2")
COMMON = ("common", "common-equations", "common-sorting")
AGES, COMMON_AGES = (8, 16, 32), (8, 32)  # updates per rollout batch
GEOMETRIES = {"projection": "tuned projection", "clip": "clip", "tv": "mask, total variation", "kl": "mask, KL"}
LABELS = {"rule": "TROLL, the rule", **GEOMETRIES, "none": "no limits"}
OTHERS = ("clip", "tv", "kl")
RATE, OTHER_RATES, EDGES = 4e-4, (2e-4, 8e-4), {2e-4: 1e-4, 8e-4: 1.6e-3}
TUNING_SEEDS, SEEDS = (102, 103), tuple(range(20, 30))
MARGIN, SUCCESS_MARGIN = 0.02, -0.03


class Choice(NamedTuple):
    """A method of age.yaml, that is a geometry with its bound, and a learning rate."""

    method: str
    rate: float


class Runs:
    """The records by task, age, method, learning rate and seed."""

    def __init__(self, records: Iterable[Record]):
        self._records: dict[tuple[str, int, str, float], dict[int, Record]] = {}
        for record in records:
            varied = record["varied"]
            key = record["task"], varied["steps_per_generation"], record["method"], varied["learning_rate"]
            self._records.setdefault(key, {})[record["seed"]] = record

    def cell(self, task: str, age: int, choice: Choice, seeds: Sequence[int] = SEEDS) -> Cell | None:
        """The runs of these seeds; `None` until all of them exist."""
        runs = self._records.get((task, age, *choice), {})
        return Cell([runs[seed] for seed in seeds]) if all(seed in runs for seed in seeds) else None

    def area(self, task: str, age: int, choice: Choice) -> float | None:
        """Mean area of the tuning seeds."""
        cell = self.cell(task, age, choice, TUNING_SEEDS)
        return None if cell is None else float(cell.values("area").mean())

    # -- What the tuning chooses ----------------------------------------------------------------------------------

    def exponent(self) -> int | None:
        """The rule's k, 1 or 2: it has the larger mean area over the rare tasks at 16 and 32 updates."""
        areas = {k: self.mean_area((t, age, rule(age, k)) for t, age in product(RARE, (16, 32))) for k in (1, 2)}
        return None if None in areas.values() else max(areas, key=lambda k: areas[k] or 0.0)

    def mean_area(self, cells: Iterable[tuple[str, int, str]]) -> float | None:
        """Mean of `area` at `RATE` over cells (task, age, method); `None` until all of them are run."""
        areas = [self.area(task, age, Choice(method, RATE)) for task, age, method in cells]
        return None if None in areas else float(np.mean(np.array(areas, dtype=float)))

    def best_bounds(self, task: str, age: int, geometry: str) -> list[str]:
        """The methods of a geometry by their area at `RATE`, the best first; none until all bounds are run."""
        areas = {method: self.area(task, age, Choice(method, RATE)) for method in bounds_of(geometry, age)}
        known = {method: area for method, area in areas.items() if area is not None}
        return sorted(known, key=lambda method: -known[method]) if len(known) == len(areas) else []

    def common_bound(self, age: int, geometry: str) -> str | None:
        """The method of a geometry with the best mean area over the rare tasks."""
        means = {m: self.mean_area((task, age, m) for task in RARE) for m in bounds_of(geometry, age)}
        known = {method: area for method, area in means.items() if area is not None}
        return max(known, key=lambda method: known[method]) if len(known) == len(means) else None

    def candidates(self, task: str, age: int, name: str) -> list[str]:
        """The methods whose rates are tuned: the rule's one, a geometry's best two, or one on common tasks."""
        k = self.exponent()
        if name == "none":
            return ["none"]
        if name == "rule":
            return [] if k is None else [rule(age, k)]
        if task in COMMON:
            bound = self.common_bound(age, name)
            return [] if bound is None else [bound]
        return self.best_bounds(task, age, name)[:2]

    def choice(self, task: str, age: int, name: str) -> Choice | None:
        """The candidate and rate with the largest area; `None` until the tuning is complete, edges included."""
        areas = self._tuned(task, age, name)
        if areas is None:
            return None
        best = max(sorted(areas), key=lambda choice: areas[choice])
        beyond = EDGES.get(best.rate)
        return None if beyond is not None and Choice(best.method, beyond) not in areas else best

    def _tuned(self, task: str, age: int, name: str) -> dict[Choice, float] | None:
        candidates = self.candidates(task, age, name)
        required = [Choice(method, rate) for method, rate in product(candidates, (RATE, *OTHER_RATES))]
        every = required + [Choice(method, rate) for method, rate in product(candidates, EDGES.values())]
        areas = {choice: area for choice in every if (area := self.area(task, age, choice)) is not None}
        return areas if required and all(choice in areas for choice in required) else None

    def cells(self, tasks: Sequence[str], age: int, name: str) -> list[Cell] | None:
        """The deciding runs of the rule, or of a geometry's choice, on every task; `None` until all exist."""
        chosen = [(task, self.choice(task, age, name)) for task in tasks]
        cells = [None if choice is None else self.cell(task, age, choice) for task, choice in chosen]
        there = [cell for cell in cells if cell is not None]
        return there if len(there) == len(tasks) else None

    def edge(self, task: str, age: int, name: str) -> Choice | None:
        """The additional rate that a choice at the edge of the rates gets."""
        areas = self._tuned(task, age, name)
        if areas is None:
            return None
        best = max(sorted(areas), key=lambda choice: areas[choice])
        beyond = Choice(best.method, EDGES.get(best.rate, best.rate))
        return None if beyond in areas else beyond


@cache
def bounds_of(geometry: str, age: int) -> list[str]:
    """The methods of a geometry that the grid tunes at this age."""
    study = read_grid(Path(__file__).with_name("age.yaml")).studies[f"bounds-{age}"]
    return [method for method in study.methods if method.partition("-")[0] == geometry]


def rule(age: int, k: int) -> str:
    """The projection whose bound is 0.05·(n/8)^k."""
    return f"projection-{0.05 * (age / 8) ** k:g}"


# -- The studies that come next ---------------------------------------------------------------------------------------


Cells = dict[tuple[str, int, str], tuple[float, ...]]  # learning rates by task, age and method


def next_studies(runs: Runs) -> str:
    """YAML of the studies whose cells follow from the runs so far."""
    texts, cells = [], Cells()
    rare, common = list(product(RARE, AGES)), list(product(COMMON, COMMON_AGES))
    for age in reversed(AGES):
        cells = {
            (task, age, method): OTHER_RATES
            for task, name in product(RARE, ("rule", *GEOMETRIES))
            for method in runs.candidates(task, age, name)
        }
        texts.append(study_text(f"rates-{age}", TUNING_SEEDS, cells))
    cells = {
        (task, age, method): (RATE, *OTHER_RATES)
        for (task, age), name in product(common, ("rule", *OTHERS))
        for method in runs.candidates(task, age, name)
    }
    texts.append(study_text("rates-common", TUNING_SEEDS, cells))
    texts.append(study_text("rates-none", TUNING_SEEDS, {(task, 32, "none"): (RATE, *OTHER_RATES) for task in RARE}))
    judged = [*product(rare, ("rule", *GEOMETRIES)), *product(common, ("rule", *OTHERS))]
    judged += [((task, 32), "none") for task in RARE]
    edges = {((task, age), name): runs.edge(task, age, name) for (task, age), name in judged}
    cells = {(*place, edge.method): (edge.rate,) for (place, _), edge in edges.items() if edge is not None}
    texts.append(study_text("rates-edge", TUNING_SEEDS, cells))
    for title, chosen in (("rare", rare), ("common", common)):
        for age in reversed(AGES):
            cells = {}
            for place, name in judged:
                if place in chosen and place[1] == age and (choice := runs.choice(*place, name)) is not None:
                    cells[*place, choice.method] = (*cells.get((*place, choice.method), ()), choice.rate)
            texts.append(study_text(f"deciding-{title}-{age}", SEEDS, cells))
    return "\n".join(text for text in texts if text)


def study_text(name: str, seeds: Sequence[int], cells: Cells) -> str:
    rows = [
        f"      - {{task: {task}, method: {method}, steps_per_generation: [{age}], learning_rate: "
        f"[{', '.join(f'{rate:.1e}' for rate in dict.fromkeys(rates))}]}}"
        for (task, age, method), rates in cells.items()
    ]
    return "\n".join([f"  {name}:", f"    seeds: {list(seeds)}", "    cells:", *rows]) if rows else ""


# -- Tables -----------------------------------------------------------------------------------------------------------


def tuning(records: Sequence[Record]) -> str:
    """Area in percent of every bound at 4e-4, mean of the two tuning seeds. The best bound of a geometry is bold."""
    runs, rows = Runs(records), []
    for age, geometry in product(AGES, GEOMETRIES):
        for method in bounds_of(geometry, age):
            areas = {task: runs.area(task, age, Choice(method, RATE)) for task in RARE}
            if any(area is not None for area in areas.values()):
                best = {task: runs.best_bounds(task, age, geometry)[:1] == [method] for task in RARE}
                texts = ["" if (a := areas[t]) is None else f"{100 * a:.1f}" for t in RARE]
                bold = [f"**{x}**" if best[task] else x for task, x in zip(RARE, texts, strict=True)]
                rows.append([str(age), method, *bold])
    return markdown(["updates per rollout batch", "geometry and bound", *RARE], rows)


def best_bounds(records: Sequence[Record]) -> str:
    """Mean area in percent over the rare tasks at 4e-4, with each geometry's best bound on each task; tuning seeds."""
    runs, rows = Runs(records), []
    for geometry, name in GEOMETRIES.items():
        best = {age: [runs.best_bounds(task, age, geometry)[:1] for task in RARE] for age in AGES}
        if all(all(methods) for methods in best.values()):
            areas = [_mean(runs, age, [method for (method,) in best[age]]) for age in AGES]
            rows.append([name, *areas])
    for k in (1, 2):
        rows.append([f"the rule, k = {k}", *(_mean(runs, age, [rule(age, k)] * len(RARE)) for age in AGES)])
    return markdown(["trust region", *(f"{age} updates" for age in AGES)], rows)


def _mean(runs: Runs, age: int, methods: Sequence[str]) -> str:
    area = runs.mean_area(zip(RARE, [age] * len(RARE), methods, strict=True))
    return "" if area is None else f"{100 * area:.1f}"


def choices(records: Sequence[Record]) -> str:
    """The bound and the learning rate of the rule and of every geometry on the deciding seeds."""
    runs, rows = Runs(records), []
    for task, age in (*product(RARE, AGES), *product(COMMON, COMMON_AGES)):
        names = ("rule", *(GEOMETRIES if task in RARE else OTHERS))
        found = {name: runs.choice(task, age, name) for name in names}
        if any(found.values()):
            texts = {name: "" if c is None else f"{c.method} at {c.rate:g}" for name, c in found.items()}
            rows.append([task, str(age), *(texts.get(name, "") for name in ("rule", *GEOMETRIES))])
    return markdown(["task", "updates", "rule", *GEOMETRIES.values()], rows)


def _pairs(runs: Runs, tasks: Sequence[str], age: int, name: str, other: str) -> list[tuple[Cell, Cell]] | None:
    """The cells of both on every task; `None` until all runs exist."""
    cells, others = runs.cells(tasks, age, name), runs.cells(tasks, age, other)
    return None if cells is None or others is None else list(zip(cells, others, strict=True))


def verdicts(records: Sequence[Record]) -> str:
    """The statements of age.yaml, and the verdict on each of them once all of its runs exist."""
    runs, rows = Runs(records), []
    for age, other in product((16, 32), OTHERS):
        name = f"1. {age} updates, rare: TROLL minus {GEOMETRIES[other]}"
        rows.append([name, *_judge(_pairs(runs, RARE, age, "rule", other), leads=True)])
    for age in AGES:
        name = f"2. {age} updates, rare: tuned projection minus TROLL"
        rows.append([name, *_judge(_pairs(runs, RARE, age, "projection", "rule"), leads=False)])
    for age, other in product(COMMON_AGES, OTHERS):
        name = f"3. {age} updates, common: {GEOMETRIES[other]} minus TROLL"
        rows.append([name, *_judge(_pairs(runs, COMMON, age, other, "rule"), leads=False)])
    return markdown(["statement", "area, points", "success, points", "verdict"], rows)


def first_statement(records: Sequence[Record]) -> str:
    """Statement 1 of age.yaml, and the verdict on it against each other trust region."""
    head, line, *rows = verdicts(records).splitlines()
    return "\n".join([head, line, *(row for row in rows if row.startswith("| 1. "))])


def _judge(pairs: list[tuple[Cell, Cell]] | None, leads: bool) -> list[str]:
    if pairs is None:
        return ["not run yet", "", ""]
    (area, p_value), (success, _) = pooled_difference(pairs, "area"), pooled_difference(pairs, "success")
    ahead = area.value >= MARGIN and p_value < 0.01 and success.low > SUCCESS_MARGIN
    holds = ahead if leads else area.high < MARGIN
    return [signed(area, p_value), points(success), "holds" if holds else "fails"]


def costs(records: Sequence[Record]) -> str:
    """Statement 4, reported only: 32 updates per rollout batch minus 8, for the rule and each geometry's choice."""
    runs, rows = Runs(records), []
    for tasks, where in ((RARE, "rare"), (COMMON, "common")):
        for name in ("rule", *(GEOMETRIES if tasks == RARE else OTHERS)):
            old, young = runs.cells(tasks, 32, name), runs.cells(tasks, 8, name)
            if old is not None and young is not None:
                pairs = list(zip(old, young, strict=True))
                lost = [points(pooled_difference(pairs, key)[0]) for key in ("area", "success")]
                rows.append([where, LABELS[name], *lost])
    return markdown(["tasks", "trust region", "area, points", "success, points"], rows)


def by_age(records: Sequence[Record]) -> str:
    """Area and success of the rule and of each geometry's choice on the deciding seeds."""
    runs, rows = Runs(records), []
    for task, name, age in product((*RARE, *COMMON), LABELS, AGES):
        choice = runs.choice(task, age, name)
        cell = None if choice is None else runs.cell(task, age, choice)
        if choice is not None and cell is not None:
            chosen = f"{choice.method} at {choice.rate:g}"
            rows.append(
                [task, str(age), LABELS[name], chosen, percent(mean(cell, "area")), percent(mean(cell, "success"))]
            )
    return markdown(["task", "updates", "trust region", "bound and rate", "area %", "success %"], rows)


TABLES: dict[str, Table] = {
    "verdicts": verdicts,
    "first-statement": first_statement,
    "costs": costs,
    "by-age": by_age,
    "choices": choices,
    "best-bounds": best_bounds,
    "tuning": tuning,
}


def main() -> None:
    records = read_records(Path(__file__).with_name("results") / "age.jsonl")
    runs = Runs(records)
    print(f"# {len(records)} runs; k = {runs.exponent() or 'not chosen yet'}\n{next_studies(runs)}")


if __name__ == "__main__":
    main()

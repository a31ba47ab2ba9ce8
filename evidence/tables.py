"""What the tables of the study share: cells of runs, paired differences, and one table that compares methods."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from evidence.results import DEFAULTS
from math_answers.evaluation.statistics import Estimate, estimate, smallest_p_value
from math_answers.evaluation.tables import markdown

Record = dict[str, Any]
Table = Callable[[Sequence[Record]], str]  # markdown; its docstring is the caption
RESAMPLES = 10_000
FLIPS = 1 << 18  # of signs: all of them for up to 18 pairs; for more pairs this number is drawn


@dataclass(frozen=True)
class Cell:
    """The runs of one task, method and setting, over seeds."""

    records: Sequence[Record]

    def by_seed(self, key: str) -> dict[int, float]:
        """The value of every run that logged it. A run that failed has a success and an area of 0."""
        failed = {"success": 0.0, "area": 0.0}
        values = {r["seed"]: (failed if "error" in r else r).get(key) for r in self.records}
        return {seed: value for seed, value in values.items() if value is not None}

    def values(self, key: str) -> np.ndarray:
        """`(seeds,)`, as [`by_seed`]."""
        return np.array(list(self.by_seed(key).values()), dtype=float)

    @property
    def collapses(self) -> int:
        """Runs that failed, or whose curve ends below its start."""
        return sum("error" in record or record["curve"][-1][1] < record["start"] for record in self.records)


def select(records: Iterable[Record], study: str, task: str, method: str, **varied: Any) -> Cell:
    """The runs of a study's cell. `varied` names every setting that differs from the defaults, or the learning rate."""
    chosen = []
    for record in records:
        of_run = {key: value for key, value in record["varied"].items() if key != "learning_rate" or key in varied}
        same = DEFAULTS | of_run == DEFAULTS | varied
        if study in record["studies"] and (record["task"], record["method"]) == (task, method) and same:
            chosen.append(record)
    return Cell(chosen)


def difference(cell: Cell, other: Cell, key: str = "success") -> tuple[Estimate, float]:
    """
    The difference `cell − other`, paired by seed.

    Returns:
        Its mean with a 95 % bootstrap interval over seeds, and the two-sided p-value of the test that flips signs. With
        n pairs the p-value is at least 2/2ⁿ. For more than 18 pairs it is estimated, and at least that of
        [`smallest_p_value`].
    """
    return pooled_difference([(cell, other)], key)


def pooled_difference(pairs: Iterable[tuple[Cell, Cell]], key: str = "success") -> tuple[Estimate, float]:
    """As [`difference`], over several tasks of the same weight; seeds are drawn within each."""
    groups = [_differences_by_seed(cell, other, key) for cell, other in pairs]
    values = np.concatenate([group / len(group) for group in groups])  # every task has the same weight
    # Equal sums must stay equal in any order. Successes are counts: none lies halfway between two multiples of π
    total = lambda x, axis: (x.sum(axis=axis) * 1e12 / np.pi).round()
    settings = {"permutation_type": "samples", "n_resamples": FLIPS, "batch": 1 << 12, "rng": 0}
    one_pair = len(values) == 1  # scipy refuses a single pair, and its flip is as large
    p_value = 1.0 if one_pair else float(scipy.stats.permutation_test((values,), total, **settings).pvalue)
    return estimate([group[:, None] for group in groups], RESAMPLES, seed=0)[0], p_value


def _differences_by_seed(cell: Cell, other: Cell, key: str) -> np.ndarray:
    """`(seeds,)`: the seeds that both cells have."""
    a, b = cell.by_seed(key), other.by_seed(key)
    return np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def mean(cell: Cell, key: str) -> Estimate:
    """Mean over seeds with its 95 % bootstrap interval."""
    return estimate([cell.values(key)[:, None]], RESAMPLES, seed=0)[0]


# -- How numbers are written ------------------------------------------------------------------------------------------


def percent(value: Estimate) -> str:
    return f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def points(value: Estimate) -> str:
    return f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def signed(value: Estimate, p_value: float) -> str:
    sign = "<" if p_value <= smallest_p_value(FLIPS) else "="  # no exact test of 18 pairs or less is as low
    return f"{points(value)}, p {sign} {p_value:.2g}"


# -- Methods next to each other ---------------------------------------------------------------------------------------


def compare(
    caption: str, study: str, fixed: str, of_fixed: bool = False, pooled: bool = False, own_rates: bool = False
) -> Table:
    """
    A table of area and success of every method of a study, and its lead over one of them.

    Args:
        caption (`str`):
            What the table shows.
        study (`str`):
            Name of the study.
        fixed (`str`):
            The method that the others are compared with.
        of_fixed (`bool`, *optional*, defaults to `False`):
            Show the lead of `fixed` over the others in place of theirs over `fixed`.
        pooled (`bool`, *optional*, defaults to `False`):
            Add a row for all tasks together.
        own_rates (`bool`, *optional*, defaults to `False`):
            Compare methods of different learning rates. By default only methods of one learning rate are compared.
    """

    def table(records: Sequence[Record]) -> str:
        return compare_records(records_of(records, study), fixed, of_fixed, pooled, own_rates)

    table.__doc__ = caption
    return table


def compare_records(
    records: Sequence[Record], fixed: str, of_fixed: bool = False, pooled: bool = False, own_rates: bool = False
) -> str:
    """As [`compare`], of these records. Only seeds that all compared methods have are used."""
    rows, pairs = [], defaultdict(list)
    for name, at in _compared_cells(records, own_rates):
        seeds = set.intersection(*(set(cell.by_seed("area")) for cell in at.values()))
        cells = {m: Cell([r for r in cell.records if r["seed"] in seeds]) for m, cell in at.items()}
        for method, cell in cells.items():
            leads = ["", ""]
            if method != fixed and fixed in cells:
                pair = (cells[fixed], cell) if of_fixed else (cell, cells[fixed])
                leads = [signed(*difference(*pair, key)) for key in ("area", "success")]
                pairs[method].append(pair)
            means = [percent(mean(cell, key)) for key in ("area", "success")]
            rate = f"{cell.records[0]['varied']['learning_rate']:g}"
            rows.append([name, rate, method, str(len(cell.records)), *means, *leads])
    for method, of_method in pairs.items():
        if pooled and len(of_method) > 1:
            leads = [signed(*pooled_difference(of_method, key)) for key in ("area", "success")]
            rows.append([f"all {len(of_method)}", "", method, "", "", "", *leads])
    header = ["task", "learning rate", "method", "seeds", "area %", "success %"]
    lead = f"{fixed} minus this" if of_fixed else f"this minus {fixed}"
    return markdown([*header, f"{lead}, area", "success"], rows)


def _compared_cells(records: Sequence[Record], own_rates: bool) -> list[tuple[str, dict[str, Cell]]]:
    """
    The cells that are compared, by method, with the name of their task. They share the number of updates per rollout
    batch and, unless `own_rates`, the learning rate.
    """
    updates_of = lambda record: (DEFAULTS | record["varied"])["steps_per_generation"]
    tasks = list(dict.fromkeys(record["task"] for record in records))
    rate_of = lambda record: 0.0 if own_rates else record["varied"]["learning_rate"]
    place = lambda record: (tasks.index(record["task"]), rate_of(record), updates_of(record))
    cells: dict[tuple[int, float, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=place):
        cells[place(record)][record["method"]].append(record)
    several = len({updates for _, _, updates in cells}) > 1
    names = {at: tasks[at[0]] + (f", {at[2]} updates" if several else "") for at in cells}
    return [(names[at], {method: Cell(of) for method, of in by.items()}) for at, by in cells.items()]


# -- What a study has -------------------------------------------------------------------------------------------------


def records_of(records: Iterable[Record], study: str) -> list[Record]:
    return [record for record in records if study in record["studies"]]


def methods_of(records: Iterable[Record], study: str) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in records_of(records, study)))


def rates_of(records: Iterable[Record], study: str) -> list[float]:
    return sorted({record["varied"]["learning_rate"] for record in records_of(records, study)})


def tasks_of(records: Iterable[Record], study: str) -> list[str]:
    return list(dict.fromkeys(record["task"] for record in records_of(records, study)))


# -- Tables of the studies that need no module of their own -----------------------------------------------------------

COMMON_TABLES: dict[str, Table] = {
    "common": compare(
        "About a third of the samples is right at the start. Each method has a tuned learning rate.",
        "common",
        "clip",
        pooled=True,
        own_rates=True,
    )
}


def every_gsm8k_run(records: Sequence[Record]) -> str:
    """
    Every run. *success* is the share of right answers after training, in two samples of each held-out problem. A run
    whose time was up has none. Seconds are an update's, next to the other runs on the GPU: with the generation, and of
    the updates that no generation precedes.
    """
    share = lambda value: "" if value is None else f"{100 * value:.1f}"
    number = lambda value, form: "" if value is None else format(value, form)
    rows = []
    for record in sorted(records, key=lambda record: (record["varied"]["learning_rate"], record["seed"])):
        curve = record.get("curve", [])
        rows.append(
            [
                record["method"],
                f"{record['varied']['learning_rate']:g}",
                " ".join(f"{share(height)} at {step}" for step, height in curve),
                record.get("error") or share(record.get("success")),
                number(record.get("length"), ".0f"),
                number(record.get("seconds_per_update"), ".2f"),
                number(record.get("seconds_without_generation"), ".2f"),
            ]
        )
    header = ["method", "learning rate", "held-out % at update", "success %", "length at the end", "s an update"]
    return markdown([*header, "without generation"], rows)


GSM8K_TABLES: dict[str, Table] = {"runs": every_gsm8k_run}

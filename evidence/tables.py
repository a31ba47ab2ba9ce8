"""What the tables of the study share: cells of runs, paired differences, and one table that compares methods."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from math_answers.evaluation.statistics import Estimate, estimate, smallest_p_value

Record = dict[str, Any]
Table = Callable[[Sequence[Record]], str]  # markdown; its docstring is the caption
RESAMPLES = 10_000
FLIPS = 1 << 18  # of signs: all of them for up to 18 pairs; for more pairs this number is drawn


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table, whose cells are markdown already: those of an evaluation, which are not, would be escaped."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


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


# -- What a study has -------------------------------------------------------------------------------------------------


def records_of(records: Iterable[Record], study: str) -> list[Record]:
    return [record for record in records if study in record["studies"]]


def tasks_of(records: Iterable[Record], study: str) -> list[str]:
    return list(dict.fromkeys(record["task"] for record in records_of(records, study)))


# -- The table of the study that needs no module of its own ------------------------------------------------------------


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

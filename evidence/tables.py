"""The tables of the study, from the records of its runs. README.md holds what these functions return."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from evidence.grid import tuned_rates
from evidence.results import DEFAULTS, read_records
from troll_trl.evaluation.statistics import Estimate, estimate, smallest_p_value
from troll_trl.evaluation.tables import markdown

Record = dict[str, Any]
RESAMPLES = 10_000
FLIPS = 1 << 18  # of signs: all of them for up to 18 pairs, of more pairs so many are drawn
STALENESS = (1, 2, 4, 8, 16, 32)  # updates per rollout batch
ESTIMATORS = {
    "GRPO": "architectures",
    "Dr.GRPO (its loss, advantages not divided)": "dr-grpo",
    "GSPO (ratio of a completion, `grpo` loss)": "gspo",
    "RLOO (ratio of a completion)": "rloo",
}
SYMBOLS = {"kl_bound": "ε", "regression_coef": "α", "support_size": "K"}
COMPARED = (
    "headline",
    "more-seeds",
    "equal-rate",
    "high-rate",
    "highest-rate",
    "long",
    "long-equal-rate",
    "completions",
)
POOLED = (
    "headline",
    "more-seeds",
    "headline + more-seeds",
    "equal-rate",
    "high-rate",
    "other-seeds",
    "high-rate + other-seeds",
    "highest-rate",
    "long",
    "long-equal-rate",
)
METHODS = ("troll", "clip", "clip-higher", "none", "cispo", "sapo")


@dataclass(frozen=True)
class Cell:
    """The runs of one task, method and setting, over seeds."""

    records: Sequence[Record]

    def __bool__(self) -> bool:
        return bool(self.records)

    def by_seed(self, key: str) -> dict[int, float]:
        """Of the runs that logged it; one that failed has a success and an area of 0."""
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
    """The runs of a study's cell; `varied` names what must be so, defaults included, and nothing else may be varied."""
    chosen = []
    for record in records:
        of_run = {key: value for key, value in record["varied"].items() if key != "learning_rate" or key in varied}
        same = DEFAULTS | of_run == DEFAULTS | varied
        if study in record["studies"] and (record["task"], record["method"]) == (task, method) and same:
            chosen.append(record)
    return Cell(chosen)


def at_staleness(records: Sequence[Record], task: str, method: str, updates: int) -> Cell:
    """The runs of so many updates per rollout batch; the default's are in the headline."""
    study = "headline" if updates == DEFAULTS["steps_per_generation"] else "staleness"
    return select(records, study, task, method, steps_per_generation=updates)


def difference(cell: Cell, other: Cell, key: str = "success") -> tuple[Estimate, float]:
    """
    The difference `cell − other` paired by seed: its mean with a 95 % bootstrap interval over seeds, and the two-sided
    p-value of the test that flips signs, which with n pairs is at least 2/2ⁿ; of more than 18 pairs it is estimated,
    and at least that of [`smallest_p_value`].
    """
    return pooled_difference([(cell, other)], key)


def pooled_difference(pairs: Iterable[tuple[Cell, Cell]], key: str = "success") -> tuple[Estimate, float]:
    """As [`difference`], over several tasks of the same weight; seeds are drawn within each."""
    groups = [_differences_by_seed(cell, other, key) for cell, other in pairs]
    values = np.concatenate([group / len(group) for group in groups])  # every task has the same weight
    # Equal sums are to stay equal, whatever their order. Of successes, which are counts, none lies halfway between two
    # multiples of π
    total = lambda x, axis: (x.sum(axis=axis) * 1e12 / np.pi).round()
    settings = {"permutation_type": "samples", "n_resamples": FLIPS, "batch": 1 << 12, "rng": 0}
    one_pair = len(values) == 1  # which scipy refuses, and whose flip is as large
    p_value = 1.0 if one_pair else float(scipy.stats.permutation_test((values,), total, **settings).pvalue)
    return estimate([group[:, None] for group in groups], RESAMPLES, seed=0)[0], p_value


def _differences_by_seed(cell: Cell, other: Cell, key: str) -> np.ndarray:
    """`(seeds,)`, of those that both have."""
    a, b = cell.by_seed(key), other.by_seed(key)
    return np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def mean(cell: Cell, key: str) -> Estimate:
    """Mean over seeds with its 95 % bootstrap interval."""
    return estimate([cell.values(key)[:, None]], RESAMPLES, seed=0)[0]


def next_run(cell: Cell, key: str = "success") -> tuple[float, float]:
    """In which one run with another seed falls, in 95 of 100 such studies: Student's t, of a normal distribution."""
    values = cell.values(key)
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / len(values))
    return max(0.0, values.mean() - half), min(1.0, values.mean() + half)


# -- How numbers are written ------------------------------------------------------------------------------------------


def percent(value: Estimate) -> str:
    return f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def success(cell: Cell) -> str:
    """Mean, its interval, and in brackets where one more seed should fall."""
    low, high = next_run(cell)
    return f"{percent(mean(cell, 'success'))} ({100 * low:.0f}–{100 * high:.0f})"


def signed(value: Estimate, p_value: float) -> str:
    sign = "<" if p_value <= smallest_p_value(FLIPS) else "="  # no exact test of 18 pairs or less is as low
    return f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}], p {sign} {p_value:.2g}"


def _number(cell: Cell, key: str, form: str, combine: Callable[[np.ndarray], float] = np.mean) -> str:
    values = cell.values(key)
    return format(combine(values), form) if len(values) else ""


# -- Tables -----------------------------------------------------------------------------------------------------------


def tuning(records: Sequence[Record]) -> str:
    """Area under the curve of each method at each learning rate; the one that is taken is bold."""
    rates, taken, rows = rates_of(records, "tuning"), tuned_rates(records, ["tuning"]), []
    for task, method in product(tasks_of(records, "tuning"), methods_of(records, "tuning")):
        cells = [select(records, "tuning", task, method, learning_rate=rate) for rate in rates]
        areas = [f"{100 * cell.values('area').mean():.1f}" for cell in cells]
        best = rates.index(taken[task, method])
        areas[best] = f"**{areas[best]}**"
        rows.append([task, method, *areas])
    return markdown(["task", "method", *(f"{rate:g}" for rate in rates)], rows)


def comparison(records: Sequence[Record], study: str) -> str:
    """Every method on every task against clip."""
    settings, rows = settings_of(records, study), []
    for task, method in product(tasks_of(records, study), methods_of(records, study)):
        cell, clip = (select(records, study, task, m, **settings) for m in (method, "clip"))
        rate = {record["varied"]["learning_rate"] for record in cell.records}
        rows.append(
            [
                task,
                method,
                "/".join(f"{r:g}" for r in sorted(rate)),
                _number(cell, "start", ".1%"),
                success(cell),
                "" if method == "clip" else signed(*difference(cell, clip)),
                percent(mean(cell, "area")),
                _number(cell, "entropy", ".2f"),
                f"{cell.collapses} of {len(cell.records)}",
            ]
        )
    header = ["task", "method", "rate", "start", "success %", "less clip, points", "area %", "entropy"]
    return markdown([*header, "collapsed"], rows)


def pooled(records: Sequence[Record], studies: Sequence[str]) -> str:
    """TROLL less each other method over all tasks, in success and in area; of `study + other` the seeds of both."""
    rows = []
    for study, method in product(studies, METHODS[1:]):
        parts = study.split(" + ")
        settings, tasks = settings_of(records, parts[0]), tasks_of(records, parts[0])
        troll, other = (
            [Cell([r for part in parts for r in select(records, part, task, m, **settings).records]) for task in tasks]
            for m in ("troll", method)
        )
        if all(len(a.records) == len(b.records) for a, b in zip(troll, other, strict=True)):
            texts = [signed(*pooled_difference(zip(troll, other, strict=True), key)) for key in ("success", "area")]
            rows.append([study, method, str(sum(len(cell.records) for cell in troll)), *texts])
    return markdown(["study", "TROLL less", "seeds", "success, points", "area, points"], rows)


def repaired(records: Sequence[Record]) -> str:
    """
    TROLL less clip by the code of `cpu.yaml`'s runs and by that of `repaired.yaml`'s, at the same learning rates and at
    those that the repaired code's own tuning chooses.
    """
    before = read_records(Path(__file__).with_name("results") / "cpu.jsonl")
    of = lambda found, *studies: [r for r in found if not set(studies).isdisjoint(r["studies"])]
    tasks, rows = ["sums", "equations", "sorting"], []
    codes = {
        "before": of(before, "headline", "more-seeds"),
        "repaired": of(records, *tasks, "sums-clip"),
        "repaired, tuned anew": of(records, "tuned"),
    }
    for names in [*([task] for task in tasks), tasks]:
        for code, found in codes.items():
            pairs = [
                (
                    Cell([r for r in found if (r["task"], r["method"]) == (task, "troll")]),
                    Cell([r for r in found if (r["task"], r["method"]) == (task, "clip")]),
                )
                for task in names
            ]
            if any(len(troll.records) != len(clip.records) or not clip.records for troll, clip in pairs):
                continue  # not all of them are run yet
            start, troll, clip = (
                f"{100 * np.mean([cell.values(key).mean() for cell in cells]):.1f}"
                for key, cells in (
                    ("start", [troll for troll, _ in pairs]),
                    ("area", [troll for troll, _ in pairs]),
                    ("area", [clip for _, clip in pairs]),
                )
            )
            texts = [signed(*pooled_difference(pairs, key)) for key in ("success", "area")]
            name = names[0] if len(names) == 1 else "all"
            rows.append([name, code, str(sum(len(troll.records) for troll, _ in pairs)), start, troll, clip, *texts])
    header = ["task", "code", "seeds", "start %", "area, TROLL %", "area, clip %", "success, points", "area, points"]
    return markdown(header, rows)


def staleness(records: Sequence[Record]) -> str:
    """Success against updates per rollout batch; 8 is in the headline."""
    (task,) = tasks_of(records, "staleness")
    methods, rows = methods_of(records, "staleness"), []
    for updates in STALENESS:
        cells = {m: at_staleness(records, task, m, updates) for m in methods}
        troll = cells["troll"]
        rows.append(
            [
                str(updates),
                *(success(cell) for cell in cells.values()),
                signed(*difference(troll, cells["clip"])),
                signed(*difference(troll, cells["none"])),
                _number(troll, "projected_fraction", ".1%"),
                _number(troll, "policy_kl_max", ".2g", np.max),
                _number(cells["clip"], "clip_fraction", ".1%"),
            ]
        )
    header = ["updates", *(f"{m} %" for m in methods), "TROLL less clip", "TROLL less none"]
    return markdown([*header, "projected", "largest KL(p‖q)", "clipped"], rows)


def options(records: Sequence[Record], default: str, studies: Sequence[str]) -> str:
    """TROLL's options one at a time against its defaults, and against clip, both of the study `default`."""
    tasks, rows = tasks_of(records, studies[0]), []
    trolls, clips = ([select(records, default, task, method) for task in tasks] for method in ("troll", "clip"))
    for study in studies:
        changes = {(r["method"], *change) for r in _of(records, study) for change in _without_rate(r).items()}
        for method, name, value in sorted(changes, key=lambda change: (list(SYMBOLS).index(change[1]), change[2])):
            fill = ", fill of 1e-12 in place of the rest bucket" if method == "troll-fill" else ""
            cells = [select(records, study, task, method, **{name: value}) for task in tasks]
            rows += _option_rows(f"{SYMBOLS[name]} {value:g}{fill}", tasks, cells, trolls, clips)
    rows = _option_rows("defaults (ε 0.05, α 1, K 64)", tasks, trolls, trolls, clips) + rows
    header = ["option", "task", "success %", "less defaults", "less clip", "area less clip's", "projected"]
    return markdown([*header, "largest KL(p‖q)", "entropy", "collapsed"], rows)


def _option_rows(
    label: str, tasks: Sequence[str], cells: Sequence[Cell], defaults: Sequence[Cell], clips: Sequence[Cell]
) -> list[list[str]]:
    """One row for each task and, of several, one for all of them."""
    rows = []
    for task, cell, default, clip in zip(tasks, cells, defaults, clips, strict=True):
        measured = [
            _number(cell, "projected_fraction", ".1%"),
            _number(cell, "policy_kl_max", ".2g", np.max),
            _number(cell, "entropy", ".2f"),
            f"{cell.collapses} of {len(cell.records)}",
        ]
        rows.append([label, task, success(cell), *_differences([cell], [default], [clip]), *measured])
    if len(tasks) > 1:
        rows.append([label, "all", "", *_differences(cells, defaults, clips), "", "", "", ""])
    return rows


def _differences(cells: Sequence[Cell], defaults: Sequence[Cell], clips: Sequence[Cell]) -> list[str]:
    """Success less that of the defaults, success and area less those of clip; nothing of the defaults themselves."""
    return [
        "" if cells == others else signed(*pooled_difference(zip(cells, others, strict=True), key))
        for others, key in ((defaults, "success"), (clips, "success"), (clips, "area"))
    ]


def drift(records: Sequence[Record]) -> str:
    """The largest KL of one token between policy and old policy, in what is trained on."""
    (task,) = tasks_of(records, "drift")
    troll = select(records, "headline", task, "troll")
    rows = [_drift_row("troll, before the projection", troll, "policy_kl_max")]
    rows.append(_drift_row("troll, after it", troll, "kl_max"))
    for method in ("clip-measured", "none-measured"):
        cell = select(records, "drift", task, method)
        rows.append(_drift_row(method.removesuffix("-measured"), cell, "policy_kl_max"))
    return markdown(["method", "largest KL of a run: smallest, median, largest over seeds", "success %"], rows)


def _drift_row(label: str, cell: Cell, key: str) -> list[str]:
    low, middle, high = np.quantile(cell.values(key), [0, 0.5, 1])
    return [label, f"{low:.3g}, {middle:.3g}, {high:.3g}", success(cell)]


def estimators(records: Sequence[Record]) -> str:
    """TROLL against clip with other estimators, and with another architecture."""
    rows = []
    for label, study in ESTIMATORS.items():
        for task in tasks_of(records, study):
            settings = settings_of(records, study)
            cells = {name: select(records, study, task, name, **settings) for name in ("troll", "clip", "clip-gspo")}
            cells = {name: cell for name, cell in cells.items() if cell}
            for name, cell in cells.items():
                less = "" if name == "troll" else signed(*difference(cells["troll"], cell))
                acts = _number(cell, "projected_fraction" if name == "troll" else "clip_fraction", ".1%")
                rows.append([label, task, name, success(cell), less, acts])
    return markdown(
        ["estimator", "task", "method", "success %", "TROLL less this, points", "projected or clipped"], rows
    )


def cost(records: Sequence[Record]) -> str:
    """Seconds per update against clip's, paired by seed."""
    rows = []
    for task, method in product(tasks_of(records, "headline"), methods_of(records, "headline")):
        cell, clip = (select(records, "headline", task, m).by_seed("seconds_per_update") for m in (method, "clip"))
        ratios = np.array([cell[seed] / clip[seed] for seed in sorted(cell.keys() & clip.keys())])
        rows.append([task, method, f"{np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"])
    return markdown(["task", "method", "time of an update against clip's"], rows)


def failures(records: Sequence[Record]) -> str:
    """Every run that failed."""
    failed = [r for r in records if "error" in r]
    if not failed:
        return f"None of {len(records)} runs failed."
    rows = [[r["task"], r["method"], str(r["varied"]), str(r["seed"]), r["error"]] for r in failed]
    return markdown(["task", "method", "cell", "seed", "error"], rows)


def _of(records: Iterable[Record], study: str) -> list[Record]:
    return [record for record in records if study in record["studies"]]


def methods_of(records: Iterable[Record], study: str) -> list[str]:
    of_study = {record["method"] for record in _of(records, study)}
    return [method for method in METHODS if method in of_study]


def rates_of(records: Iterable[Record], study: str) -> list[float]:
    return sorted({record["varied"]["learning_rate"] for record in _of(records, study)})


def tasks_of(records: Sequence[Record], study: str) -> list[str]:
    of_study = {record["task"] for record in _of(records, study)}
    return [task for task in dict.fromkeys(record["task"] for record in records) if task in of_study]


def settings_of(records: Iterable[Record], study: str) -> dict[str, Any]:
    """What all runs of a study share beside a learning rate."""
    varied = [_without_rate(record) for record in _of(records, study)]
    return {key: value for key, value in varied[0].items() if all(v.get(key) == value for v in varied)}


def _without_rate(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record["varied"].items() if key != "learning_rate"}


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "tuning": tuning,
    "pooled": lambda records: pooled(records, POOLED),
    **{study: partial(comparison, study=study) for study in COMPARED},
    "staleness": staleness,
    "options": lambda records: options(records, "headline", ("options", "fill")),
    "high-rate-options": lambda records: options(records, "high-rate", ("high-rate-options",)),
    "other-seeds": lambda records: options(records, "other-seeds", ("other-seeds-options",)),
    "drift": drift,
    "estimators": estimators,
    "cost": cost,
    "failures": failures,
}
REPAIRED_TABLES: dict[str, Callable[[Sequence[Record]], str]] = {"repaired": repaired}

"""
The choices, tables and verdicts of rate.yaml. As a command, the cells that follow from stage 1, as YAML for that file:

    python -m evidence.rate
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from evidence.results import read_records
from evidence.tables import RESAMPLES, Cell, Record, Table, markdown, points, pooled_difference, signed
from math_answers.evaluation.statistics import Estimate

RARE = ("label-2", "sorting-label-2", "steps-2")
COMMON = ("common", "common-equations", "common-sorting")
KINDS = {"rare": RARE, "common": COMMON}
AGES = (8, 32)  # updates per rollout batch
PLACES = tuple(product(KINDS, AGES))  # kinds of tasks, and updates per rollout batch
TROLL = "troll"
OTHERS = {"clip-0.2": "clip 0.2", "clip": "tuned clip", "tv": "TV mask", "kl": "KL mask"}
LABELS = {TROLL: "TROLL", **OTHERS}
RATE_NAMES = ("1e-4", "2e-4", "4e-4", "8e-4", "1.6e-3")
RATES = tuple(map(float, RATE_NAMES))
FIRST, FRESH, FOURFOLD = range(40, 45), range(45, 50), range(50, 55)  # the seeds of stages 1, 2 and 4
WEIGHTS, ALPHA_RATES = (0.0, 0.3, 1.0, 3.0), (4e-4, 8e-4)  # of the regression, and the rates of `alpha`
LEAD, LEVEL = 0.05, -0.02
CLIPS, MASKS = ("clip-0.2", "clip"), ("tv", "kl")

# What rate.yaml expects of its statements, if it says so
EXPECTED: dict[tuple[str, str, int, str], str] = {
    **{(of, "rare", age, other): "holds" for of, age, other in product("ab", AGES, OTHERS)},
    **{(of, "common", 8, other): "fails" for of, other in product("ab", OTHERS)},
    **{(of, "common", 32, other): "holds" for of, other in product("ab", CLIPS)},
    **{("a", "common", 32, other): "fails" for other in MASKS},
    **{("c", kind, 8, other): "holds or open" for kind, other in product(KINDS, OTHERS)},
    ("c", "rare", 32, "clip"): "fails",
    **{("d", *place, other): "holds" for place, other in product(PLACES, OTHERS)},
    **{("d", "common", 8, other): "fails" for other in ("clip", *MASKS)},
}


class Runs:
    """
    The records by cell and seed. A cell is a task, a number of updates per rollout batch, a trust region and a learning
    rate. In `alpha` the weight of the regression replaces the trust region, which is TROLL; these runs have starts of
    their own.
    """

    def __init__(self, records: Iterable[Record]):
        self.methods: dict[tuple[str, int, str], str] = {}  # names of rate.yaml, with their bounds
        self.cells: dict[tuple[str, int, str, float], dict[int, Record]] = {}
        self.alpha: dict[tuple[str, int, float, float], dict[int, Record]] = {}
        for record in records:
            varied, method, seed = record["varied"], record["method"], record["seed"]
            task, age, rate = record["task"], varied["steps_per_generation"], varied["learning_rate"]
            if "regression_coef" in varied:
                self.alpha.setdefault((task, age, varied["regression_coef"], rate), {})[seed] = record
            else:
                region = method if method in LABELS else method.partition("-")[0]
                self.methods[task, age, region] = method
                self.cells.setdefault((task, age, region, rate), {})[seed] = record

    def first(self, task: str, age: int) -> list[int]:
        """The seeds of stage 1 that have all methods at all rates."""
        return _shared(FIRST, [self.cells.get((task, age, *cell), {}) for cell in product(LABELS, RATES)])

    def fresh(self, task: str, age: int) -> list[int]:
        """The seeds of stage 2 that have all methods at their best rate and at twice that rate."""
        bests = {region: self.best(task, age, region) for region in LABELS} if self.first(task, age) else {}
        cells = [(region, rate) for region, best in bests.items() for rate in (best, 2 * best)]
        return _shared(FRESH, [self.cells.get((task, age, *cell), {}) for cell in cells])

    def fourfold(self, task: str, age: int) -> list[int]:
        """The seeds of stage 4 that have all methods at four times their best rate."""
        cells = [(region, 4 * self.best(task, age, region)) for region in LABELS] if self.first(task, age) else []
        return _shared(FOURFOLD, [self.cells.get((task, age, *cell), {}) for cell in cells])

    def best(self, task: str, age: int, region: str) -> float:
        """The rate with the largest mean success in stage 1; of equal ones the smallest."""
        seeds = self.first(task, age)
        return max(RATES, key=lambda rate: self.values(task, age, region, rate, seeds).mean())

    def values(
        self, task: str, age: int, region: str, rate: float, seeds: Sequence[int], key: str = "success"
    ) -> np.ndarray:
        """`(seeds,)`."""
        return Cell([self.cells[task, age, region, rate][seed] for seed in seeds]).values(key)

    def at_rates(self, tasks: Iterable[str], age: int, region: str, key: str = "success") -> list[list[np.ndarray]]:
        """Stage 1: for each rate `(seeds,)` of every task that has seeds; empty if none has."""
        seeds_of = {task: seeds for task in tasks if (seeds := self.first(task, age))}
        at = lambda rate: [self.values(task, age, region, rate, seeds, key) for task, seeds in seeds_of.items()]
        return [at(rate) for rate in RATES] if seeds_of else []


def _shared(seeds: Iterable[int], cells: Sequence[dict[int, Record]]) -> list[int]:
    return [seed for seed in seeds if cells and all(seed in cell for cell in cells)]


# -- The statements ---------------------------------------------------------------------------------------------------

Seeds = dict[str, list[int]]  # of each task


def _compared(runs: Runs, seeds: Callable[[str, int], list[int]]) -> Iterator[tuple[str, int, str, Seeds]]:
    """Kind of tasks, updates, the other method, and the seeds of each task, if a task has any."""
    for (kind, age), other in product(PLACES, OTHERS):
        if seeds_of := {task: found for task in KINDS[kind] if (found := seeds(task, age))}:
            yield kind, age, other, seeds_of


def _judge(of: str, runs: Runs, kind: str, age: int, other: str, seeds_of: Seeds) -> tuple[Estimate, float, str]:
    """TROLL's lead by statement (a), (b), (c) or (d), its p-value (1 for (b), which has none), and the verdict."""
    lead, p_value = Estimate(0.0, 0.0, 0.0), 1.0
    if of in "ad":
        rates = lambda *cell: RATES if of == "a" else (4 * runs.best(*cell),)
        lead, p_value = _lead(runs, age, other, seeds_of, rates)
        verdict = "holds" if lead.value >= LEAD and p_value < 0.01 else "fails"
    elif of == "b":
        lead = _kept(runs, age, other, seeds_of)
        verdict = "holds" if lead.low > 0 else "fails"
    else:
        lead, p_value = _lead(runs, age, other, seeds_of, lambda *cell: (runs.best(*cell),))
        verdict = "holds" if lead.low > LEVEL else "open" if lead.value > LEVEL else "fails"
    pairs, whole = sum(map(len, seeds_of.values())), len(FIRST) * len(RARE)
    return lead, p_value, verdict if pairs == whole else f"open ({pairs} of {whole} pairs), so far {verdict}"


def _is_expected(of: str, kind: str, age: int, other: str, verdict: str) -> bool:
    return verdict in EXPECTED.get((of, kind, age, other), verdict)


def verdicts(records: Sequence[Record]) -> str:
    """
    The statements at a glance: TROLL minus the other method in points, and the verdict. A star marks what we had not
    expected.
    """
    runs, rows = Runs(records), []
    for of, seeds in {"a": runs.first, "b": runs.fresh, "c": runs.fresh, "d": runs.fourfold}.items():
        found: dict[tuple[str, int], list[str]] = {}
        for kind, age, other, seeds_of in _compared(runs, seeds):
            lead, _, verdict = _judge(of, runs, kind, age, other, seeds_of)
            star = "" if _is_expected(of, kind, age, other, verdict) else "\\*"
            found.setdefault((kind, age), []).append(f"{100 * lead.value:+.1f} {verdict}{star}")
        rows += [[f"({of}) {kind}, {age}", *cells] for (kind, age), cells in found.items()]
    return markdown(["statement, tasks, updates", *OTHERS.values()], rows)


def over_rates(records: Sequence[Record]) -> str:
    """
    Statement (a): the mean success over the five learning rates, on seeds 40 to 44. It holds if TROLL leads by at least
    5 points with p < 0.01.
    """
    runs, rows = Runs(records), []
    for kind, age, other, seeds_of in _compared(runs, runs.first):
        lead, p_value, verdict = _judge("a", runs, kind, age, other, seeds_of)
        expected = EXPECTED["a", kind, age, other]
        rows.append([f"{kind}, {age}", LABELS[other], signed(lead, p_value), expected, verdict])
    header = ["tasks, updates", "TROLL minus", "mean success over the rates, points", "expected", "verdict"]
    return markdown(header, rows)


def second_stage(records: Sequence[Record]) -> str:
    """
    Statements (b) and (c), on seeds 45 to 49. (b) compares the part of the success at its own best learning rate that a
    method keeps at twice that rate; it holds if the interval of TROLL's lead is above 0. (c) compares success at each
    method's best rate; it holds if the interval is above -2 points, is open if only the mean is, and fails otherwise.
    """
    runs, rows = Runs(records), []
    for kind, age, other, seeds_of in _compared(runs, runs.fresh):
        row = [f"{kind}, {age}", LABELS[other]]
        for of in "bc":
            lead, _, verdict = _judge(of, runs, kind, age, other, seeds_of)
            expected = EXPECTED.get((of, kind, age, other), "")
            row += [
                points(lead),
                verdict + ("" if _is_expected(of, kind, age, other, verdict) else f", expected: {expected}"),
            ]
        rows.append(row)
    header = ["tasks, updates", "TROLL minus", "(b) part kept, percentage points", "verdict", "(c) success, points"]
    return markdown([*header, "verdict"], rows) if rows else "Stage 2 has not run: nothing is decided."


def four_times(records: Sequence[Record]) -> str:
    """
    Statement (d): success with each method at four times its own best learning rate, on seeds 50 to 54. It holds if
    TROLL leads by at least 5 points with p < 0.01.
    """
    runs, rows = Runs(records), []
    for kind, age, other, seeds_of in _compared(runs, runs.fourfold):
        lead, p_value, verdict = _judge("d", runs, kind, age, other, seeds_of)
        successes = [f"{100 * _at_four_times(runs, age, region, seeds_of):.1f}" for region in (TROLL, other)]
        expected = EXPECTED["d", kind, age, other]
        rows.append([f"{kind}, {age}", LABELS[other], *successes, signed(lead, p_value), expected, verdict])
    header = ["tasks, updates", "other", "TROLL, %", "other, %", "TROLL minus the other, points", "expected", "verdict"]
    return markdown(header, rows) if rows else "Stage 4 has not run: nothing is decided."


def _at_four_times(runs: Runs, age: int, region: str, seeds_of: Seeds) -> float:
    """Mean success of a method at four times its best rate, tasks of the same weight."""
    rates = {task: 4 * runs.best(task, age, region) for task in seeds_of}
    return float(
        np.mean([runs.values(task, age, region, rates[task], seeds).mean() for task, seeds in seeds_of.items()])
    )


def _lead(
    runs: Runs, age: int, other: str, seeds_of: Seeds, rates: Callable[[str, int, str], Sequence[float]]
) -> tuple[Estimate, float]:
    """TROLL's lead in success and its p-value. Each cell counts with its mean over some `rates`."""

    def cell(task: str, region: str) -> Cell:
        of_rates = [runs.values(task, age, region, rate, seeds_of[task]) for rate in rates(task, age, region)]
        means = zip(seeds_of[task], np.mean(of_rates, axis=0), strict=True)
        return Cell([{"seed": seed, "success": value} for seed, value in means])

    return pooled_difference([(cell(task, TROLL), cell(task, other)) for task in seeds_of])


def _kept(runs: Runs, age: int, other: str, seeds_of: Seeds) -> Estimate:
    """TROLL's lead in the part kept at twice the best rate, mean over tasks."""

    def at(task: str, region: str) -> list[np.ndarray]:
        best = runs.best(task, age, region)
        return [runs.values(task, age, region, rate, seeds_of[task]) for rate in (best, 2 * best)]

    return part_kept([[at(task, region) for region in (TROLL, other)] for task in seeds_of])


def part_kept(tasks: Iterable[Sequence[Sequence[np.ndarray]]]) -> Estimate:
    """
    The lead of the first of two methods in the part of its success that it keeps, mean over tasks. For each task both
    methods have two arrays `(seeds,)`: successes at the best rate and at a higher one. Seeds are drawn within each
    task, the same for both methods.
    """
    generator, leads = np.random.default_rng(0), []
    for methods in tasks:
        seeds = len(methods[0][0])
        drawn = generator.integers(seeds, size=(RESAMPLES, seeds))
        drawn = np.concatenate([[np.arange(seeds)], drawn])  # the seeds themselves first
        first, second = (higher[drawn].mean(1) / best[drawn].mean(1) for best, higher in methods)
        leads.append(first - second)
    mean = np.mean(leads, axis=0)
    return Estimate(float(mean[0]), *map(float, np.quantile(mean[1:], [0.025, 0.975])))


# -- What was measured ------------------------------------------------------------------------------------------------


def found(records: Sequence[Record]) -> str:
    """The runs that exist, and the seeds of stage 1 that count: those with all methods at all five rates."""
    runs, failed = Runs(records), sum("error" in record for record in records)
    tasks = (*RARE, *COMMON)
    rows = [[str(age), *(", ".join(map(str, runs.first(task, age))) for task in tasks)] for age in AGES]
    return f"{len(records)} runs, {failed} of them failed.\n\n{markdown(['updates', *tasks], rows)}"


def by_rate(records: Sequence[Record]) -> str:
    """Success in percent at each learning rate, stage 1: means over the tasks of a kind. The best rate is bold."""
    return _by_rate(records, {kind: list(tasks) for kind, tasks in KINDS.items()})


def by_task(records: Sequence[Record]) -> str:
    """Success in percent at each learning rate, stage 1, on every task. Stage 2 takes the bold rate and those above."""
    return _by_rate(records, {task: [task] for tasks in KINDS.values() for task in tasks})


def _by_rate(records: Sequence[Record], groups: dict[str, list[str]]) -> str:
    runs, rows = Runs(records), []
    for (name, tasks), age, region in product(groups.items(), AGES, LABELS):
        if means := _means(runs, tasks, age, region):
            best = max(means)
            texts = [f"**{mean:.1f}**" if mean == best else f"{mean:.1f}" for mean in means]
            rows.append([name, str(age), LABELS[region], *texts, f"{np.mean(means):.1f}"])
    return markdown(["tasks", "updates", "trust region", *RATE_NAMES, "mean"], rows)


def _means(runs: Runs, tasks: Iterable[str], age: int, region: str, key: str = "success") -> list[float]:
    """In percent at each rate, tasks of the same weight; empty without runs."""
    at_rates = runs.at_rates(tasks, age, region, key)
    return [100 * float(np.mean([of_task.mean() for of_task in of_rate])) for of_rate in at_rates]


def window(records: Sequence[Record]) -> str:
    """Success in percent at each learning rate, stage 1: TROLL, and whichever of the four others is the best there."""
    runs, rows = Runs(records), []
    for kind, age in PLACES:
        if troll := _means(runs, KINDS[kind], age, TROLL):
            others = np.max([_means(runs, KINDS[kind], age, other) for other in OTHERS], axis=0)
            projected = _means(runs, KINDS[kind], age, TROLL, "projected_fraction")
            for name, values in (("TROLL", troll), ("best other", others), ("TROLL projects, % of tokens", projected)):
                rows.append([f"{kind}, {age} updates", name, *(f"{value:.1f}" for value in values)])
    return markdown(["tasks", "", *RATE_NAMES], rows)


def alpha(records: Sequence[Record]) -> str:
    """TROLL's success in percent with other weights α of the regression: means over the four tasks of `alpha`."""
    return _alpha(records, {"all": (*RARE, *COMMON)})


def alpha_by_task(records: Sequence[Record]) -> str:
    """The same on every task."""
    return _alpha(records, {task: (task,) for task in (*RARE, *COMMON)})


def _alpha(records: Sequence[Record], groups: dict[str, tuple[str, ...]]) -> str:
    runs, rows = Runs(records), []
    for (name, tasks), age, rate in product(groups.items(), AGES, ALPHA_RATES):
        if found := [cells for task in tasks if (cells := _weighted(runs, task, age, rate))]:
            means = 100 * np.mean(
                [[cell.values("success").mean() for cell in cells.values()] for cells in found], axis=0
            )
            number = sum(len(cells[1.0].records) for cells in found)
            rows.append([name, str(age), f"{rate:g}", str(number), *(f"{mean:.1f}" for mean in means)])
    header = ["tasks", "updates", "learning rate", "runs of each", *(f"α = {weight:g}" for weight in WEIGHTS)]
    return markdown(header, rows) if rows else "No such run has been made."


def _weighted(runs: Runs, task: str, age: int, rate: float) -> dict[float, Cell]:
    """The cells of every weight, of the seeds that have all weights; empty if there are none."""
    cells = {weight: runs.alpha.get((task, age, weight, rate), {}) for weight in WEIGHTS}
    seeds = _shared(FIRST, list(cells.values()))
    return {weight: Cell([cell[seed] for seed in seeds]) for weight, cell in cells.items()} if seeds else {}


def alpha_leads(records: Sequence[Record]) -> str:
    """Success with another weight α of the regression minus success with 1, in points, over the same tasks."""
    runs, rows = Runs(records), []
    places = [*product(AGES, ALPHA_RATES)]
    for name, chosen in [("all", places), *((f"{age} updates, {rate:g}", [(age, rate)]) for age, rate in places)]:
        found = [cells for task in (*RARE, *COMMON) for place in chosen if (cells := _weighted(runs, task, *place))]
        if found:
            leads = [pooled_difference([(of[weight], of[1.0]) for of in found]) for weight in WEIGHTS if weight != 1.0]
            rows.append([name, *(signed(*lead) for lead in leads)])
    return markdown(["", *(f"α = {weight:g}, minus 1" for weight in WEIGHTS if weight != 1.0)], rows)


TABLES: dict[str, Table] = {
    "found": found,
    "verdicts": verdicts,
    "over-rates": over_rates,
    "second-stage": second_stage,
    "four-times": four_times,
    "window": window,
    "by-rate": by_rate,
    "alpha": alpha,
    "alpha-leads": alpha_leads,
    "alpha-by-task": alpha_by_task,
    "by-task": by_task,
}


Cells = dict[tuple[str, int, str], tuple[float, ...]]  # learning rates by task, age and method


def next_cells(runs: Runs) -> str:
    """
    YAML of the stages that follow from stage 1. Stage 2: the two rates that decide first, the best and twice that, then
    the higher ones. Stage 4: four times the best. A task and age is left out until all five seeds of stage 1 exist.
    """
    deciding, higher, fourfold = Cells(), Cells(), Cells()
    for age, task in product(AGES, (*RARE, *COMMON)):
        if len(runs.first(task, age)) == len(FIRST):
            for region in LABELS:
                cell, best = (task, age, runs.methods[task, age, region]), runs.best(task, age, region)
                deciding[cell], fourfold[cell] = (best, 2 * best), (4 * best,)
                if above := tuple(rate for rate in RATES if rate > 2 * best):
                    higher[cell] = above
    studies = {"fresh": (FRESH, deciding), "fresh-higher": (FRESH, higher), "four-times": (FOURFOLD, fourfold)}
    return "\n".join(study_text(name, list(seeds), cells) for name, (seeds, cells) in studies.items())


def study_text(name: str, seeds: Sequence[int], cells: Cells) -> str:
    rows = [
        f"      - {{task: {task}, method: {method}, steps_per_generation: [{age}], learning_rate: "
        f"[{', '.join(f'{rate:.1e}' for rate in rates)}]}}"
        for (task, age, method), rates in cells.items()
    ]
    return "\n".join([f"  {name}:", f"    seeds: {list(seeds)}", "    cells:", *rows]) if rows else ""


def main() -> None:
    records = read_records(Path(__file__).with_name("results") / "rate.jsonl")
    runs = Runs(records)
    lacking = [f"{t} with {n}" for n, t in product(AGES, (*RARE, *COMMON)) if len(runs.first(t, n)) < len(FIRST)]
    print(f"# {len(records)} runs; not complete: {', '.join(lacking) or 'none'}\n{next_cells(runs)}")


if __name__ == "__main__":
    main()

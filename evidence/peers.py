"""The choices, verdicts and tables of peers.yaml."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from evidence.rate import COMMON, RARE, RATE_NAMES, RATES
from evidence.tables import RESAMPLES, Cell, Record, Table, markdown, percent, points, pooled_difference
from math_answers.evaluation.statistics import Estimate, estimate

PLACES = {"rare, 8": (RARE, 8), "rare, 32": (RARE, 32), "common, 8": (COMMON, 8), "wordy, 8": (("wordy-2",), 8)}
PLANNED = ("rare, 8", "rare, 32", "common, 8")  # the kinds of cells that the statements are about
LABELS = {
    "troll": "TROLL",
    "clip": "tuned clip",
    "clip-pull": "clip + pull",
    "clip-binary-pull": "clip + binary pull",
    "unlimited-pull": "pull alone",
    "unlimited-binary-pull": "binary pull alone",
    "candidate": "binary pull alone, ε 0.05",  # which `auto` is with 8 updates
    "everywhere": "clip + penalty everywhere",
    "cpgd": "CPGD",
    "vespo": "vespo",
}
RECORD = ("cfpo", "sapo", "cispo")
WEIGHTS = {"everywhere": (0.3, 1.0, 3.0, 10.0), "cpgd": (0.001, 0.01, 0.1, 1.0)}
WEIGHT_CELLS = [*product(("label-2", "common"), (2e-4, 8e-4), (73, 74))]  # task, learning rate, seed
FIRST, MANY, FEW, LAST = range(60, 63), range(63, 73), range(63, 68), range(75, 80)  # seeds of stages 1, 2, 2 and 3
HIGHEST = RATES[-1]
LEVEL, SIGNIFICANT = 0.03, 0.05

# By statement: the first and the second method, and whether they are compared at their best rates, too
COMPARED: dict[str, list[tuple[str, str, bool]]] = {
    "a": [("clip-pull", "clip", False), ("clip-binary-pull", "clip", False)],
    "b": [("troll", "unlimited-pull", True), ("troll", "clip-pull", True)],
    "c": [("clip-pull", "clip-binary-pull", True)],
    "d": [("clip-pull", "everywhere", True), ("clip-pull", "cpgd", True)],
    "f": [("candidate", "troll", True), ("candidate", "clip-binary-pull", True)],
}
# What peers.yaml expects, if it says so in a verdict: of a statement, or of one of its comparisons by the second method
EXPECTED = {("a", place, 4): "ahead" for place in PLANNED}
EXPECTED |= {(of, place, 1): "level" for of, place in product("bcd", PLANNED)}
EXPECTED |= {(of, place, 4): "undecided" for of, place in product("bc", ("rare, 8", "rare, 32"))}
EXPECTED |= {("b, clip-pull", "common, 8", 4): "ahead"}
EXPECTED |= {("d", place, 4): "ahead" for place in ("rare, 8", "rare, 32")} | {("d", "common, 8", 4): "undecided"}
EXPECTED |= {("c", "wordy, 8", 1): "level", ("c", "wordy, 8", 4): "ahead"}
EXPECTED |= {("f, troll", place, 1): "level" for place in PLANNED}
EXPECTED |= {("f, troll", "rare, 8", 4): "undecided", ("f, troll", "rare, 32", 4): "ahead"}
EXPECTED |= {("f, clip-binary-pull", "rare, 32", multiple): "ahead" for multiple in (1, 4)}
EXPECTED |= {("f, clip-binary-pull", "rare, 8", 1): "level", ("f, clip-binary-pull", "rare, 8", 4): "undecided"}
# Of (g): by the second method, cells and rate, a multiple of each method's best one, or 8e-4 for all
CONFIRMED: dict[tuple[str, str, float], str] = {
    (second, place, rate): expected
    for second, of_places in {
        "troll": ("level undecided undecided", "level undecided ahead", "level undecided behind"),
        "clip": ("level ahead ahead", "ahead ahead ahead", "level ahead behind"),
    }.items()
    for place, of_rates in zip(PLANNED, of_places, strict=True)
    for rate, expected in zip((1, 8e-4, 4), of_rates.split(), strict=True)
}


class Lead(NamedTuple):
    """A comparison of two methods over tasks of equal weight."""

    value: Estimate  # with its 95 % interval
    low: float  # of the 90 % interval
    high: float
    p_value: float
    pairs: int


class Runs:
    """The records by task, updates per rollout batch, method and learning rate, then by seed."""

    def __init__(self, records: Iterable[Record]):
        self.cells: dict[tuple[str, int, str, float], dict[int, Record]] = {}
        # Of binary pulls: method, task, updates, learning rate, bound, weight
        self.settings: dict[tuple[str, str, int, float, float, float], dict[int, Record]] = {}
        self._weighted: dict[tuple[str, float, str, float, int], Record] = {}
        main: list[tuple[str, int, str, float, float | None, Record]] = []
        for record in records:
            varied, method, seed = record["varied"], record["method"], record["seed"]
            task, age, rate = record["task"], varied["steps_per_generation"], varied["learning_rate"]
            weight = varied.get("regression_coef")
            bound = varied.get("kl_bound", 0.05 if age == 8 else None)  # `auto` is 0.8 with 32 updates
            candidate = method == "unlimited-binary-pull" and bound == 0.05
            if "kl_bound" in varied:
                setting = (method, task, age, rate, bound, 1.0 if weight is None else weight)
                self.settings.setdefault(setting, {})[seed] = record
                if not candidate:
                    continue
            if (task, rate, seed) in WEIGHT_CELLS and method in WEIGHTS:
                self._weighted[method, weight, task, rate, seed] = record
            name = "candidate" if candidate else "clip" if method.startswith("clip-0") else method
            main.append((task, age, name, rate, weight, record))
        for task, age, name, rate, weight, record in main:
            if name not in WEIGHTS or weight == self.weight(name):
                self.cells.setdefault((task, age, name, rate), {})[record["seed"]] = record

    def weight(self, method: str) -> float | None:
        """The weight with the largest mean success; `None` until all of its runs exist."""
        successes = {weight: self.of_weight(method, weight) for weight in WEIGHTS[method]}
        if any(len(values) < len(WEIGHT_CELLS) for values in successes.values()):
            return None
        return max(successes, key=lambda weight: np.mean(successes[weight]))

    def of_weight(self, method: str, weight: float) -> list[float]:
        """Successes of the runs that choose the weight; 0 for one that failed."""
        found = [self._weighted.get((method, weight, *cell)) for cell in WEIGHT_CELLS]
        return [record.get("success", 0.0) for record in found if record is not None]

    def best(self, task: str, age: int, method: str) -> float | None:
        """
        The learning rate with the largest mean success in stage 1; of equal ones the smallest. `None` until its seeds
        have all five rates and, as long as the best is the largest or the smallest of them, the one beyond.
        """
        means = {rate: self._mean(task, age, method, rate) for rate in RATES}
        while None not in means.values():
            best = max(sorted(means), key=lambda rate: means[rate] or 0.0)
            beyond = {min(means): best / 2, max(means): 2 * best}.get(best)
            if beyond is None:
                return best
            means[beyond] = self._mean(task, age, method, beyond)
        return None

    def _mean(self, task: str, age: int, method: str, rate: float) -> float | None:
        cell = self.cells.get((task, age, method, rate), {})
        if not all(seed in cell for seed in FIRST):
            return None
        return float(Cell([cell[seed] for seed in FIRST]).values("success").mean())

    def at_rates(self, tasks: Sequence[str], age: int, method: str) -> list[list[np.ndarray]]:
        """
        Stage 1: for each rate the successes `(seeds,)` on every task, of the seeds that have all rates; empty unless
        every task has such a seed.
        """
        of_tasks = []
        for task in tasks:
            cells = [self.cells.get((task, age, method, rate), {}) for rate in RATES]
            seeds = [seed for seed in FIRST if all(seed in cell for cell in cells)]
            of_tasks.append([Cell([cell[seed] for seed in seeds]).values("success") for cell in cells] if seeds else [])
        return [list(at_rate) for at_rate in zip(*of_tasks, strict=True)] if all(of_tasks) else []

    def lead(self, place: str, first: str, second: str, rate: int | float, seeds: Sequence[int] = MANY) -> Lead | None:
        """
        `first` minus `second` on seeds of stage 2, or others: each method at a multiple of its own best rate, for an
        integer, or both at the rate, for a float. `None` without pairs.
        """
        tasks, age = PLACES[place]
        pairs: list[tuple[Cell, Cell]] = []
        for task in tasks:
            bests = [self.best(task, age, method) for method in (first, second)]
            if None in bests:
                return None
            cells = [
                self.cells.get((task, age, method, rate * best if isinstance(rate, int) else rate), {})
                for method, best in zip((first, second), bests, strict=True)
                if best is not None
            ]
            paired = [seed for seed in seeds if all(seed in cell for cell in cells) and _same_start(cells, seed)]
            if not paired:
                return None
            pairs.append((Cell([cells[0][s] for s in paired]), Cell([cells[1][s] for s in paired])))
        value, p_value = pooled_difference(pairs)
        differences = [a.values("success") - b.values("success") for a, b in pairs]
        return Lead(value, *_interval(differences, 0.9), p_value, sum(map(len, differences)))

    def successes(self, place: str, method: str, rate: int | float, seeds: Sequence[int] = FEW) -> list[np.ndarray]:
        """
        Successes `(seeds,)` on every task, of the seeds that have the cell; empty unless every task has one. The rate
        is as for [`lead`].
        """
        tasks, age = PLACES[place]
        of_tasks = []
        for task in tasks:
            best = self.best(task, age, method)
            at = rate * best if isinstance(rate, int) and best is not None else rate
            cell = {} if best is None else self.cells.get((task, age, method, at), {})
            of_tasks.append(Cell([cell[seed] for seed in seeds if seed in cell]).values("success"))
        return of_tasks if all(map(len, of_tasks)) else []


def _same_start(cells: Sequence[dict[int, Record]], seed: int) -> bool:
    return len({cell[seed].get("start_digest") for cell in cells if "error" not in cell[seed]}) <= 1


def _interval(groups: Sequence[np.ndarray], confidence: float) -> tuple[float, float]:
    """Percentile interval of the mean of the groups' means; seeds are drawn within each group `(seeds,)`."""
    generator = np.random.default_rng(0)
    drawn = [group[generator.integers(len(group), size=(RESAMPLES, len(group)))].mean(1) for group in groups]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


# -- The statements ---------------------------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, by Holm's step-down method."""
    order, corrected, largest = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def verdict(lead: Lead, corrected: float) -> str:
    if corrected < SIGNIFICANT and (lead.value.low > 0 or lead.value.high < 0):
        return "ahead" if lead.value.value > 0 else "behind"
    return "level" if lead.low > -LEVEL and lead.high < LEVEL else "undecided"


class Statement(NamedTuple):
    """One of the statements (a) to (g) about one kind of cells, with its verdict."""

    name: str
    place: str
    rate: str
    lead: Lead
    p_value: float  # corrected
    expected: str  # verdict, or nothing

    @property
    def verdict(self) -> str:
        return verdict(self.lead, self.p_value)


def _corrected(found: Sequence[Statement]) -> list[Statement]:
    """With p-values corrected by Holm's method, for rare, common and wordy tasks apart."""
    found = list(found)
    for kind in ("rare", "common", "wordy"):
        chosen = [i for i, statement in enumerate(found) if statement.place.startswith(kind)]
        for index, p_value in zip(chosen, holm([found[i].p_value for i in chosen]), strict=True):
            found[index] = found[index]._replace(p_value=p_value)
    return found


def _decided(runs: Runs) -> list[Statement]:
    found = []
    for of, compared in COMPARED.items():
        for first, second, at_best in compared:
            for place, multiple in product(PLACES, (1, 4) if at_best else (4,)):
                if (lead := runs.lead(place, first, second, multiple)) is not None:
                    name = f"({of}) {LABELS[first]} minus {LABELS[second]}"
                    of_statement = EXPECTED.get((of, place, multiple), "")
                    expected = EXPECTED.get((f"{of}, {second}", place, multiple), of_statement)
                    found.append(Statement(name, place, f"{multiple}×", lead, lead.p_value, expected))
    # What was added to the plan must not change the plan's verdicts; it is itself corrected for all
    planned = [statement for statement in found if not statement.name.startswith("(f)")]
    return _corrected(planned) + _corrected(found)[len(planned) :]


def _with_intervals(found: Sequence[Statement], stage: str) -> str:
    rows = [
        [s.name, s.place, s.rate, str(s.lead.pairs), points(s.lead.value), f"{s.p_value:.2g}", s.expected, s.verdict]
        for s in found
    ]
    header = ["statement", "tasks, updates", "rate", "pairs", "points", "p", "expected", "verdict"]
    return markdown(header, rows) if rows else f"{stage} has not run: nothing is decided."


def statements(records: Sequence[Record]) -> str:
    """
    Success in stage 2, in points: the first method minus the second, with a 95 % interval. Each method has its best
    learning rate (1×), or four times that rate (4×). Holm's method corrects rare, common and wordy tasks apart. The
    correction of (a) to (d) counts these alone. That of (f), which was added to the plan, counts all.
    """
    return _with_intervals(_decided(Runs(records)), "Stage 2")


def verdicts(records: Sequence[Record]) -> str:
    """The same without intervals. A star marks a verdict that we had not expected."""
    decided = {(s.name, s.rate, s.place): s for s in _decided(Runs(records))}
    rows = []
    for name, rate in dict.fromkeys((name, rate) for name, rate, _ in decided):
        of_row = [decided.get((name, rate, place)) for place in PLACES]
        texts = [
            f"{100 * s.lead.value.value:+.1f} {s.verdict}{'*' if s.expected and s.expected != s.verdict else ''}"
            if s
            else ""
            for s in of_row
        ]
        rows.append([name, rate, *texts])
    return markdown(["statement", "rate", *PLACES], rows) if rows else "Stage 2 has not run: nothing is decided."


def at_the_highest_rate(records: Sequence[Record]) -> str:
    """
    Stage 2 at 1.6e-3 for all: success of the first method minus the second, in points, with a 95 % interval. The plan
    has these runs, but no statement about them.
    """
    runs, rows = Runs(records), []
    for first, second in [("troll", "clip"), *((a, b) for of in COMPARED.values() for a, b, _ in of)]:
        of_places = [runs.lead(place, first, second, HIGHEST) for place in PLACES]
        if any(of_places):
            texts = ["" if lead is None else points(lead.value) for lead in of_places]
            rows.append([f"{LABELS[first]} minus {LABELS[second]}", *texts])
    return markdown(["methods", *PLACES], rows) if rows else "Stage 2 has not run."


def confirmed_successes(records: Sequence[Record]) -> str:
    """
    Stage 3: success in percent at each method's best learning rate (1×), at 8e-4 for all, and at four times the best
    rate (4×), with 95 % intervals.
    """
    runs, rows = Runs(records), []
    for place, method in product(PLANNED, ("troll", "candidate", "clip")):
        of_rates = [runs.successes(place, method, rate, LAST) for rate in (1, 8e-4, 4)]
        values = [[of_task[:, None] for of_task in of_tasks] for of_tasks in of_rates]
        texts = [percent(estimate(of, RESAMPLES, seed=0)[0]) if of else "" for of in values]
        rows += [[place, LABELS[method], *texts]] if any(texts) else []
    header = ["tasks, updates", "method", "1×", "8e-4", "4×"]
    return markdown(header, rows) if rows else "Stage 3 has not run."


def confirmation(records: Sequence[Record]) -> str:
    """
    (g) Stage 3: success of the candidate minus another method, in points, with a 95 % interval, at the best learning
    rate of each (1×), at 8e-4 for both, and at four times the best rate of each (4×). p-values are corrected by Holm's
    method, for rare and common tasks apart.
    """
    runs, found = Runs(records), []
    for (second, place, rate), expected in CONFIRMED.items():
        if (lead := runs.lead(place, "candidate", second, rate, LAST)) is not None:
            at = f"{rate}×" if isinstance(rate, int) else "8e-4"
            found.append(Statement(f"candidate minus {LABELS[second]}", place, at, lead, lead.p_value, expected))
    return _with_intervals(_corrected(found), "Stage 3")


def successes(records: Sequence[Record]) -> str:
    """
    Stage 2: success in percent at each method's best learning rate, at four times it, and at 1.6e-3 for all, with 95 %
    intervals: tasks of equal weight, and the seeds of 63 to 67 that have the cell.
    """
    runs, rows = Runs(records), []
    for (place, (tasks, age)), method in product(PLACES.items(), LABELS):
        bests = {task: runs.best(task, age, method) for task in tasks}
        of_rates = [runs.successes(place, method, rate) for rate in (1, 4, HIGHEST)]
        values = [[of_task[:, None] for of_task in of_tasks] for of_tasks in of_rates]
        texts = [percent(estimate(of, RESAMPLES, seed=0)[0]) if of else "" for of in values]
        if any(texts):
            rates = ", ".join(f"{rate:g}" for rate in bests.values() if rate is not None)
            rows.append([place, LABELS[method], rates, *texts])
    header = ["tasks, updates", "method", "best rates", "1×", "4×", "1.6e-3"]
    return markdown(header, rows) if rows else "Stage 2 has not run."


def one_setting(records: Sequence[Record]) -> str:
    """
    (e) Stage 2: success minus that of the method with the highest one, in points with a 90 % interval, each method at
    its best learning rate (1×) or four times it (4×). Bold: level with the best one, or it.
    """
    runs = Runs(records)
    columns = [*product(PLACES, (1, 4))]
    rows: dict[str, list[str]] = {method: [] for method in LABELS}
    for place, multiple in columns:
        of_methods = {method: runs.successes(place, method, multiple) for method in LABELS}
        means = {method: np.mean([of.mean() for of in of_tasks]) for method, of_tasks in of_methods.items() if of_tasks}
        best = max(means, key=lambda method: means[method], default="")
        for method, row in rows.items():
            lead = runs.lead(place, method, best, multiple) if method in means else None
            text = "" if lead is None else points(replace(lead.value, low=lead.low, high=lead.high))
            row.append(f"**{text}**" if lead is not None and lead.low > -LEVEL else text)
    header = ["method", *(f"{place}, {multiple}×" for place, multiple in columns)]
    shown = [[LABELS[method], *row] for method, row in rows.items() if any(row)]
    return markdown(header, shown) if shown else "Stage 2 has not run."


# -- What was measured ------------------------------------------------------------------------------------------------


def found(records: Sequence[Record]) -> str:
    """The runs that exist, by stage."""
    failed = sum("error" in record for record in records)
    seeds = {"0": (73, 74), "1": FIRST, "2": MANY, "3": LAST}
    of_stages = [f"{sum(record['seed'] in of for record in records)} in stage {stage}" for stage, of in seeds.items()]
    return f"{len(records)} runs: {', '.join(of_stages)}. {failed} failed."


def weights(records: Sequence[Record]) -> str:
    """Success in percent at four weights of the penalty: means over label-2 and common, two rates, two seeds."""
    runs, rows = Runs(records), []
    for method, of_method in WEIGHTS.items():
        successes = [runs.of_weight(method, weight) for weight in of_method]
        if any(successes):
            cells = [
                f"{weight:g}: {100 * np.mean(of_weight):.1f}" if of_weight else f"{weight:g}:"
                for weight, of_weight in zip(of_method, successes, strict=True)
            ]
            rows.append([LABELS[method], str(sum(map(len, successes))), *cells])
    return markdown(["method", "runs", *["weight: success"] * 4], rows) if rows else "No such run has been made."


def by_rate(records: Sequence[Record]) -> str:
    """
    Stage 1: success in percent at each learning rate, means over tasks and over the seeds that have the method at every
    rate. The best rate is bold.
    """
    return _by_rate(Runs(records), PLACES)


def high_rates(records: Sequence[Record]) -> str:
    """
    Stage 1: success in percent at the best learning rate, at 8e-4 and at 1.6e-3: means over tasks, and over the seeds
    that have the method at every rate.
    """
    runs, rows = Runs(records), []
    for method in (*LABELS, *RECORD):
        of_places = [runs.at_rates(*place, method) for place in PLACES.values()]
        means = [[100 * np.mean([of_task.mean() for of_task in at]) for at in of_rates] for of_rates in of_places]
        texts = [f"{max(of):.0f}, {of[-2]:.0f}, {of[-1]:.0f}" if of else "" for of in means]
        rows += [[LABELS.get(method, method), *texts]] if any(texts) else []
    return markdown(["method", *PLACES], rows) if rows else "Stage 1 is not complete anywhere."


def by_task(records: Sequence[Record]) -> str:
    """The same on every task."""
    tasks = {f"{task}, {age}": ((task,), age) for tasks, age in PLACES.values() for task in tasks}
    return _by_rate(Runs(records), tasks)


def _by_rate(runs: Runs, places: Mapping[str, tuple[Sequence[str], int]]) -> str:
    rows = []
    for (place, (tasks, age)), method in product(places.items(), (*LABELS, *RECORD)):
        if of_rates := runs.at_rates(tasks, age, method):
            means = [100 * float(np.mean([values.mean() for values in of_tasks])) for of_tasks in of_rates]
            texts = [f"**{mean:.1f}**" if mean == max(means) else f"{mean:.1f}" for mean in means]
            rows.append([place, LABELS.get(method, method), *texts])
    return markdown(["tasks, updates", "method", *RATE_NAMES], rows) if rows else "Stage 1 is not complete anywhere."


def binary_settings(records: Sequence[Record]) -> str:
    """Success in percent of the clip with a binary pull at 8e-4, 8 updates, with other bounds ε and weights α."""
    runs = Runs(records)
    settings = [*product((0.05, 0.2), (0.3, 1.0, 3.0))]
    rows = []
    for task in ("wordy-2", "label-2", "common"):
        cells = [runs.settings.get(("clip-binary-pull", task, 8, 8e-4, *setting), {}) for setting in settings]
        if all(cells):
            rows.append([task, *(f"{100 * Cell([*cell.values()]).values('success').mean():.1f}" for cell in cells)])
    header = ["task", *(f"ε {bound:g}, α {weight:g}" for bound, weight in settings)]
    return markdown(header, rows) if rows else "No such run has been made."


def binary_32(records: Sequence[Record]) -> str:
    """
    Success in percent of binary pulls with three bounds, rare tasks with 32 updates, where `auto` is 0.8: means over
    tasks, and over the seeds that have every cell.
    """
    runs, rates = Runs(records), RATES[1:]

    def cell(method: str, bound: float, task: str, rate: float) -> dict[int, Record]:
        if bound == 0.8:
            return runs.cells.get((task, 32, method, rate), {})
        return runs.settings.get((method, task, 32, rate, bound, 1.0), {})

    cells = {
        (method, bound): [[cell(method, bound, task, rate) for task in RARE] for rate in rates]
        for method, bound in product(("clip-binary-pull", "unlimited-binary-pull"), (0.05, 0.2, 0.8))
    }
    every = [cell for of_rates in cells.values() for of_tasks in of_rates for cell in of_tasks]
    seeds = [seed for seed in FIRST if all(seed in cell for cell in every)]
    if not seeds:
        return "No such run has been made."
    rows = []
    for (method, bound), of_rates in cells.items():
        means = [[Cell([cell[s] for s in seeds]).values("success").mean() for cell in at] for at in of_rates]
        rows.append([LABELS[method], f"{bound:g}", str(len(seeds)), *(f"{100 * np.mean(of):.1f}" for of in means)])
    return markdown(["method", "ε", "seeds", *RATE_NAMES[1:]], rows)


TABLES: dict[str, Table] = {
    "found": found,
    "verdicts": verdicts,
    "statements": statements,
    "highest-rate": at_the_highest_rate,
    "confirmed-successes": confirmed_successes,
    "confirmation": confirmation,
    "successes": successes,
    "one-setting": one_setting,
    "high-rates": high_rates,
    "by-rate": by_rate,
    "by-task": by_task,
    "weights": weights,
    "binary-settings": binary_settings,
    "binary-32": binary_32,
}

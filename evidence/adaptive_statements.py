"""
Writes statements (a) to (d) of evidence/adaptive.yaml, from the results so far, to tables/adaptive-statements.md.

    python -m evidence.adaptive_statements
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats

from evidence.groups import Estimate, estimate, paired, successes
from evidence.results import Record, read_records
from evidence.tables import markdown

HERE = Path(__file__).resolve().parent
TASKS = ["label-2", "sorting-label-2", "steps-2", "wordy-2", "common", "common-equations", "common-sorting"]
RARE, COMMON = TASKS[:3], TASKS[4:]
STARTS = [5e-5, 2e-4, 8e-4, 1.6e-3, 3.2e-3]
TUNING = (90, 91)
SEEDS = {
    "95 and 96, which test the rule": (95, 96),
    "92 to 94, of which three runs chose the rule": (92, 93, 94),
    "92 to 96": (92, 93, 94, 95, 96),
}
LEGEND = (
    "Made by `python -m evidence.adaptive_statements`. Success in percent, means over the seeds that have run. A "
    "method's best fixed rate on a task has the largest mean success on seeds 90 and 91. The worst start has the "
    "smallest mean success on a task. Differences are in points, means over tasks of equal weight, paired by seed and "
    "initial model, with 95 % intervals; p flips the signs of the differences."
)
Cell = Mapping[int, Record]  # the records of a cell, by seed


class Results:
    """The runs of some `seeds` with some numbers of `updates` per rollout batch, by default 8, and 1 for TRL's default.
    The seeds of `tuning` choose the best fixed rates."""

    def __init__(
        self,
        records: Iterable[Record],
        seeds: Sequence[int] = SEEDS["92 to 96"],
        updates: Sequence[int] = (1, 8),
        tuning: Sequence[int] = TUNING,
    ):
        self.tuning: dict[tuple[str, str, float], dict[int, Record]] = defaultdict(dict)
        self.reported: dict[tuple[str, str, float], dict[int, Record]] = defaultdict(dict)
        for record in records:
            seed, rate = record["seed"], record["varied"]["learning_rate"]
            for runs, chosen in ((self.tuning, tuning), (self.reported, seeds)):
                if record["varied"]["steps_per_generation"] in updates and seed in chosen:
                    runs[record["task"], record["method"], rate][seed] = record

    def best_rate(self, task: str, method: str) -> float | None:
        """Return the rate with the largest mean success, among those with the largest number of tuning seeds."""
        cells = {rate: cell for (*of, rate), cell in sorted(self.tuning.items()) if of == [task, method]}
        most = max(map(len, cells.values()), default=0)  # a rate that only one seed has would win by its luck
        complete = [rate for rate, cell in cells.items() if len(cell) == most]
        return max(complete, key=lambda rate: successes(cells[rate]).mean(), default=None)

    def at_best_rate(self, task: str, method: str) -> Cell:
        rate = self.best_rate(task, method)
        return {} if rate is None else self.reported[task, method, rate]

    def from_worst_start(self, task: str, method: str) -> Cell:
        cells = [self.reported[task, method, rate] for rate in STARTS]
        return min(filter(None, cells), key=lambda cell: successes(cell).mean(), default={})

    def over_starts(self, task: str, method: str) -> Cell:
        """The mean success over the starts, for each seed that has all of them."""
        cells = [self.reported[task, method, rate] for rate in STARTS]
        mean = lambda seed: float(np.mean([successes(cell, [seed]) for cell in cells]))
        return {seed: cells[0][seed] | {"success": mean(seed)} for seed in set.intersection(*map(set, cells))}


class Difference(NamedTuple):
    """A mean of the tasks' mean differences with its interval, p (by flips of signs), and the number of pairs."""

    mean: Estimate
    p: float
    pairs: int


def difference(pairs: Sequence[tuple[Cell, Cell]]) -> Difference | None:
    """The success of ours minus the success of theirs, for a pair of cells of each task; `None` if a task has no
    pair of runs. The p of one pair is 1."""
    leads = [np.subtract(*paired(ours, theirs)) for ours, theirs in pairs]
    if not pairs or not all(map(len, leads)):
        return None
    weighted = np.concatenate([lead / len(lead) for lead in leads])
    flips = {"permutation_type": "samples", "n_resamples": 100_000, "rng": 0}
    p = scipy.stats.permutation_test((weighted,), np.sum, **flips).pvalue if len(weighted) > 1 else 1.0
    return Difference(estimate(leads), float(p), len(weighted))


def difference_row(name: str, pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """Return the mean of the tasks' mean differences, its interval, its p, and the number of pairs; empty if a task has
    none."""
    found = difference(pairs)
    return [name, found.mean.show("+"), f"{found.p:.2g}", str(found.pairs)] if found else [name, "", "", ""]


def best_rate_table(results: Results) -> str:
    methods = {"TRL's default": "trl", "clip 0.2": "clip", "TROLL": "troll", "penalty": "penalty"}
    show = lambda rate: "" if rate is None else f"{rate:g}"
    rows = [[task, *(show(results.best_rate(task, method)) for method in methods.values())] for task in TASKS]
    return markdown(["task", *methods], rows)


def share_table(results: Results, method: str, tasks: Sequence[str] = TASKS) -> str:
    """Success from each start in percent of the success at the best fixed rate, and how many single runs reach 85 % of
    the success of the run with the same seed at that rate."""
    show = lambda value: f"{100 * value:.0f}"
    rows, reached = [], []
    for task in tasks:
        fixed = results.at_best_rate(task, method)
        pairs = [paired(results.reported[task, f"{method}-adaptive", rate], fixed) for rate in STARTS]
        shares = {place: ours.mean() / best.mean() for place, (ours, best) in enumerate(pairs) if len(ours)}
        reached += [success >= 0.85 * best for pair in pairs for success, best in zip(*pair, strict=True)]
        cells = [show(shares[place]) if place in shares else "" for place in range(len(STARTS))]
        ends = [show(successes(fixed).mean()) if fixed else "", show(min(shares.values())) if shares else ""]
        rows.append([task, str(len(fixed)), ends[0], *cells, ends[1]])
    header = ["task", "seeds", "success at the best fixed rate", *map("{:g}".format, STARTS), "smallest"]
    return (
        f"{markdown(header, rows)}\n\n{sum(reached)} of {len(reached)} runs reach at least 85 % of the success of the "
        "run at the best fixed rate with the same seed."
    )


def difference_table(results: Results) -> str:
    worst, best = results.from_worst_start, results.at_best_rate
    rows = []
    for name, method in (("TROLL", "troll-adaptive"), ("penalty", "penalty-adaptive")):
        trl = [(worst(task, method), best(task, "trl")) for task in RARE]
        rows.append(difference_row(f"(b) {name}, worst start, minus TRL's default, best fixed rate", trl))
        for clip, of in (("clip-adaptive-0.2", "its own thresholds"), ("clip-adaptive", "our thresholds")):
            pairs = [(worst(task, method), worst(task, clip)) for task in RARE]
            rows.append(difference_row(f"(c) {name}, worst start, minus the clip with {of}, worst start", pairs))
        for kind, tasks in (("rare", RARE), ("common", COMMON)):
            pairs = [(results.over_starts(task, method), best(task, "trl")) for task in tasks]
            rows.append(difference_row(f"{name}, mean over the starts, minus TRL's default, {kind} tasks", pairs))
    groups = {"rare tasks": RARE, "common tasks": COMMON} | {task: [task] for task in TASKS}
    for name, tasks in groups.items():
        pairs = [(best(task, "troll"), best(task, "trl")) for task in tasks]
        rows.append(difference_row(f"(d) TROLL minus TRL's default, best fixed rates, {name}", pairs))
    return markdown(["", "difference", "p", "pairs"], rows)


def main() -> None:
    records = read_records(HERE / "results" / "adaptive.jsonl")
    parts = ["# Statements of `adaptive`", LEGEND, "## Best fixed rates", best_rate_table(Results(records))]
    share = "### (a) {}: success from each initial rate, in percent of the success at the best fixed rate".format
    for name, seeds in SEEDS.items():
        results = Results(records, seeds)
        parts += [f"## Seeds {name}", share("TROLL"), share_table(results, "troll")]
        parts += [share("Penalty"), share_table(results, "penalty"), "### (b), (c), (d): differences"]
        parts.append(difference_table(results))
    title = "## 32 updates per rollout batch, seeds 95 and 96, which also choose the best fixed rates"
    parts += [title, share("TROLL"), share_table(Results(records, (95, 96), [32], (95, 96)), "troll", RARE)]
    (HERE / "tables" / "adaptive-statements.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()

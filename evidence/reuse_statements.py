"""
Writes statements (a) to (g) of evidence/reuse.yaml, from the results so far, to tables/reuse-statements.md.

    python -m evidence.reuse_statements
    python -m evidence.reuse_statements --cells

The second line prints what seeds 110 and 111 chose, as cells of the study `test`.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import yaml

from evidence.adaptive_statements import Cell, Difference, difference
from evidence.groups import RESAMPLES, Estimate, Group, Setting, group_runs, paired, paired_seeds
from evidence.results import Record, read_records
from evidence.tables import markdown, show_setting

HERE = Path(__file__).resolve().parent
RARE, COMMON, SHORT = "rare", "common", "rare, 1,024 completions"  # groups of the plan
LARGEST, DEFAULT, RIVAL = "TRL's default, 8,192 completions", "TRL's default (1 update)", "clip or mask"
OURS = ("TROLL", "binary penalty")
STARTS = (1e-4, 8e-4)
LEGEND = (
    "Made by `python -m evidence.reuse_statements`. Success in percent, differences in points, over the test seeds "
    "that have run, in the setting that seeds 110 and 111 chose for each task. Tasks have equal weight, pairs share "
    "seed and initial model, intervals are 95 % and resample seeds within tasks, and p flips the signs of the "
    "differences. In (g), 0 means that on one task, a method never got there. A place without runs is empty."
)
Pairs = list[tuple[Cell, Cell]]  # for each task, the runs of two methods


def pairs_of(group: Group, ours: str, theirs: str, rate: float | None = None) -> Pairs:
    """The runs of two methods on every task of a group, ours at a `rate` if one is given. Empty if either lacks a
    task."""
    return list(zip(group.cells(ours, rate) or [], group.cells(theirs) or [], strict=False))


def resampled(counts: Sequence[int], statistic: Callable[[list[np.ndarray]], float]) -> Estimate | None:
    """A `statistic` of the places of the seeds of each task, and its interval over draws of `counts` places with
    replacement. `None` if a task has no seed."""
    if not counts or not all(counts):
        return None
    draws = np.random.default_rng(0)
    values = [statistic([draws.integers(n, size=n) for n in counts]) for _ in range(RESAMPLES)]
    return Estimate(statistic([np.arange(n) for n in counts]), *map(float, np.quantile(values, [0.025, 0.975])))


def kept(pairs: Pairs) -> Estimate | None:
    """Our success divided by theirs: the mean of the tasks' ratios."""
    found = [paired(ours, theirs) for ours, theirs in pairs]

    def mean_ratio(places: list[np.ndarray]) -> float:
        return float(
            np.mean([ours[at].mean() / theirs[at].mean() for (ours, theirs), at in zip(found, places, strict=True)])
        )

    return resampled([len(ours) for ours, _ in found], mean_ratio)


def completions_to(completions: np.ndarray, heights: np.ndarray, target: float) -> float:
    """The completions at which a curve `(points,)` first reaches a `target`, between its points by a line; infinite if
    it never does."""
    above = np.flatnonzero(heights >= target)
    if not len(above):
        return math.inf
    first = slice(max(above[0] - 1, 0), above[0] + 1)
    return float(np.interp(target, heights[first], completions[first]))


def saving(pairs: Pairs, share: float = 0.8) -> Estimate | None:
    """
    How many times fewer completions ours needs than theirs until a `share` of their final success, on the mean curves
    of a task: the geometric mean over tasks, 0 if ours never gets there on one. Pairs with a failed run are left out.
    """
    tasks = []  # for each, the completions `(points,)` and the curves `(seeds, points)` of ours and of theirs
    for pair in pairs:
        seeds = [seed for seed in paired_seeds(*pair) if not any("error" in cell[seed] for cell in pair)]
        if not seeds:
            return None
        tasks.append([_curves([cell[seed] for seed in seeds]) for cell in pair])

    def times(places: list[np.ndarray]) -> float:
        ratios = []
        for ((made, ours), (their_made, theirs)), at in zip(tasks, places, strict=True):
            target = share * theirs[at].mean(0)[-1]
            needed = completions_to(made, ours[at].mean(0), target)
            ratios.append(completions_to(their_made, theirs[at].mean(0), target) / needed)
        return float(np.prod(ratios) ** (1 / len(ratios)))

    return resampled([len(ours) for (_, ours), _ in tasks], times)


def _curves(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Completions `(points,)`, and success `(seeds, points)`, of runs in one setting. The last point with a number of
    completions counts."""
    by_place = [
        {made: height for (_, made), (_, height) in zip(r["completions"], r["curve"], strict=True)} for r in records
    ]
    return np.array([*by_place[0]], float), np.array([[*of_run.values()] for of_run in by_place])


def ratio_row(name: str, value: Estimate | None, holds: Callable[[Estimate], bool] | None = None) -> list[str]:
    """A row without a verdict if no statement is about it."""
    if value is None:
        return [name, "", "", ""]
    return [name, "{:.2f} [{:.2f}, {:.2f}]".format(*value), "", _verdict(holds(value)) if holds else ""]


def lead_row(name: str, pairs: Pairs, holds: Callable[[Difference], bool]) -> list[str]:
    found = difference(pairs)
    if found is None:
        return [name, "", "", ""]
    return [name, found.mean.show("+"), f"{found.p:.2g} ({found.pairs})", _verdict(holds(found))]


def _verdict(holds: bool) -> str:
    return "holds" if holds else "fails"


def lead_rows(groups: Mapping[str, Group]) -> Iterator[list[str]]:
    """Statements (b) to (e)."""
    above_0, above_2 = lambda found: found.mean.low > 0, lambda found: found.mean.low > -0.02
    for letter, theirs in (("b", DEFAULT), ("c", RIVAL)):
        for ours in OURS:
            for name, holds in ((RARE, above_0), (COMMON, above_2)):
                yield lead_row(f"({letter}) {ours} minus {theirs}, {name}", pairs_of(groups[name], ours, theirs), holds)
    far = lambda found: found.mean.value >= 0.05 and found.p < 0.01
    level = lambda found: found.mean.low > -0.03 and found.mean.high < 0.03
    for ours in OURS:
        yield lead_row(f"(d) {ours} minus {RIVAL}, {SHORT}", pairs_of(groups[SHORT], ours, RIVAL), far)
    for name, group in groups.items():
        yield lead_row(f"(e) {' minus '.join(OURS)}, {name}", pairs_of(group, *OURS), level)


def ratio_rows(groups: Mapping[str, Group]) -> Iterator[list[str]]:
    """Statements (a), (f) and (g)."""
    keeps = lambda value: value.value >= 0.85 and value.low > 0.8
    for ours in OURS:
        name = f"(a) success of {ours} 8x4 over {LARGEST}, rare"
        yield ratio_row(name, kept(pairs_of(groups[RARE], f"{ours} 8x4", LARGEST)), keeps)
    for ours, start, group in product(OURS, STARTS, (groups[RARE], groups[COMMON])):
        pairs = pairs_of(group, f"{ours} 2x4, adaptive rate", f"{ours} 2x4", start)
        for task, pair in zip(group.tasks if pairs else [], pairs, strict=True):
            name = f"(f) success of {ours} 2x4, adaptive from {start:g}, over its best fixed rate, {task}"
            yield ratio_row(name, kept([pair]), lambda value: value.value >= 0.85)
    saves = lambda value: value.value >= 2 and value.low > 1.5
    # On a common task, the start already has 80 % of the final success
    for ours in (*OURS, "TROLL 8x4", "binary penalty 8x4", RIVAL, DEFAULT):
        name = f"(g) completions until 80 % of the final success of TRL's default: TRL's default over {ours}, rare"
        yield ratio_row(name, saving(pairs_of(groups[RARE], ours, LARGEST)), saves if ours == "TROLL" else None)


def chosen_table(groups: Mapping[str, Group]) -> str:
    """The setting that each method chose on each task."""
    rows = []
    for name, group in groups.items():
        for method, runs in group.tuning.items():
            bests = [(group.best(method, task), task) for task in group.tasks]
            rows.append(
                [name, method, ", ".join(show_setting(best, runs, task) if best else "–" for best, task in bests)]
            )
    return markdown(["tasks", "method", "rate and setting of each task"], rows)


def chosen_cells(groups: Mapping[str, Group]) -> list[str]:
    """What the choosing seeds chose, each setting once, as lines of a grid."""
    tasks_of: dict[Setting, list[str]] = {}
    for group in groups.values():
        for method in group.tuning:
            rates = STARTS if "adaptive" in method else [None]  # (f) is about every start
            for task in group.tasks:
                for setting in filter(None, (group.best(method, task, rate) for rate in rates)):
                    if task not in tasks_of.setdefault(setting, []):
                        tasks_of[setting].append(task)
    text = lambda value: f"{value:.1e}" if isinstance(value, float) else str(value)
    return [
        f"- {{tasks: [{', '.join(tasks)}], methods: [{setting.method}], "
        + ", ".join(f"{name}: [{text(value)}]" for name, value in setting.varied)
        + "}"
        for setting, tasks in tasks_of.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", action="store_true", help="print the cells of the study `test`")
    options = parser.parse_args()
    plan = yaml.safe_load((HERE / "reuse.yaml").read_text())["tables"]
    groups = group_runs(read_records(HERE / "results" / "reuse.jsonl"), plan)
    if options.cells:
        print("\n".join(chosen_cells(groups)))
        return
    rows = sorted([*ratio_rows(groups), *lead_rows(groups)], key=lambda row: row[0][:3])  # (a) to (g)
    parts = ["# Statements of `reuse`", LEGEND, markdown(["", "value", "p (pairs)", ""], rows)]
    parts += ["## What the choosing seeds chose", chosen_table(groups)]
    (HERE / "tables" / "reuse-statements.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()

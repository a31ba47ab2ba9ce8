"""
The tables and verdicts of smollm2-rate.yaml. As a command, the cells of its second stage, as YAML for that file:

    python -m evidence.smollm2_rate
"""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from evidence.rate import LEVEL, part_kept
from evidence.results import read_records
from evidence.tables import Cell, Record, Table, difference, markdown, points, signed

TROLLS = {"troll": "TROLL, ε 0.05", "troll-0.2": "TROLL, ε 0.2", "troll-0.5": "TROLL, ε 0.5"}
OTHERS = {"clip-0.2": "clip 0.2", "clip-0.2-1.0": "clip 0.2/1.0", "tv-0.15": "TV mask"}
LABELS = TROLLS | OTHERS
PULLS = {"pull": "binary pull alone", "clip-binary-pull": "clip 0.2/1.0 + binary pull"}  # not in the statements
FORM, NUMBER = "answer_format_reward", "last_number_reward"  # other rewards, which weigh nothing
TASK = "h100"  # the runs on a CPU decide nothing
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # the last one is only a next rate
FIRST, FRESH = (13, 14), (15, 16, 17, 18, 19, 20)  # the seeds of the two stages


class Runs:
    """The records of a task by method, learning rate and seed."""

    def __init__(self, records: Iterable[Record], task: str = TASK):
        self.records: dict[tuple[str, float], dict[int, Record]] = {}
        for record in (r for r in records if r["task"] == task):
            self.records.setdefault((record["method"], record["varied"]["learning_rate"]), {})[record["seed"]] = record

    def cell(self, method: str, learning_rate: float, seeds: Sequence[int]) -> Cell:
        found = self.records.get((method, learning_rate), {})
        return Cell([found[seed] for seed in seeds if seed in found])

    def best(self, method: str) -> float | None:
        """The rate with the largest mean success in stage 1, of equal ones the smallest; `None` if a run is missing."""
        cells = {rate: self.cell(method, rate, FIRST) for rate in RATES[:-1]}
        if any(len(cell.records) < len(FIRST) for cell in cells.values()):
            return None
        return max(cells, key=lambda rate: cells[rate].values("success").mean())

    def fresh(self, method: str) -> tuple[Cell, Cell]:
        """Stage 2: at the best rate, and at the next one. Only seeds that all methods have at both."""
        bests = {name: best for name in LABELS if (best := self.best(name)) is not None}
        if len(bests) < len(LABELS):
            return Cell([]), Cell([])
        next_of = {name: RATES[RATES.index(best) + 1] for name, best in bests.items()}
        needed = [self.records.get(cell, {}) for rates in (bests, next_of) for cell in rates.items()]
        seeds = [seed for seed in FRESH if all(seed in cell for cell in needed)]
        return self.cell(method, bests[method], seeds), self.cell(method, next_of[method], seeds)


def by_rate(records: Sequence[Record]) -> str:
    """Success in percent at each learning rate, stage 1: the two seeds, and their mean. The best rate is bold."""
    runs, rows = Runs(records), []
    for method, label in LABELS.items():
        best, texts = runs.best(method), []
        for learning_rate in RATES[:-1]:
            values = 100 * runs.cell(method, learning_rate, FIRST).values("success")
            text = f"{', '.join(f'{value:.1f}' for value in values)}: {values.mean():.1f}" if len(values) else ""
            texts.append(f"**{text}**" if learning_rate == best else text)
        rows.append([label, *texts])
    return markdown(["trust region", *(f"{learning_rate:g}" for learning_rate in RATES[:-1])], rows)


def second_stage(records: Sequence[Record]) -> str:
    """
    Statements (b) and (c), on seeds 15 to 20. (b) compares the part of the success at its own best learning rate that a
    method keeps at the next rate, about three times as high; it holds if the interval of TROLL's lead is above 0. (c)
    compares success at each method's best rate; it holds if the interval is above -2 points, is open if only the mean
    is, and fails otherwise.
    """
    runs, rows = Runs(records), []
    for name, method in product(TROLLS, OTHERS):
        (troll, troll_next), (other, other_next) = runs.fresh(name), runs.fresh(method)
        if not troll.records:
            return "Stage 2 has not run: nothing is decided."
        missing = "" if len(troll.records) == len(FRESH) else f" so far ({len(troll.records)} of {len(FRESH)} seeds)"
        cells = (troll, troll_next), (other, other_next)
        kept = part_kept([[[cell.values("success") for cell in of_method] for of_method in cells]])
        lead, p_value = difference(troll, other)
        verdict = "holds" if lead.low > LEVEL else "open" if lead.value > LEVEL else "fails"
        of_kept = "holds" if kept.low > 0 else "fails"
        texts = [points(kept), of_kept + missing, signed(lead, p_value), verdict + missing]
        rows.append([LABELS[name], LABELS[method], *texts])
    header = ["", "minus", "(b) part kept, percentage points", "verdict", "(c) success, points", "verdict"]
    return markdown(header, rows)


def fresh(records: Sequence[Record]) -> str:
    """Stage 2: mean success in percent at each method's best rate and at the next one."""
    runs, rows = Runs(records), []
    for method, label in LABELS.items():
        texts = [
            f"{100 * cell.values('success').mean():.1f} at {cell.records[0]['varied']['learning_rate']:g}"
            for cell in runs.fresh(method)
            if cell.records
        ]
        rows += [[label, *texts]] if texts else []
    return markdown(["trust region", "best rate", "next rate"], rows) if rows else "Stage 2 has not run."


def share(records: Sequence[Record]) -> str:
    """
    The length of the regression's gradient as a part of that of the whole gradient, at the last update of every rollout
    batch: means over all runs of TROLL at a rate.
    """
    runs, rows = Runs(records), []
    for method, learning_rate in product(TROLLS, RATES):
        cell = runs.cell(method, learning_rate, (*FIRST, *FRESH))
        if len(values := cell.values("regression_share")):
            rows.append([LABELS[method], f"{learning_rate:g}", str(len(values)), f"{np.mean(values):.2f}"])
    return markdown(["", "learning rate", "runs", "part"], rows)


def pulls(records: Sequence[Record]) -> str:
    """Success in percent of the binary pulls on the GPU, and of others at the same rates: means over seeds 15 to 20."""
    runs, rates, rows = Runs(records), RATES[1:4], []
    for method, label in (LABELS | PULLS).items():
        cells = [runs.cell(method, rate, FRESH) for rate in rates]
        rows.append([label, *(f"{100 * cell.values('success').mean():.1f}" if cell.records else "" for cell in cells)])
    missing = not any(runs.records.get((method, rate)) for method, rate in product(PULLS, rates))
    return "They have not run." if missing else markdown(["trust region", *(f"{rate:g}" for rate in rates)], rows)


def on_a_cpu(records: Sequence[Record]) -> str:
    """
    Success in percent of the runs of stage 1 that were made on a CPU, and of the same ones on the GPU. A pair shares
    its start, problems and settings, but not its random draws.
    """
    on_gpu, on_cpu, rows = Runs(records), Runs(records, "no-dropout"), []
    for (method, learning_rate), of_seed in on_cpu.records.items():
        for seed, record in of_seed.items():
            other = on_gpu.records.get((method, learning_rate), {}).get(seed)
            texts = [f"{100 * r['success']:.1f}" if r else "" for r in (record, other)]
            rows.append([(LABELS | PULLS)[method], f"{learning_rate:g}", str(seed), *texts])
    return markdown(["trust region", "learning rate", "seed", "CPU", "GPU"], rows)


def every_run(records: Sequence[Record]) -> str:
    """Every run, on 128 held-out problems. *success* is that of two samples of each problem after training."""
    share, rows = lambda value: f"{100 * value:.1f}", []
    for record in sorted(records, key=lambda r: (r["task"], r["seed"])):  # methods stay in the order of the grid
        method = f"{record['method']}, learning_rate {record['varied']['learning_rate']:g}"
        names = [record["task"], str(record["seed"]), method]
        if "error" in record:
            rows.append([*names, "failed", "", "", "", ""])
            continue
        curve = " ".join(share(height) for _, height in record["curve"])
        ends = [f"{share(of[0][1])} → {share(of[-1][1])}" for of in (record["others"][k] for k in (FORM, NUMBER))]
        rows.append([*names, curve, share(record["area"]), share(record["success"]), *ends])
    steps = ", ".join(str(step) for step, _ in next(r["curve"] for r in records if "curve" in r))
    header = ["task", "seed", "method", f"right and stated % at {steps}", "area %", "success %"]
    return markdown([*header, "states an answer %", "last number right %"], rows)


TABLES: dict[str, Table] = {
    "by-rate": by_rate,
    "second-stage": second_stage,
    "fresh": fresh,
    "share": share,
    "pulls": pulls,
    "on-a-cpu": on_a_cpu,
    "runs": every_run,
}


def next_cells(runs: Runs) -> str:
    """YAML of stage 2: every method at its best rate and at the next one."""
    lines = ["  fresh:", f"    seeds: {list(FRESH)}", "    cells:"]
    for method in LABELS:
        best = runs.best(method)
        if best is None:
            raise SystemExit(f"Stage 1 lacks runs of {method}.")
        rates = ", ".join(f"{value:.1e}" for value in (best, RATES[RATES.index(best) + 1]))
        lines.append(f"      - {{task: {TASK}, method: {method}, learning_rate: [{rates}]}}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(next_cells(Runs(read_records(Path(__file__).with_name("results") / "smollm2-rate.jsonl"))))

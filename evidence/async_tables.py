"""The tables of async.yaml and of the truly asynchronous runs."""

from collections.abc import Sequence
from itertools import product

from evidence.tables import Cell, Record, Table, markdown, mean, percent, points, pooled_difference, signed

TASKS = ("label-2", "common")
AGES = (1, 4, 8)  # versions
NAMES = {"troll": "TROLL", "mask": "`binary_tv`", "clip": "TRL's clip"}
PULL = {"pull": "clip and binary pull", "alone": "binary pull alone"}
SEEDS = 5  # that decide


def cell(records: Sequence[Record], task: str, name: str, age: int) -> Cell | None:
    """The deciding runs; `None` until all of them exist."""
    place = task, f"{name}-{age}"
    runs = [r for r in records if "deciding" in r["studies"] and (r["task"], r["method"]) == place]
    return Cell(runs) if len(runs) == SEEDS else None


def leads(records: Sequence[Record], key: str = "area") -> str:
    """TROLL's lead in area, on each task and on both; each method has a tuned learning rate."""
    rows = []
    for age, other in product(AGES, ("clip", "mask")):
        cells = [(cell(records, task, "troll", age), cell(records, task, other, age)) for task in TASKS]
        pairs = [(troll, compared) for troll, compared in cells if troll is not None and compared is not None]
        if len(pairs) == len(TASKS):
            alone = [points(pooled_difference([pair], key)[0]) for pair in pairs]
            rows.append([str(age), NAMES[other], *alone, signed(*pooled_difference(pairs, key))])
    return markdown(["versions old", "TROLL minus", *TASKS, "both"], rows)


def both_tasks(records: Sequence[Record]) -> str:
    """Success after training and area in percent, means over both tasks; each method has a tuned learning rate."""
    rows = []
    for age in AGES:
        texts = []
        for name in NAMES:
            cells = [cell(records, task, name, age) for task in TASKS]
            means = [[100 * c.values(key).mean() for c in cells if c is not None] for key in ("success", "area")]
            texts.append(", ".join(f"{sum(of) / len(of):.0f}" for of in means) if None not in cells else "")
        rows += [[str(age), *texts]] if any(texts) else []
    return markdown(["versions old", *NAMES.values()], rows)


def leads_sampled(records: Sequence[Record]) -> str:
    """The same leads with one sampled completion of each held-out problem in place of greedy decoding."""
    return leads(records, "sampled_area")


def leads_in_success(records: Sequence[Record]) -> str:
    """The same leads in success after training, with greedy decoding."""
    return leads(records, "success")


def reached(records: Sequence[Record]) -> str:
    """What each method reaches at its tuned learning rate, and on which share of tokens it acts."""
    rows = []
    for task, age, name in product(TASKS, AGES, NAMES):
        if (runs := cell(records, task, name, age)) is not None:
            rate = f"{runs.records[0]['varied']['learning_rate']:g}"
            values = [percent(mean(runs, key)) for key in ("area", "success", "sampled_area", "limited")]
            rows.append([task, str(age), NAMES[name], rate, *values])
    header = ["task", "versions old", "trust region", "learning rate", "area %", "success %", "area, sampled %"]
    return markdown([*header, "tokens acted on %"], rows)


def tuning(records: Sequence[Record]) -> str:
    """Area in percent at every learning rate, mean of the two tuning seeds. The largest is bold."""
    rows, rates = [], (2e-4, 4e-4, 8e-4)
    for task, age, name in product(TASKS, AGES, NAMES | PULL):
        of_method = [r for r in records if (r["task"], r["method"]) == (task, f"{name}-{age}")]
        tried = [r for r in of_method if "rates" in r["studies"]]
        if len(tried) == 2 * len(rates):
            cells = [Cell([r for r in tried if r["varied"]["learning_rate"] == rate]) for rate in rates]
            areas = [100 * cell.values("area").mean() for cell in cells]
            texts = [f"**{area:.1f}**" if area == max(areas) else f"{area:.1f}" for area in areas]
            rows.append([task, str(age), (NAMES | PULL)[name], *texts])
    return markdown(["task", "versions old", "trust region", *(f"{rate:g}" for rate in rates)], rows)


def pull(records: Sequence[Record]) -> str:
    """
    Success in percent from samples 8 versions old, with a binary pull, alone or beside a clip of 0.2/1.0, and with the
    others: at tuned learning rates, on two seeds that no other table has.
    """
    rows = []
    for task, name in product(TASKS, NAMES | PULL):
        runs = [r for r in records if "pull" in r["studies"] and (r["task"], r["method"]) == (task, f"{name}-8")]
        if runs:
            successes = [f"{100 * success:.1f}" for success in Cell(runs).values("success")]
            rate = f"{runs[0]['varied']['learning_rate']:g}"
            rows.append([task, (NAMES | PULL)[name], rate, ", ".join(successes), percent(mean(Cell(runs), "area"))])
    return markdown(["task", "trust region", "learning rate", "success of each seed", "area %"], rows)


TABLES: dict[str, Table] = {
    "both-tasks": both_tasks,
    "leads": leads,
    "pull": pull,
    "leads-sampled": leads_sampled,
    "leads-in-success": leads_in_success,
    "reached": reached,
    "tuning": tuning,
}


def served(records: Sequence[Record]) -> str:
    """One run of each method on `label-2` at 4e-4, with TRL's own rollout worker and a vLLM server on the CPU."""
    rows = []
    for record in records:
        shares = [f"{100 * record[key]:.1f}" for key in ("area", "success", "sampled_area", "limited")]
        ages = [f"{record['staleness_mean']:.1f}", f"{record['staleness_max']:.0f}", f"{record['dropped_stale']:.0f}"]
        rows.append([NAMES[record["method"].partition("-")[0]], *shares, *ages])
    header = ["trust region", "area %", "success %", "area, sampled %", "tokens acted on %", "versions old, mean"]
    return markdown([*header, "largest", "samples dropped"], rows)


SERVED_TABLES: dict[str, Table] = {"served": served}

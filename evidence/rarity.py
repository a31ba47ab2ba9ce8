"""The tables of rarity.yaml, and what its rule says of the runs that are there. rarity.md holds what these return."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np

from evidence.results import DEFAULTS
from evidence.tables import (
    Cell,
    Record,
    difference,
    markdown,
    percent,
    pooled_difference,
    rates_of,
    select,
    signed,
    tasks_of,
)
from evidence.tables import mean as mean_of
from troll_trl.evaluation.statistics import Estimate

CLIPS = {"clip": "0.2", "clip-higher": "0.2/0.28", "clip-wide": "0.2/0.5", "clip-wider": "0.2/1.0"}  # their ranges
METHODS = ("troll", *CLIPS, "none", "cispo", "sapo")
FAMILIES = ("label", "sorting-label", "steps")
LEVELS = ("0.5", "2", "8", "30")
TASKS = (*(f"{family}-{level}" for family, level in product(FAMILIES, LEVELS)), "low")
RARE, COMMON = ("0.5", "2"), "30"
TUNED = {task: task if task == "low" else f"{task.rpartition('-')[0]}-2" for task in TASKS}  # by whose runs
TUNING, DECIDING = ("tuning", "tuning-others"), ("deciding", "deciding-others", "deciding-more")
SEEDS, FIRST_SEEDS = range(10, 20), range(10, 15)
TUNING_SEEDS = 2
MARGIN, REACH = 0.02, 0.05  # of area; and of success, below which a task is out of reach


def tuned(records: Sequence[Record], task: str, method: str) -> dict[float, Cell]:
    """The cells of a method's tuning by learning rate, those whose seeds are all there."""
    cells = {
        rate: Cell([r for study in TUNING for r in select(records, study, task, method, learning_rate=rate).records])
        for rate in sorted({rate for study in TUNING for rate in rates_of(records, study)})
    }
    return {rate: cell for rate, cell in cells.items() if len(cell.records) == TUNING_SEEDS}


def whole_tuning(records: Sequence[Record], task: str, methods: Sequence[str]) -> list[list[Cell]] | None:
    """Of each method its cells at all rates; `None` until all are there."""
    rates = {rate for study in TUNING for rate in rates_of(records, study)}
    cells = [tuned(records, task, method) for method in methods]
    return [list(of.values()) for of in cells] if rates and all(of.keys() == rates for of in cells) else None


def best_clip(records: Sequence[Record], task: str) -> str | None:
    """The clip with the largest mean area at its best rate; `None` until the tuning of all four is there."""
    cells = whole_tuning(records, TUNED[task], list(CLIPS))
    if cells is None:
        return None
    areas = [max(cell.values("area").mean() for cell in of) for of in cells]
    return list(CLIPS)[int(np.argmax(areas))]


def out_of_reach(records: Sequence[Record], task: str) -> bool:
    """Whether no method has a success of 5 % at the end of its curve, in the mean of the first seeds that decide."""
    cells = [cell for method in METHODS if (cell := decided(records, task, method, FIRST_SEEDS)).records]
    ends = [np.mean([0.0 if "error" in r else r["curve"][-1][1] for r in cell.records]) for cell in cells]
    return bool(ends) and max(ends) < REACH  # else nobody knows yet


def decided(records: Sequence[Record], task: str, method: str, seeds: Iterable[int] = SEEDS) -> Cell:
    """The runs that decide, of these seeds."""
    names = [*DECIDING, f"deciding-{method}"]
    chosen = {r["seed"]: r for name in names for r in select(records, name, task, method).records}
    return Cell([chosen[seed] for seed in seeds if seed in chosen])


def _pair(records: Sequence[Record], task: str, other: str | None, seeds: Iterable[int]) -> tuple[Cell, Cell] | None:
    """TROLL and the other method, by default the best clip; `None` unless all seeds of both are there."""
    seeds, other = list(seeds), other or best_clip(records, task)
    cells = tuple(decided(records, task, method, seeds) for method in ("troll", other) if method is not None)
    return (cells[0], cells[1]) if [len(cell.records) for cell in cells] == [len(seeds)] * 2 else None


def _leads(pairs: Sequence[tuple[Cell, Cell]]) -> Cell:
    """TROLL's lead in area of every seed, the mean of several tasks, as if each were a run."""
    leads = [{seed: a.by_seed("area")[seed] - b.by_seed("area")[seed] for seed in a.by_seed("area")} for a, b in pairs]
    return Cell([{"seed": seed, "area": float(np.mean([lead[seed] for lead in leads]))} for seed in leads[0]])


def verdict(lead: Estimate, p_value: float) -> str:
    if lead.value >= MARGIN and p_value < 0.01:
        return "confirmed"
    return "refuted" if lead.high < MARGIN else "open"


def verdict_of_none(lead: Estimate, p_value: float) -> str:
    """Of the prediction that there is no lead."""
    if lead.value >= MARGIN and p_value < 0.05:
        return "refuted"
    return "held" if lead.high < MARGIN else "open"


def rule(records: Sequence[Record]) -> str:
    """The four statements of rarity.yaml: what their tasks say that are there, and the verdict where all are."""
    families = {f: [f"{f}-{n}" for n in RARE if not out_of_reach(records, f"{f}-{n}")] for f in FAMILIES}
    rare = [task for tasks in families.values() for task in tasks]
    best = {task: _pair(records, task, None, SEEDS) for task in (*rare, *(f"{f}-{COMMON}" for f in FAMILIES), "low")}

    def growth(family: str) -> tuple[Cell, Cell] | None:
        some, others = [best[task] for task in families[family]], best[f"{family}-{COMMON}"]
        whole = [pair for pair in some if pair is not None]
        return (_leads(whole), _leads([others])) if len(whole) == len(some) and others is not None else None

    statements: list[tuple[str, list[tuple[Cell, Cell] | None], Callable[[Estimate, float], str]]] = [
        ("1. sooner than the best clip where it is rare", [best[task] for task in rare], verdict),
        (
            "2. sooner than a clip of 0.2 where it is rare",
            [_pair(records, t, "clip", FIRST_SEEDS) for t in rare],
            verdict,
        ),
        ("3. the rarer, the larger the lead", [growth(family) for family in families if families[family]], verdict),
        ("4. no lead without rare tokens", [best["low"]], verdict_of_none),
    ]
    rows = []
    for name, pairs, judge in statements:
        there = [pair for pair in pairs if pair is not None]
        result = pooled_difference(there, "area") if there else None
        judged = "" if result is None else judge(*result) if len(there) == len(pairs) else "not yet"
        lead = "not run yet" if result is None else signed(*result)
        rows.append([name, f"{len(there)} of {len(pairs)}", lead, judged])
    return markdown(["statement", "tasks or families", "lead in area, points", "verdict"], rows)


def tuning(records: Sequence[Record]) -> str:
    """Area of every method at each learning rate, in the mean of the tuning seeds; its own rate is bold."""
    rates, rows = rates_of(records, TUNING[0]), []
    for task, method in product(TASKS, METHODS):
        if cells := tuned(records, task, method):
            areas = {rate: 100 * cell.values("area").mean() for rate, cell in cells.items()}
            best = max(areas, key=areas.__getitem__) if len(areas) == len(rates) else None
            texts = [f"{areas[rate]:.1f}" if rate in areas else "" for rate in rates]
            start = 100 * np.mean([cell.values("start_chance").mean() for cell in cells.values()])
            bold = [f"**{text}**" if rate == best else text for rate, text in zip(rates, texts, strict=True)]
            rows.append([task, f"{start:.2f}", method, *bold])
    return markdown(["task", "start %", "method", *(f"{rate:g}" for rate in rates)], rows)


def deciding(records: Sequence[Record]) -> str:
    """Every method on every task, on the seeds that decide, and TROLL's lead."""
    rows = []
    for task in TASKS:
        cells = {method: cell for method in METHODS if (cell := decided(records, task, method)).records}
        goal = max((mean_of(cell, "success").value for cell in cells.values()), default=0.0) / 2
        for method, cell in cells.items():
            leads = ["", ""]
            if method != "troll" and "troll" in cells:
                leads = [signed(*difference(cells["troll"], cell, key)) for key in ("area", "success")]
            rows.append(
                [
                    task,
                    method + (" (best)" if method == best_clip(records, task) else ""),
                    str(len(cell.records)),
                    percent(mean_of(cell, "area")),
                    percent(mean_of(cell, "success")),
                    f"{np.mean([updates_to(r['curve'], goal) for r in cell.records if 'curve' in r]):.0f}",
                    f"{cell.collapses} of {len(cell.records)}",
                    *leads,
                ]
            )
    header = ["task", "method", "seeds", "area %", "success %", "updates to half", "collapsed"]
    return markdown([*header, "TROLL's lead in area", "in success"], rows)


def answer(records: Sequence[Record]) -> str:
    """TROLL's leads on the tasks of the rule, each method at its own rate: those whose runs are all there."""
    rows = []
    for task in (*(f"{family}-{level}" for family, level in product(FAMILIES, (*RARE, COMMON))), "low"):
        best, default = _pair(records, task, None, SEEDS), _pair(records, task, "clip", FIRST_SEEDS)
        if best is not None:
            leads = [signed(*difference(*best, key)) for key in ("area", "success")]
            over_default = signed(*difference(*default, "area")) if default is not None else ""
            start = f"{100 * best[0].values('start_chance').mean():.1f}"
            rows.append([task, start, CLIPS[best_clip(records, task) or ""], *leads, over_default])
    header = ["task", "right at the start %", "best clip", "lead in area, ten seeds", "in success"]
    return markdown([*header, "lead in area over a clip of 0.2, five seeds"], rows)


def at_one_rate(records: Sequence[Record]) -> str:
    """What TROLL and `pessimistic` are ahead of a clip at the same learning rate, in the studies of the remedy."""
    studies = {"remedy-others": "clip-wider", "remedy-wider": "clip-wider", "remedy-sorting": "clip-wide"}
    rows = []
    for study, other in (studies | {"remedy": "clip", "remedy-common": "clip"}).items():
        for task, rate in product(tasks_of(records, study), rates_of(records, study)):
            clip, *cells = (
                select(records, study, task, m, learning_rate=rate) for m in (other, "troll", "pessimistic")
            )
            texts = [
                signed(*difference(cell, clip, key)) if cell.records else ""
                for cell, key in product(cells, ("area", "success"))
            ]
            rows.append([task, f"{rate:g}", CLIPS[other], str(len(clip.records)), *texts])
    rows.sort(key=lambda row: TASKS.index(row[0]) if row[0] in TASKS else len(TASKS))  # those of the rule first
    header = ["task", "learning rate", "clip", "seeds", "TROLL's lead in area", "in success"]
    return markdown([*header, "that of `pessimistic` in area", "in success"], rows)


def _leads_of(
    records: Sequence[Record],
    study: str,
    fixed: str,
    of_fixed: bool = False,
    pooled: bool = False,
    own_rates: bool = False,
) -> str:
    """
    Area and success of every method of a study, and its lead over the `fixed` one, or that one's over it, of every task
    and cell; `pooled` over these too. With `own_rates` methods of different learning rates are set side by side.
    """
    rows, pairs = [], defaultdict(list)
    for name, at in _at_once([record for record in records if study in record["studies"]], own_rates):
        seeds = set.intersection(*(set(cell.by_seed("area")) for cell in at.values()))
        cells = {m: Cell([r for r in cell.records if r["seed"] in seeds]) for m, cell in at.items()}
        for method, cell in cells.items():
            leads = ["", ""]
            if method != fixed and fixed in cells:
                pair = (cells[fixed], cell) if of_fixed else (cell, cells[fixed])
                leads = [signed(*difference(*pair, key)) for key in ("area", "success")]
                pairs[method].append(pair)
            means = [percent(mean_of(cell, key)) for key in ("area", "success")]
            rate = f"{cell.records[0]['varied']['learning_rate']:g}"
            rows.append([name, rate, method, str(len(cell.records)), *means, *leads])
    for method, of_method in pairs.items():
        if pooled and len(of_method) > 1:
            leads = [signed(*pooled_difference(of_method, key)) for key in ("area", "success")]
            rows.append([f"all {len(of_method)}", "", method, "", "", "", *leads])
    header = ["task", "learning rate", "method", "seeds", "area %", "success %"]
    lead = f"{fixed} less this" if of_fixed else f"this less {fixed}"
    return markdown([*header, f"{lead}, area", "success"], rows)


def _at_once(records: Sequence[Record], own_rates: bool) -> list[tuple[str, dict[str, Cell]]]:
    """
    The methods that are set side by side, with the name of their task: of one learning rate, but for `own_rates`, and
    of one number of updates per rollout batch.
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


def updates_to(curve: Sequence[tuple[float, float]], success: float) -> float:
    """Updates until a curve, straight between its points, first has this height; all of them where it never has."""
    for (step, height), (next_step, next_height) in pairwise([(0, 0.0), *curve]):
        if next_height >= success:
            return step + (next_step - step) * (success - height) / (next_height - height)
    return curve[-1][0]


def progress(records: Sequence[Record]) -> str:
    """How many runs are there, of how many machines."""
    machines = sorted({record["machine"] for record in records if "machine" in record})
    failed = sum("error" in record for record in records)
    return f"{len(records)} runs, {failed} of them failed. Machines: {'; '.join(machines)}."


def price(records: Sequence[Record]) -> str:
    """Of the records of `evidence.moves`: what clip and TROLL keep of the gradients of tokens, at the same policies."""
    rows = [
        [
            r["task"],
            r["method"].removesuffix("-recorded"),
            f"{r['low']:g} to {r['high']:g}",
            r["direction"],
            str(r["tokens"]),
            *(f"{100 * r[name]:.1f}" for name in ("part", "clip", "troll")),
        ]
        for r in records
        if "direction" in r
    ]
    header = [
        "task",
        "run with",
        "probability when sampled",
        "moved … its advantage",
        "tokens",
        "part of all gradients, %",
    ]
    return markdown([*header, "clip keeps %", "TROLL keeps %"], rows)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "progress": progress,
    "rule": rule,
    "answer": answer,
    "at-one-rate": at_one_rate,
    "tuning": tuning,
    "deciding": deciding,
    "equal-rate": partial(_leads_of, study="equal-rate", fixed="troll", of_fixed=True),
    "remedies": partial(_leads_of, study="remedies", fixed="clip"),
    "remedy": partial(_leads_of, study="remedy", fixed="clip"),
    "remedy-wider": partial(_leads_of, study="remedy-wider", fixed="clip-wider"),
    "remedy-others": partial(_leads_of, study="remedy-others", fixed="clip-wider"),
    "remedy-sorting": partial(_leads_of, study="remedy-sorting", fixed="clip-wide", pooled=True),
    "remedy-steps": partial(_leads_of, study="remedy-steps", fixed="troll", pooled=True),
    "remedy-common": partial(_leads_of, study="remedy-common", fixed="clip", pooled=True),
    "wording": partial(_leads_of, study="wording", fixed="troll", of_fixed=True),
    "others": partial(_leads_of, study="others", fixed="troll", of_fixed=True, own_rates=True),
    "staleness": partial(_leads_of, study="staleness", fixed="troll", of_fixed=True),
    "staleness-more": partial(_leads_of, study="staleness-more", fixed="troll", of_fixed=True),
    "bound": partial(_leads_of, study="bound", fixed="troll", pooled=True),
    "bound-rare": partial(_leads_of, study="bound-rare", fixed="troll"),
}
MOVES_TABLES: dict[str, Callable[[Sequence[Record]], str]] = {"price": price}

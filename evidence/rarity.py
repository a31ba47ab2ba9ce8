"""The tables of rarity.yaml, and the verdicts that its rule gives."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product

import numpy as np

from evidence.tables import (
    Cell,
    Record,
    Table,
    compare,
    compare_records,
    difference,
    markdown,
    percent,
    points,
    pooled_difference,
    rates_of,
    records_of,
    select,
    signed,
    tasks_of,
)
from evidence.tables import mean as mean_of
from math_answers.evaluation.statistics import Estimate

CLIPS = {"clip": "0.2", "clip-higher": "0.2/0.28", "clip-wide": "0.2/0.5", "clip-wider": "0.2/1.0"}  # their ranges
METHODS = ("troll", *CLIPS, "none", "cispo", "sapo")
FAMILIES = ("label", "sorting-label", "steps")
LEVELS = ("0.5", "2", "8", "30")
TASKS = (*(f"{family}-{level}" for family, level in product(FAMILIES, LEVELS)), "low")
RARE, COMMON = ("0.5", "2"), "30"
TUNED = {task: task if task == "low" else f"{task.rpartition('-')[0]}-2" for task in TASKS}  # the task that is tuned
TUNING, DECIDING = ("tuning", "tuning-others"), ("deciding", "deciding-others", "deciding-more")
SEEDS, FIRST_SEEDS = range(10, 20), range(10, 15)
TUNING_SEEDS = 2
MARGIN, REACH = 0.02, 0.05  # of area; and the success below which a task is out of reach


# -- The rule ---------------------------------------------------------------------------------------------------------


def tuned(records: Sequence[Record], task: str, method: str) -> dict[float, Cell]:
    """The cells of a method's tuning by learning rate. Rates whose seeds are not complete are left out."""
    cells = {
        rate: Cell([r for study in TUNING for r in select(records, study, task, method, learning_rate=rate).records])
        for rate in sorted({rate for study in TUNING for rate in rates_of(records, study)})
    }
    return {rate: cell for rate, cell in cells.items() if len(cell.records) == TUNING_SEEDS}


def whole_tuning(records: Sequence[Record], task: str, methods: Sequence[str]) -> list[list[Cell]] | None:
    """For each method its cells at all rates; `None` until all of them exist."""
    rates = {rate for study in TUNING for rate in rates_of(records, study)}
    cells = [tuned(records, task, method) for method in methods]
    return [list(of.values()) for of in cells] if rates and all(of.keys() == rates for of in cells) else None


def best_clip(records: Sequence[Record], task: str) -> str | None:
    """The clip with the largest mean area at its best rate; `None` until the tuning of all four is complete."""
    cells = whole_tuning(records, TUNED[task], list(CLIPS))
    if cells is None:
        return None
    areas = [max(cell.values("area").mean() for cell in of) for of in cells]
    return list(CLIPS)[int(np.argmax(areas))]


def out_of_reach(records: Sequence[Record], task: str) -> bool:
    """Whether every method ends its curve below a success of 5 %, on average over the first deciding seeds."""
    cells = [cell for method in METHODS if (cell := decided(records, task, method, FIRST_SEEDS)).records]
    ends = [np.mean([0.0 if "error" in r else r["curve"][-1][1] for r in cell.records]) for cell in cells]
    return bool(ends) and max(ends) < REACH  # without a run nothing is known


def decided(records: Sequence[Record], task: str, method: str, seeds: Iterable[int] = SEEDS) -> Cell:
    """The deciding runs of these seeds."""
    names = [*DECIDING, f"deciding-{method}"]
    chosen = {r["seed"]: r for name in names for r in select(records, name, task, method).records}
    return Cell([chosen[seed] for seed in seeds if seed in chosen])


def _pair(records: Sequence[Record], task: str, other: str | None, seeds: Iterable[int]) -> tuple[Cell, Cell] | None:
    """TROLL and the other method, by default the best clip; `None` until both have all seeds."""
    seeds, other = list(seeds), other or best_clip(records, task)
    cells = tuple(decided(records, task, method, seeds) for method in ("troll", other) if method is not None)
    return (cells[0], cells[1]) if [len(cell.records) for cell in cells] == [len(seeds)] * 2 else None


def _leads(pairs: Sequence[tuple[Cell, Cell]]) -> Cell:
    """TROLL's lead in area for each seed, averaged over several tasks, as if each were a run."""
    leads = [{seed: a.by_seed("area")[seed] - b.by_seed("area")[seed] for seed in a.by_seed("area")} for a, b in pairs]
    return Cell([{"seed": seed, "area": float(np.mean([lead[seed] for lead in leads]))} for seed in leads[0]])


def verdict(lead: Estimate, p_value: float) -> str:
    if lead.value >= MARGIN and p_value < 0.01:
        return "confirmed"
    return "refuted" if lead.high < MARGIN else "open"


def verdict_of_none(lead: Estimate, p_value: float) -> str:
    """The verdict on the prediction that there is no lead."""
    if lead.value >= MARGIN and p_value < 0.05:
        return "refuted"
    return "held" if lead.high < MARGIN else "open"


def rule(records: Sequence[Record]) -> str:
    """
    The four statements of the rule: TROLL's lead in area, each method at its tuned learning rate, and the verdict. A
    verdict waits until all tasks or families of its statement have their runs.
    """
    families = {f: [f"{f}-{n}" for n in RARE if not out_of_reach(records, f"{f}-{n}")] for f in FAMILIES}
    rare = [task for tasks in families.values() for task in tasks]
    best = {task: _pair(records, task, None, SEEDS) for task in (*rare, *(f"{f}-{COMMON}" for f in FAMILIES), "low")}

    def growth(family: str) -> tuple[Cell, Cell] | None:
        some, others = [best[task] for task in families[family]], best[f"{family}-{COMMON}"]
        whole = [pair for pair in some if pair is not None]
        return (_leads(whole), _leads([others])) if len(whole) == len(some) and others is not None else None

    clip = [_pair(records, task, "clip", FIRST_SEEDS) for task in rare]
    grown = [growth(family) for family in families if families[family]]
    statements: list[tuple[str, list[tuple[Cell, Cell] | None], Callable[[Estimate, float], str]]] = [
        ("1. Rare: faster than the best clip", [best[task] for task in rare], verdict),
        ("2. Rare: faster than a clip of 0.2", clip, verdict),
        ("3. The rarer, the larger the lead over the best clip", grown, verdict),
        ("4. No rare token: no lead over the best clip", [best["low"]], verdict_of_none),
    ]
    rows = []
    for name, pairs, judge in statements:
        complete = [pair for pair in pairs if pair is not None]
        result = pooled_difference(complete, "area") if complete else None
        waits = f"not yet, {len(complete)} of {len(pairs)}"
        judged = "" if result is None else judge(*result) if len(complete) == len(pairs) else waits
        rows.append([name, "not run yet" if result is None else signed(*result), judged])
    return markdown(["statement", "lead in area, points", "verdict"], rows)


# -- Tables -----------------------------------------------------------------------------------------------------------


def answer(records: Sequence[Record]) -> str:
    """
    TROLL's lead in points on every task of the rule, each method at its tuned learning rate: over the best clip (ten
    seeds) and over a clip of 0.2 (five seeds).
    """
    rows = []
    for task in (*(f"{family}-{level}" for family, level in product(FAMILIES, (*RARE, COMMON))), "low"):
        best, default = _pair(records, task, None, SEEDS), _pair(records, task, "clip", FIRST_SEEDS)
        if best is not None:
            leads = [points(difference(*best, key)[0]) for key in ("area", "success")]
            over_default = points(difference(*default, "area")[0]) if default is not None else ""
            start = f"{100 * best[0].values('start_chance').mean():.1f}"
            rows.append([task, start, CLIPS[best_clip(records, task) or ""], *leads, over_default])
    return markdown(["task", "right at the start %", "best clip", "area", "success", "area, clip of 0.2"], rows)


def families(records: Sequence[Record]) -> str:
    """
    TROLL's lead in area on the rare tasks (0.5 and 2 %), each method at its tuned learning rate: with one deciding
    token, `label` and `sorting-label` together, and with two, `steps`. Ten seeds over the best clip, else five.
    """
    rows = []
    for name, of_name in {"one token": FAMILIES[:2], "two tokens": FAMILIES[2:]}.items():
        tasks = [f"{family}-{level}" for family, level in product(of_name, RARE)]
        texts = []
        for other, seeds in ((None, SEEDS), ("clip", FIRST_SEEDS), ("none", FIRST_SEEDS)):
            pairs = [pair for task in tasks if (pair := _pair(records, task, other, seeds)) is not None]
            texts.append(signed(*pooled_difference(pairs, "area")) if len(pairs) == len(tasks) else "not run yet")
        rows.append([name, *texts])
    return markdown(["deciding tokens", "over the best clip", "over a clip of 0.2", "over no limit"], rows)


def tuning(records: Sequence[Record]) -> str:
    """
    Area in percent at each learning rate, mean of the two tuning seeds. Bold is the rate that is chosen for a method,
    once all five exist. *start* is the probability of the rewarded solutions before training.
    """
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
    """
    Every method on the deciding seeds, at its tuned learning rate, and TROLL's lead. *Updates to half* are the updates
    to half of the best method's mean success. A run *collapsed* if it failed or its curve ends below its start.
    """
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


def at_one_rate(records: Sequence[Record]) -> str:
    """The leads of TROLL and of `pessimistic` over a clip, all at one learning rate, in the studies of the remedy."""
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
    rows.sort(key=lambda row: TASKS.index(row[0]) if row[0] in TASKS else len(TASKS))  # the rule's tasks first
    header = ["task", "learning rate", "clip", "seeds", "TROLL's lead in area", "in success"]
    return markdown([*header, "lead of `pessimistic` in area", "in success"], rows)


def staleness_all(records: Sequence[Record]) -> str:
    """With 16 updates per rollout batch: the seeds of `staleness` and of `staleness-more` together."""
    found = [r for study in ("staleness", "staleness-more") for r in records_of(records, study)]
    old = [r for r in found if r["varied"].get("steps_per_generation") == 16 and r["method"] != "none"]
    return compare_records(old, "troll", of_fixed=True)


def updates_to(curve: Sequence[tuple[float, float]], success: float) -> float:
    """Updates until a curve, straight between its points, first has this height; all of them if it never has."""
    for (step, height), (next_step, next_height) in pairwise([(0, 0.0), *curve]):
        if next_height >= success:
            return step + (next_step - step) * (success - height) / (next_height - height)
    return curve[-1][0]


def progress(records: Sequence[Record]) -> str:
    """How many runs there are, and on which machines they were made."""
    machines = sorted({record["machine"] for record in records if "machine" in record})
    failed = sum("error" in record for record in records)
    return f"{len(records)} runs, {failed} of them failed. Machines: {'; '.join(machines)}."


def price(records: Sequence[Record]) -> str:
    """
    What a clip of 0.2 and TROLL keep of the gradients of tokens, at the policies of two runs at 4e-4, seed 100. *Keep*
    is the part of the gradient of every token's unlimited ratio, the regression included, weighted by its length. The
    first update on a rollout batch, in which nothing has moved, is left out.
    """
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
    header = ["task", "run with", "probability when sampled", "moved … its advantage", "tokens"]
    return markdown([*header, "part of all gradients %", "clip keeps %", "TROLL keeps %"], rows)


TABLES: dict[str, Table] = {
    "progress": progress,
    "rule": rule,
    "answer": answer,
    "families": families,
    "tuning": tuning,
    "deciding": deciding,
    "at-one-rate": at_one_rate,
    "equal-rate": compare(
        "The first deciding seeds at the clips' tuned learning rate, half of TROLL's.",
        "equal-rate",
        "troll",
        of_fixed=True,
    ),
    "others": compare(
        "All methods at their tuned learning rates, on five seeds of one machine.",
        "others",
        "troll",
        of_fixed=True,
        own_rates=True,
    ),
    "staleness": compare(
        "The number of updates per rollout batch varies. All methods have the clips' tuned learning rate.",
        "staleness",
        "troll",
        of_fixed=True,
    ),
    "staleness-more": compare(
        "Five more seeds with 16 updates per rollout batch.", "staleness-more", "troll", of_fixed=True
    ),
    "staleness-all": staleness_all,
    "bound": compare(
        "A wider bound, `troll-wide` with ε = 0.5, where about a third is right at the start.",
        "bound",
        "troll",
        pooled=True,
    ),
    "bound-rare": compare("A wider bound where 1 % is right at the start.", "bound-rare", "troll"),
    "remedies": compare(
        "Three changes of TROLL. `pessimistic` takes the smaller of two surrogates, `signal` regresses on no token "
        "without an advantage, `multiplier` weights the regression by η / (1 + η).",
        "remedies",
        "clip",
    ),
    "remedy": compare("`pessimistic` again, on ten other seeds.", "remedy", "clip"),
    "remedy-wider": compare("`pessimistic` and the best clip.", "remedy-wider", "clip-wider"),
    "remedy-others": compare("`pessimistic` and the best clip on two other tasks.", "remedy-others", "clip-wider"),
    "remedy-sorting": compare(
        "`pessimistic` and the best clip in the second family.", "remedy-sorting", "clip-wide", pooled=True
    ),
    "remedy-steps": compare(
        "`pessimistic` in the third family, at TROLL's tuned learning rate.", "remedy-steps", "troll", pooled=True
    ),
    "remedy-common": compare(
        "`pessimistic` where about a third is right at the start.", "remedy-common", "clip", pooled=True
    ),
    "wording": compare(
        "Twelve random letters precede every solution. The reward ignores them.", "wording", "troll", of_fixed=True
    ),
}
MOVES_TABLES: dict[str, Table] = {"price": price}

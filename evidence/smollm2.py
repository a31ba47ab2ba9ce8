"""The tables of smollm2.yaml."""

from collections.abc import Sequence

import numpy as np

from evidence.tables import Cell, Record, Table, compare, difference, markdown, signed

TASK, CELL = "no-dropout", {"learning_rate": 1e-3}
LEADS = ("area", "success")
FORM, NUMBER = "answer_format_reward", "last_number_reward"


def _share(value: float | np.floating) -> str:
    return f"{100 * value:.1f}"


def every_run(records: Sequence[Record]) -> str:
    """
    Every run, on 128 held-out problems. *success* is that of two samples of each problem after training. An answer that
    is stated but wrong, or right but not stated, earns nothing. The task `word-problems` has LoRA's dropout of 0.05.
    """
    rows = []
    for record in sorted(records, key=lambda r: (r["task"], r["seed"])):  # methods stay in the order of the grid
        changed = [f"{key} {value:g}" for key, value in record["varied"].items() if CELL.get(key) != value]
        names = [record["task"], str(record["seed"]), ", ".join([record["method"], *changed])]
        if "error" in record:
            rows.append([*names, "failed", "", "", "", ""])
            continue
        curve = " ".join(_share(height) for _, height in record["curve"])
        ends = [f"{_share(of[0][1])} → {_share(of[-1][1])}" for of in (record["others"][k] for k in (FORM, NUMBER))]
        rows.append([*names, curve, _share(record["area"]), _share(record["success"]), *ends])
    steps = next((", ".join(str(step) for step, _ in r["curve"]) for r in records if "curve" in r), "")
    header = ["task", "seed", "method", f"right and stated % at {steps}", "area %", "success %"]
    return markdown([*header, "states an answer %", "last number right %"], rows)


def leads(records: Sequence[Record]) -> str:
    """Means over seeds, without dropout and at one learning rate, and TROLL's lead at either bound."""
    cells: dict[str, Cell] = {}
    for record in records:
        bound = record["varied"].get("kl_bound")
        if record["task"] == TASK and record["varied"] == CELL | ({} if bound is None else {"kl_bound": bound}):
            name = record["method"] if bound is None else f"{record['method']}, kl_bound {bound:g}"
            cells[name] = Cell([*(cells[name].records if name in cells else []), record])
    troll = [name for name in cells if name.startswith("troll")]
    rows = []
    for method, cell in cells.items():
        finished = [record["others"] for record in cell.records if "others" in record]
        texts = ["" if method in troll else _lead(cells[name], cell, key) for name in troll for key in LEADS]
        rows.append(
            [
                method,
                str(len(cell.records)),
                *(_share(cell.values(key).mean()) for key in LEADS),
                *(_share(np.mean([others[key][-1][1] for others in finished])) for key in (FORM, NUMBER)),
                *texts,
            ]
        )
    header = ["method", "seeds", "area %", "success %", "states an answer %", "last number right %"]
    return markdown([*header, *(f"{name} minus this, {key}" for name in troll for key in LEADS)], rows)


def _lead(cell: Cell, other: Cell, key: str) -> str:
    """`cell` minus `other`: without an interval if there is one pair, empty if there is none."""
    pairs = len(cell.by_seed(key).keys() & other.by_seed(key).keys())
    if pairs == 0:
        return ""
    lead, p_value = difference(cell, other, key)
    return f"{100 * lead.value:+.1f}" if pairs == 1 else signed(lead, p_value)


TABLES: dict[str, Table] = {
    "runs": every_run,
    "leads": leads,
    "age": compare(
        "16 updates per rollout batch, without dropout. `rule` is the projection with a bound of 0.2, `wide` with 0.5, "
        "`tv` is DPPO's mask with a total variation of 0.15.",
        "age",
        "clip-wider",
    ),
}

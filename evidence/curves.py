"""
Draw the pictures of docs/curves.md into docs/figures/, from evidence/results/curves-logged.jsonl.

    python -m evidence.run evidence/curves.yaml
    python -m evidence.curves --read

With `--read`, that file is first made from the logs of the runs. It keeps what the grid does not run: the collapse of a
real model, from a study that has left the tree (README.md, "Earlier studies").
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from evidence.grid import read_grid
from evidence.results import read_records, write_records
from evidence.run import REPOSITORY

HERE = Path(__file__).parent
LOGGED = HERE / "results" / "curves-logged.jsonl"
FIGURES = REPOSITORY / "docs" / "figures"
HELD_OUT = "eval_rewards/math_accuracy_reward/mean"
FRACTIONS = {"projected tokens": "troll/projected_fraction", "clipped tokens": "clip_ratio/region_mean"}


def read_logged() -> list[dict[str, Any]]:
    """For each run its `name`; `success`, one of [`FRACTIONS`] and `entropy`, lists of pairs of updates and values."""
    records, grid = [], read_grid(HERE / "curves.yaml")
    for run in grid.runs("curves"):
        file = REPOSITORY / "outputs" / "evidence" / "curves" / "runs" / run.folder / "trainer_state.json"
        log = json.loads(file.read_text())["log_history"]
        method = grid.methods[run.method].settings.get("method", "troll")
        of_method = "clipped tokens" if method == "clip" else "projected tokens"
        keys = {"success": HELD_OUT, of_method: FRACTIONS[of_method], "entropy": "entropy"}
        found = {
            name: [[line["step"], round(line[key], 4)] for line in log if key in line] for name, key in keys.items()
        }
        records.append({"name": run.method, **found})
    kept = [record for record in read_records(LOGGED) if record["name"] not in grid.methods]
    return records + kept


def draw(record: dict[str, Any], file: Path) -> None:
    """A picture of 400 pixels, whose letters are legible at that width."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(4, 2.2), layout="constrained")
        axes = figure.subplots()
        for name, style in {"projected tokens": "C1-", "clipped tokens": "C3-", "success": "C0o-"}.items():
            if name in record:
                steps, values = zip(*record[name], strict=True)
                axes.plot(steps, [100 * value for value in values], style, markersize=3, linewidth=1.2, label=name)
        axes.set(xlabel="updates", ylabel="%", ylim=(-2, 102))
        axes.grid(alpha=0.3)
        if "entropy" in record:
            right = axes.twinx()
            right.plot(*zip(*record["entropy"], strict=True), color="0.5", linewidth=0.8)
            right.set_ylim(-0.03, 1.53)
            right.set_ylabel("entropy, nats", color="0.4")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", action="store_true", help="read the logs of the runs first")
    if parser.parse_args().read:
        write_records(LOGGED, read_logged())
    for record in read_records(LOGGED):
        draw(record, FIGURES / f"curves-{record['name']}.png")


if __name__ == "__main__":
    main()

"""
How far tokens move within a rollout batch, and which of them lose gradient: a summary of what the runs of the study
`moves` recorded, its figure and its table.

    python -m evidence.run evidence/rarity.yaml --resume --only label-2/troll-recorded/ label-2/clip-recorded/
    python -m evidence.moves evidence/rarity.yaml

The second line summarises the runs whose folders are on this machine into evidence/results/rarity-moves.jsonl. It keeps
what that file has of other runs, and makes figure and table from the file.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evidence.figures import STYLES
from evidence.grid import Grid, read_grid
from evidence.report import fill_pages
from evidence.results import describe, read_records, run_of, write_records
from evidence.variants import CLIP_RANGE, KL_BOUND, MOVES

HERE = Path(__file__).resolve().parent
STUDY = "moves"
EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 1.0)  # of the bins of old probability
QUANTILES = (0.1, 0.5, 0.9)
KEPT = ("clip", "troll")
WIDE_EDGES = (0.0, 0.1, 0.6, 1.0)  # of the table
# Clips by name: the upper end of the range, and how it is drawn
RANGES: dict[str, tuple[float, dict[str, Any]]] = {
    "clip, 0.2": (CLIP_RANGE, {"color": "C3", "linestyle": "-"}),
    "clip, 0.2/1.0": (1.0, {"color": "C1", "linestyle": "--"}),
}


def largest_in_ball(old: np.ndarray, kl_bound: float = KL_BOUND) -> np.ndarray:
    """
    The largest probability that a token of probability `old` in (0, 1) has anywhere in the ball KL(p‖q) ≤ `kl_bound`.
    There all other tokens keep their proportions, and the KL is that of two outcomes.
    """
    low, high = old.copy(), np.ones_like(old)
    for _ in range(60):
        middle = (low + high) / 2
        others = np.where(middle < 1, (1 - middle) * np.log(np.maximum(1 - middle, 1e-300) / (1 - old)), 0.0)
        inside = middle * np.log(middle / old) + others <= kl_bound
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return low


def summarise(tokens: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """
    Summarise the columns that `evidence.variants.Recording` wrote.

    Returns:
        Two kinds of rows. For each bin of old probability: the quantiles of new over old probability, over tokens of
        positive advantage at the last update of their rollout batch. For each wide bin, once for tokens that have moved
        with their advantage and once for those against it: their part of the length of all gradients, and what clip and
        TROLL keep of it, in all updates but the first on a rollout batch.
    """
    last, advantage, length = tokens["update"] == tokens["update"].max(), tokens["advantage"], tokens["length"]
    for low, high, within in _bins(tokens["old"], EDGES):
        moved = within & last & (advantage > 0)
        if moved.any():
            factors = np.quantile(tokens["new"][moved] / tokens["old"][moved], QUANTILES).tolist()
            yield {"low": low, "high": high, "tokens": int(moved.sum()), "factors": factors}
    stale, against = tokens["update"] > 0, (tokens["new"] - tokens["old"]) * advantage < 0
    for low, high, within in _bins(tokens["old"], WIDE_EDGES):
        for direction, chosen in (("with", within & stale & ~against), ("against", within & stale & against)):
            if length[chosen].sum() > 0:
                part = float(length[chosen].sum() / length[stale].sum())
                kept = {name: float(np.average(tokens[name][chosen], weights=length[chosen])) for name in KEPT}
                yield {
                    "low": low,
                    "high": high,
                    "direction": direction,
                    "tokens": int(chosen.sum()),
                    "part": part,
                    **kept,
                }


def _bins(old: np.ndarray, edges: Sequence[float]) -> Iterator[tuple[float, float, np.ndarray]]:
    for low, high in pairwise(edges):
        yield low, high, (old >= low) & ((old < high) | (high == 1))


def draw(records: Sequence[dict[str, Any]], task: str, file: Path) -> None:
    """By which factor a token's probability may grow within a rollout batch, and by which it did in two runs."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    old = np.geomspace(EDGES[0], 0.999, 400)
    axes.plot(old, largest_in_ball(old) / old, color="C0", linewidth=2.2)
    axes.text(0.006, 8.2, f"TROLL's KL ball, ε = {KL_BOUND:g}", color="C0")
    for name, (width, style) in RANGES.items():
        axes.plot(old, np.minimum(1 + width, 1 / old), **style)
        axes.text(0.0011, 1.03 * (1 + width), name, color=style["color"], va="bottom", fontsize=9)
    for method, shift in (("troll", 0.94), ("clip", 1.06)):
        moves = [r for r in records if r["task"] == task and r["method"] == f"{method}-recorded" and "factors" in r]
        if not moves:  # not run yet
            continue
        middles = np.array([(r["low"] * r["high"]) ** 0.5 for r in moves]) * shift
        low, middle, high = np.array([r["factors"] for r in moves]).T
        style = STYLES[method] | {"linestyle": "", "linewidth": 1.5, "capsize": 2}
        axes.errorbar(middles, middle, [middle - low, high - middle], **style)
    axes.text(0.055, 5.0, "tokens of a run\nwith TROLL: ●", color="C0", fontsize=9, ha="left", va="bottom")
    axes.text(0.2, 2.55, "with the clip of 0.2: ■", color="C3", fontsize=9, ha="left", va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="probability when sampled", ylabel="growth within a rollout batch")
    ticks = [0.5, 1, 2, 4, 8, 16]
    axes.set_yticks(ticks, [f"× {tick:g}" for tick in ticks])
    axes.set_xticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])  # exponents would be too small to read
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def read_runs(grid: Grid, folder: Path) -> list[dict[str, Any]]:
    """The summaries of the study's runs whose folders are on this machine."""
    records = []
    for run in grid.runs(STUDY):
        file = folder / "runs" / run.folder / MOVES
        if file.exists():
            with np.load(file) as tokens:
                records += [describe(run) | part for part in summarise(tokens)]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="YAML file of the study")
    options = parser.parse_args()
    grid, name = read_grid(options.grid.resolve()), options.grid.stem
    results = HERE / "results" / f"{name}-moves.jsonl"
    records = read_runs(grid, HERE.parent / "outputs" / "evidence" / name)
    known = read_records(results) if results.exists() else []
    records += [r for r in known if run_of(r) not in {run_of(record) for record in records}]  # of other machines
    write_records(results, records)
    fill_pages(f"{name}-moves", records)
    draw(records, grid.studies[STUDY].tasks[0], HERE / "figures" / f"{name}-moves.png")


if __name__ == "__main__":
    main()

"""Draw TROLL's projection of one token's distribution over a vocabulary of three, with `troll_trl.project`.

    python examples/simplex.py --output docs/figures/simplex.png

The projection is the distribution nearest to the policy in the KL ball around the old policy.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from troll_trl import project
from troll_trl.trust_region.projection import kl_divergence

OLD = torch.tensor([0.50, 0.32, 0.18], dtype=torch.float64)  # q
NEW = torch.tensor([0.12, 0.16, 0.72], dtype=torch.float64)  # p
CORNERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]], dtype=torch.float64)  # of tokens A, B and C
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito
LOOKS = {  # of the three distributions, distinguished by shape and hatch as well as by colour
    "old policy q": {"color": BLUE, "marker": "o", "hatch": ""},
    "policy p": {"color": ORANGE, "marker": "s", "hatch": "////"},
    "projected π": {"color": GREEN, "marker": "D", "hatch": "xx"},
}


def kl_on_triangle(reference: torch.Tensor, points: int = 500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A grid `(points, points)` of the plane, and KL(· ‖ reference) on it; NaN outside of the simplex."""
    x, y = torch.meshgrid(torch.linspace(0, 1, points), torch.linspace(0, 0.87, points), indexing="xy")
    third = y.double() / CORNERS[2, 1]
    second = x.double() - third / 2
    probabilities = torch.stack([1 - second - third, second, third], dim=-1)
    inside = (probabilities >= 0).all(-1)
    kl = kl_divergence(probabilities.clamp(min=0).log(), reference.log().expand_as(probabilities))
    return x.numpy(), y.numpy(), kl.masked_fill(~inside, float("nan")).numpy()


def draw_triangle(axes: Axes, distributions: dict[str, torch.Tensor], kl_bound: float) -> None:
    old, new, projected = distributions.values()
    x, y, kl = kl_on_triangle(old)
    axes.contourf(x, y, kl, levels=[0, kl_bound], colors=[BLUE], alpha=0.15)
    ball = axes.contour(x, y, kl, levels=[kl_bound], colors=[BLUE], linewidths=1.3)
    nearest = kl_divergence(projected.log(), new.log()).item()
    level = axes.contour(*kl_on_triangle(new), levels=[nearest], colors=[ORANGE], linewidths=1.0, linestyles=":")

    # The projections for all bounds: from the old policy to the new one
    kl_old_to_new = kl_divergence(new.log(), old.log()).item()
    bounds = torch.linspace(0.03, 1, 40).square() * kl_old_to_new
    path = torch.stack([old, *(project(new.log(), old.log(), float(bound)).log_probs.exp() for bound in bounds)])
    (line,) = axes.plot(*(path @ CORNERS).T, color="0.35", linewidth=1.2, linestyle="--")

    axes.plot(*CORNERS[[0, 1, 2, 0]].T, color="black", linewidth=1.0)
    for token, corner, shift in zip("ABC", CORNERS.tolist(), ((-0.05, -0.03), (0.05, -0.03), (0, 0.05)), strict=True):
        axes.text(corner[0] + shift[0], corner[1] + shift[1], token, ha="center", va="center", weight="bold")
    for (name, point), shift in zip(distributions.items(), ((-9, -14), (9, 3), (7, -16)), strict=True):
        look = {"color": LOOKS[name]["color"], "marker": LOOKS[name]["marker"]}
        axes.plot(*(point @ CORNERS), linestyle="", markersize=8, markeredgecolor="black", zorder=5, **look)
        where = (point @ CORNERS).tolist()
        axes.annotate(name.split()[-1], where, xytext=shift, textcoords="offset points", size=12, style="italic")
    handles = [ball.legend_elements()[0][0], level.legend_elements()[0][0], line]
    labels = [
        f"KL(·‖q) = ε = {kl_bound:g} nats",
        f"KL(·‖p) = {nearest:.3f} nats, touches at π",
        "projections for all ε",
    ]
    axes.legend(handles, labels, loc="upper left", frameon=False, borderaxespad=0)
    axes.set(aspect="equal", xlim=(-0.5, 1.07), ylim=(-0.06, 0.93))
    axes.set_axis_off()


def draw_bars(axes: Axes, distributions: dict[str, torch.Tensor]) -> None:
    for place, (name, probabilities) in enumerate(distributions.items()):
        x = np.arange(3) + 0.27 * (place - 1)
        look = {"color": LOOKS[name]["color"], "hatch": LOOKS[name]["hatch"], "edgecolor": "white"}
        bars = axes.bar(x, probabilities.numpy(), width=0.25, label=name, **look)
        axes.bar_label(bars, fmt="%.2f", padding=2, size=8)
    axes.set_xticks(range(3), ["token A", "token B", "token C"])
    axes.set_ylabel("probability")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center")


def draw(kl_bound: float, file: Path) -> None:
    projection = project(NEW.log(), OLD.log(), kl_bound)
    distributions = dict(zip(LOOKS, (OLD, NEW, projection.log_probs.exp()), strict=True))
    # One above the other: the smallest text, of 8 points, then has 8 pixels on a screen 400 pixels wide
    figure = Figure(figsize=(5.6, 7), layout="constrained")
    triangle, bars = figure.subplots(2, 1, height_ratios=(1.2, 1))
    draw_triangle(triangle, distributions, kl_bound)
    draw_bars(bars, distributions)
    bars.set_title(
        f"KL(p‖q) = {projection.policy_kl:.3f}, KL(π‖q) = {projection.kl:.3f} nats, η = {projection.eta:.2f}", size=10
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/figures/simplex.png"), help="the PNG to write")
    parser.add_argument("--kl_bound", type=float, default=0.05, help="ε, in nats (default 0.05)")
    options = parser.parse_args()
    if not 0 < options.kl_bound < float("inf"):
        parser.error(f"--kl_bound must be positive and finite, got {options.kl_bound}.")
    draw(options.kl_bound, options.output)
    print(f"Figure: {options.output}")


if __name__ == "__main__":
    main()

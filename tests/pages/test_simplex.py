"""examples/simplex.py, the picture of the method: it is drawn, and shows the nearest point."""

import runpy

import numpy as np
import pytest
from repository import ROOT

SCRIPT = ROOT / "examples" / "simplex.py"


@pytest.fixture(scope="module")
def simplex():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("bound", [0.05, 5.0])
def test_picture_is_drawn(simplex, tmp_path, bound):
    simplex["draw"](bound, tmp_path / "figures" / "simplex.png")
    assert (tmp_path / "figures" / "simplex.png").read_bytes().startswith(b"\x89PNG")


def test_picture_shows_the_nearest_point_of_the_ball(simplex):
    """Brute force over the grid that is drawn: no point of the ball around q is nearer to p than π."""
    old, new = simplex["OLD"], simplex["NEW"]
    *_, to_old = simplex["kl_on_triangle"](old)
    *_, to_new = simplex["kl_on_triangle"](new)
    projected = simplex["project"](new.log(), old.log(), 0.05).log_probs
    nearest = float((projected.exp() * (projected - new.log())).sum())
    assert to_new[to_old <= 0.05].min() == pytest.approx(nearest, abs=2e-3)
    assert to_new[to_old <= 0.05].min() >= nearest - 1e-9
    assert np.nanmax(to_new) == pytest.approx(float(-new.min().log()), abs=0.05)  # at the corner of the rarest token

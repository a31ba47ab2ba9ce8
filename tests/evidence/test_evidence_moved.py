"""Numbers of the studies that pages of docs/ had, and that have no generated table."""

import re

import numpy as np
import pytest
from evidence_grids import EVIDENCE

from evidence import age, rate
from evidence.results import read_records


def section(page: str, start: str, end: str) -> str:
    return " ".join((EVIDENCE / page).read_text().partition(start)[2].partition(end)[0].split())


def test_what_a_rate_that_is_too_high_costs():
    text = section("rate.md", "## Every rate", "\n## ")
    runs = rate.Runs(read_records(EVIDENCE / "results" / "rate.jsonl"))
    loss = {}
    for updates in (8, 32):
        troll = rate._means(runs, rate.RARE, updates, rate.TROLL)
        others = np.max([rate._means(runs, rate.RARE, updates, other) for other in rate.OTHERS], axis=0)
        for name, means in (("troll", troll), ("other", others)):
            at = dict(zip(rate.RATES, means, strict=True))
            loss[name, updates] = [at[2e-4] - at[4e-4], at[2e-4] - at[8e-4]]
    assert max(loss["troll", updates][0] for updates in (8, 32)) <= 2
    assert "13 points with 8 updates and 14 with 32" in text
    assert [round(loss["troll", updates][1]) for updates in (8, 32)] == [13, 14]
    twice, fourfold = ([round(loss["other", updates][i]) for updates in (8, 32)] for i in (0, 1))
    assert f"loses {twice[0]} and {twice[1]} points at 4e-4, and {fourfold[0]} and {fourfold[1]} at 8e-4" in text


def test_a_bound_that_is_too_tight_projects_many_tokens():
    text = section("age.md", "A bound that is too tight", "\n## ")
    rows = re.findall(r"\| ([\d.]+) \| ([\d., ]+) \| ([\d, ]+) \|", text)
    records = [
        r
        for r in read_records(EVIDENCE / "results" / "age.jsonl")
        if r["seed"] in age.TUNING_SEEDS
        and r["varied"]["learning_rate"] == 4e-4
        and r["varied"].get("steps_per_generation") == 32
    ]
    assert [bound for bound, *_ in rows] == ["0.05", "0.2", "0.5", "0.8"]
    for bound, shares, areas in rows:
        for key, factor, told in (("projected_fraction", 1, shares), ("area", 100, areas)):
            means = []
            for task in age.RARE:
                of_cell = [r[key] for r in records if (r["task"], r["method"]) == (task, f"projection-{bound}")]
                assert len(of_cell) == 2
                means.append(factor * np.mean(of_cell))
            unit = 1 if key == "area" else 0.01
            assert list(map(float, told.split(", "))) == pytest.approx(means, abs=0.51 * unit), (bound, key)

"""The pictures of docs/curves.md, against the runs that they show."""

import re

import pytest
from repository import ROOT

from evidence.curves import LOGGED, read_records
from evidence.grid import read_grid

DOCS = ROOT / "docs"
PAGE = (DOCS / "curves.md").read_text(encoding="utf-8")
RECORDS = {record["name"]: record for record in read_records(LOGGED)}


def test_the_page_shows_every_run():
    runs = {run.method for run in read_grid(DOCS.parent / "evidence" / "curves.yaml").runs("curves")}
    assert RECORDS.keys() == runs | {"collapse-smollm2"}
    assert set(re.findall(r"figures/curves-([\w-]+)\.png", PAGE)) == RECORDS.keys()


def firsts(name):
    """The projected fraction at the first update of every rollout batch of eight."""
    return [value for update, value in RECORDS[name]["projected tokens"] if update % 8 == 1]


def test_the_signs_that_the_page_names():
    largest = {name: max(v for _, v in r["projected tokens"]) for name, r in RECORDS.items() if "projected tokens" in r}
    end = {name: record["success"][-1][1] for name, record in RECORDS.items()}
    assert set(firsts("healthy")) == {0.0} and end["healthy"] == pytest.approx(0.65, abs=0.005)
    assert min(firsts("disagreement")) > 0.0
    assert largest["bound-too-tight"] > 0.5 and end["bound-too-tight"] < end["healthy"] - 0.2
    assert largest["bound-too-wide"] == largest["idle"] == 0.0
    assert max(v for _, v in RECORDS["rate-too-high"]["success"]) < 0.2
    assert (RECORDS["collapse"]["success"][0][1], end["collapse"]) == pytest.approx((0.37, 0.01), abs=0.005)
    assert [round(v, 2) for _, v in RECORDS["collapse-smollm2"]["success"]][2::2] == [0.52, 0.01]

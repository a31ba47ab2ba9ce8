"""The study of bounds and the age of the data: its rule, its verdicts, and what its page says."""

import re

import numpy as np
import pytest
from evidence_grids import EVIDENCE, cells_of, grid_of

from evidence import age
from evidence.rate import RARE
from evidence.results import describe, read_records


def records_of(areas):
    """All runs of age.yaml: the area is `areas(n, method, rate)`, of one seed a little more than of another."""
    records = []
    for run in grid_of("age").all_runs({}):
        varied = dict(run.varied)
        area = areas(varied["steps_per_generation"], run.method, varied["learning_rate"]) + 0.001 * (run.seed % 3 - 1)
        records.append(describe(run) | {"area": area, "success": area})
    return records


def wide_is_best(n, method, rate):
    """The best bound of the projection grows with the square of the age; other geometries do not care."""
    geometry, _, bound = method.partition("-")
    distance = abs(np.log(float(bound) / (0.05 * (n / 8) ** 2))) if geometry == "projection" else 0.0
    return 0.5 - 0.02 * distance


def test_the_rule_chooses_its_exponent():
    assert age.Runs(records_of(wide_is_best)).exponent() == 2
    assert [age.rule(n) for n in age.AGES] == ["projection-0.05", "projection-0.2", "projection-0.8"]
    assert [age.rule(n, 1) for n in age.AGES] == ["projection-0.05", "projection-0.1", "projection-0.2"]
    assert age.Runs(records_of(lambda n, method, rate: 0.1 if method == age.rule(n) else 0.2)).exponent() == 1
    lacking = [r for r in records_of(wide_is_best) if (r["method"], r["task"]) != ("projection-0.2", "label-2")]
    assert age.Runs(lacking).exponent() is None


def test_the_best_bound_waits_for_all_bounds():
    records = records_of(wide_is_best)
    assert [age.Runs(records).best("steps-2", n, "projection") for n in age.AGES] == [age.rule(n) for n in age.AGES]
    lacking = [r for r in records if (r["method"], r["seed"], r["task"]) != ("projection-0.5", 103, "steps-2")]
    runs = age.Runs(lacking)
    assert runs.best("steps-2", 32, "projection") is None and runs.best("label-2", 32, "projection") is not None


@pytest.mark.usefixtures("few_flips")
def test_the_rule_holds_if_a_tuned_bound_gains_less_than_two_points():
    rows = {row[0]: row[1:] for row in cells_of(age.verdicts(records_of(wide_is_best)))}
    assert [row[-1] for row in rows.values()] == ["holds"] * 3 and rows["8"][0].startswith("-2.3 [")
    tuned_gains = lambda n, method, rate: 0.5 + 0.1 * (method != age.rule(n))
    rows = {row[0]: row[1:] for row in cells_of(age.verdicts(records_of(tuned_gains)))}
    assert {n: row[-1] for n, row in rows.items()} == {"8": "fails", "16": "fails", "32": "fails"}
    assert rows["32"][0].startswith("+3.3 ["), "on one of three tasks another bound was tuned"
    without_seed = [r for r in records_of(wide_is_best) if r["seed"] != 29]
    assert not cells_of(age.verdicts(without_seed))


def test_every_table_is_made_of_no_runs():
    for table in age.TABLES.values():
        assert table([]) and table.__doc__


@pytest.mark.parametrize("n", age.AGES)
def test_pairs_that_age_judges_are_of_one_machine_and_one_start(n):
    pairs = age.Runs(read_records(EVIDENCE / "results" / "age.jsonl")).pairs(n)
    assert len(pairs) == len(RARE)
    for pair in pairs:
        first, second = (
            {record["seed"]: (record["start"], record["machine"]) for record in cell.records} for cell in pair
        )
        assert first == second, pair[0].records[0]["task"]


def test_the_page_says_what_the_tables_say():
    records = read_records(EVIDENCE / "results" / "age.jsonl")
    page = " ".join((EVIDENCE / "age.md").read_text().split())
    assert age.Runs(records).exponent() == 2
    rows = {row[0]: row[1:] for row in cells_of(age.verdicts(records))}
    assert all(row[-1] == "holds" for row in rows.values())
    first = lambda text: float(text.split()[0])
    gained, lost = max(first(row[0]) for row in rows.values()), [-first(rows[n][1]) for n in ("8", "16")]
    assert f"gains at most {gained:.1f} points of area, and loses {lost[1]:.0f} points at the end with 8 and 16" in page
    assert round(lost[0]) == round(lost[1])
    areas = {row[0]: list(map(float, row[1:])) for row in cells_of(age.best_bounds(records))}
    won = [two - one for one, two in zip(areas["the rule, k = 1"], areas["the rule, k = 2"], strict=True)]
    assert f"won over 1 by {won[2]:.1f} points of area with 32 updates and {won[1]:.1f} with 16" in page


def test_a_bound_that_is_too_tight_projects_many_tokens():
    text = (EVIDENCE / "age.md").read_text().partition("A bound that is too tight")[2].partition("\n## ")[0]
    rows = re.findall(r"\| ([\d.]+) \| ([\d., ]+) \| ([\d, ]+) \|", text)
    cells = age.Runs(read_records(EVIDENCE / "results" / "age.jsonl")).cells
    assert [bound for bound, *_ in rows] == ["0.05", "0.2", "0.5", "0.8"]
    for bound, shares, areas in rows:
        for key, factor, told in (("projected_fraction", 1, shares), ("area", 100, areas)):
            of_tasks = [cells[task, 32, f"projection-{bound}", age.RATE] for task in RARE]
            means = [factor * np.mean([runs[seed][key] for seed in age.TUNING_SEEDS]) for runs in of_tasks]
            unit = 1 if key == "area" else 0.01
            assert list(map(float, told.split(", "))) == pytest.approx(means, abs=0.51 * unit), (bound, key)

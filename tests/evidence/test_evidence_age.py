"""The study of bounds and the age of the data: its choices, its verdicts, and the cells of its later stages."""

import dataclasses
import functools
import re
from itertools import product

import numpy as np
import pytest
import yaml
from evidence_grids import EVIDENCE, grid_of

from evidence import age, tables
from evidence.grid import Study
from evidence.results import describe, read_records


@functools.cache
def age_records(areas):
    """
    All runs of age.yaml and of the studies that follow from it: the area is `areas(task, n, method, rate)`, of the
    projection with a little noise. Round after round, since each stage's cells follow from the one before.
    """
    grid = grid_of("age")
    studies = {name: study for name, study in grid.studies.items() if name.startswith("bounds-")}
    for _ in range(4):
        records = []
        for run in dataclasses.replace(grid, studies=studies).all_runs({}):
            varied = dict(run.varied)
            area = areas(run.task, varied["steps_per_generation"], run.method, varied["learning_rate"])
            area += 0.001 * (run.seed % 3 - 1) * run.method.startswith("projection")
            records.append(describe(run) | {"area": area, "success": area})
        text = age.next_studies(age.Runs(records))
        studies |= {name: Study(**study) for name, study in yaml.safe_load(f"studies:\n{text}")["studies"].items()}
    return records


def wide_is_best(task, n, method, rate):
    """The projection at 0.8 or 0.5 is best at 32, at a rate of 2e-4 or beyond; others are 0.05 to 0.1 below."""
    geometry, _, bound = method.partition("-")
    if geometry == "projection":
        ideal = 0.05 * (n / 8) ** 2
        return 0.5 - 0.02 * abs(np.log(float(bound) / ideal)) - 0.01 * abs(np.log2(rate / 2e-4))
    return {"clip": 0.45, "tv": 0.42, "kl": 0.4}.get(geometry, 0.1) - (0.2 if task in age.COMMON else 0.0)


def test_the_rule_chooses_its_exponent_and_an_edge_gets_one_more_rate():
    runs = age.Runs(age_records(wide_is_best))
    assert runs.exponent() == 2
    assert [age.rule(n, 2) for n in age.AGES] == ["projection-0.05", "projection-0.2", "projection-0.8"]
    assert [age.rule(n, 1) for n in age.AGES] == ["projection-0.05", "projection-0.1", "projection-0.2"]
    for n in age.AGES:
        assert runs.choice("label-2", n, "rule") == (age.rule(n, 2), 2e-4)
        assert runs.area("label-2", n, age.Choice(age.rule(n, 2), 1e-4)) is not None, "the edge was run"
    narrow = age.Runs(age_records(lambda task, n, method, rate: 0.1 if method == "projection-0.8" else 0.2))
    assert narrow.exponent() == 1


def test_nothing_is_chosen_before_its_tuning_is_there():
    records = age_records(wide_is_best)
    lacking = [r for r in records if (r["method"], r["seed"], r["task"]) != ("projection-0.5", 103, "steps-2")]
    runs = age.Runs(lacking)
    assert runs.exponent() == 2 and runs.choice("steps-2", 32, "projection") is None
    assert runs.choice("label-2", 32, "projection") is not None and runs.common_bound(32, "projection") is None
    lacking = [r for r in records if not (r["method"] == "projection-0.2" and r["task"] == "label-2")]
    assert age.Runs(lacking).exponent() is None
    assert "deciding" not in age.next_studies(age.Runs([]))


@pytest.mark.usefixtures("few_flips")
def test_the_verdicts_are_those_that_were_written_down():
    rows = [row.strip("| ").split(" | ") for row in age.verdicts(age_records(wide_is_best)).splitlines()[2:]]
    assert [row[-1] for row in rows[:6]] == ["holds"] * 6 and [row[-1] for row in rows[6:9]] == ["holds"] * 3
    assert rows[0][1].startswith("+5.0 [")

    def behind(task, n, method, rate):
        return 0.6 if method.startswith("tv") and n == 32 else wide_is_best(task, n, method, rate)

    rows = [row.strip("| ").split(" | ") for row in age.verdicts(age_records(behind)).splitlines()[2:]]
    verdicts = {row[0]: row[-1] for row in rows}
    assert verdicts["1. 32 updates, rare: TROLL minus mask, total variation"] == "fails"
    assert verdicts["1. 16 updates, rare: TROLL minus mask, total variation"] == "holds"
    assert verdicts["3. 32 updates, common: mask, total variation minus TROLL"] == "fails"
    assert verdicts["3. 8 updates, common: mask, total variation minus TROLL"] == "holds"


@pytest.mark.usefixtures("few_flips")
def test_what_an_old_rollout_batch_costs_is_the_difference_of_the_choices():
    def older_is_worse(task, n, method, rate):
        lost = {"projection": 0.05, "clip": 0.1, "tv": 0.15, "kl": 0.2}.get(method.partition("-")[0], 0.0)
        return wide_is_best(task, n, method, rate) - lost * (n == 32)

    rows = [row.strip("| ").split(" | ") for row in age.costs(age_records(older_is_worse)).splitlines()[2:]]
    found = {(where, region): area.partition(" ")[0] for where, region, area, _ in rows}
    assert found[("rare", "TROLL, the rule")] == found[("common", "TROLL, the rule")] == "-5.0"
    assert found[("rare", "clip")] == found[("common", "clip")] == "-10.0" and found[("rare", "mask, KL")] == "-20.0"
    assert len(rows) == 9


@pytest.mark.parametrize(
    ("tasks", "n"), [(age.RARE, 8), (age.RARE, 16), (age.RARE, 32), (age.COMMON, 8), (age.COMMON, 32)]
)
def test_pairs_that_age_judges_are_of_one_machine_and_one_start(tasks, n):
    runs = age.Runs(read_records(EVIDENCE / "results" / "age.jsonl"))
    names = ("rule", *(age.GEOMETRIES if tasks == age.RARE else age.OTHERS))
    for of_task in zip(*(runs.cells(tasks, n, name) for name in names), strict=True):
        starts = [{record["seed"]: (record["start"], record["machine"]) for record in cell.records} for cell in of_task]
        assert all(start == starts[0] for start in starts), of_task[0].records[0]["task"]


def test_the_pages_say_what_two_rare_tokens_decide():
    """On `steps-2` with 32 updates the clip and both masks are ahead, in area and at the end."""
    runs = age.Runs(read_records(EVIDENCE / "results" / "age.jsonl"))
    lead = {
        (n, key, other): -100 * tables.pooled_difference(age._pairs(runs, ("steps-2",), n, "rule", other), key)[0].value
        for n, key, other in product((16, 32), ("area", "success"), age.OTHERS)
    }
    ends = {key: sorted(lead[32, key, other] for other in age.OTHERS) for key in ("area", "success")}
    (low, _, high), (low_end, _, high_end) = ends["area"], ends["success"]
    root = EVIDENCE.parent
    study, page = (" ".join((root / name).read_text().split()) for name in ("evidence/README.md", "evidence/age.md"))
    assert f"[a tuned clip and masks lead](age.md#other-trust-regions) by {low:.1f} to {high:.1f} points" in study
    assert f"lead by {low:.1f} to {high:.1f} points of area, and by {low_end:.1f} to {high_end:.1f} of success" in page
    assert f"the KL mask leads there by {lead[16, 'area', 'kl']:.1f} points of area" in page


def test_a_bound_that_is_too_tight_projects_many_tokens():
    text = (EVIDENCE / "age.md").read_text().partition("A bound that is too tight")[2].partition("\n## ")[0]
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

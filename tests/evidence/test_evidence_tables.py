"""The statistics, tables, figures and pages of the study in evidence/."""

import re
from itertools import product

import numpy as np
import pytest
from evidence_grids import EVIDENCE, cells_of

from evidence import figures, report, smollm2_rate, tables
from evidence.results import read_records


def cell(*successes, start=0.3, key="success"):
    return tables.Cell([{"seed": seed, key: value, "start": start} for seed, value in enumerate(successes)])


def test_difference_is_paired_by_seed_and_agrees_with_an_independent_permutation_test():
    a, b = cell(0.5, 0.62, 0.55, 0.61, 0.58), cell(0.45, 0.6, 0.56, 0.5, 0.5)
    value, p_value = tables.difference(a, tables.Cell(b.records[::-1]))
    pairs = a.values("success") - b.values("success")
    assert value.value == pytest.approx(pairs.mean())
    flipped = np.array([np.mean(signs * pairs) for signs in product([-1, 1], repeat=5)])
    assert p_value == np.mean(np.abs(flipped) >= pairs.mean() - 1e-12)
    drawn = np.array([pairs[list(rows)].mean() for rows in product(range(5), repeat=5)])  # every resample there is
    assert [value.low, value.high] == pytest.approx(list(np.quantile(drawn, [0.025, 0.975])), abs=3e-3)


def test_flips_of_equal_sums_count_whatever_their_rounding():
    """0.3 - 0.1 - 0.2 is not 0.0 to a computer."""
    _, p_value = tables.difference(cell(0.8, 0.4, 0.3), cell(0.5, 0.5, 0.5))
    assert p_value == 1
    assert tables.difference(cell(0.6), cell(0.5))[1] == 1  # one pair says nothing


def test_tasks_of_one_and_of_five_seeds_have_the_same_weight():
    """One loses what five win: a lead of 0, and no sign is flipped to a smaller one. By seeds it were 4 of 6."""
    value, p_value = tables.pooled_difference([(cell(0.4), cell(0.5)), (cell(*[0.6] * 5), cell(*[0.5] * 5))])
    assert value.value == pytest.approx(0) and p_value == 1


def test_a_sum_halfway_between_two_steps_of_rounding_is_as_far_out_as_itself():
    """The sum of these areas was rounded down, and that of the flip that changes nothing up: its p-value was 0."""
    leads = [-73, -54, -153, -254, -19, -308, -37, -124, -140, -63]
    lead = [cell(*(n / 4096 for n in of), key="area") for of in (leads, [0] * 10)]
    assert tables.difference(*lead, "area")[1] == pytest.approx(2 / 2**10)


def test_the_p_value_of_many_pairs_is_drawn():
    pairs = np.random.default_rng(3).normal(0.01, 0.03, size=30)
    _, p_value = tables.difference(cell(*(0.5 + pairs)), cell(*[0.5] * 30))
    signs = np.random.default_rng(5).choice([-1, 1], size=(50_000, 30))
    assert 0.01 < p_value == pytest.approx(np.mean(np.abs(signs @ pairs) >= abs(pairs.sum())), abs=0.01)


def test_a_p_value_that_draws_cannot_tell_from_a_smaller_one_is_not_stated_as_equal():
    """Thirty pairs of one sign have a p-value of 2e-9, and of all draws none is as large."""
    assert tables.signed(*tables.difference(cell(*[0.6] * 30), cell(*[0.5] * 30))).endswith("p < 7.6e-06")
    assert tables.signed(*tables.difference(cell(*[0.6] * 16), cell(*[0.5] * 16))).endswith("p = 3.1e-05")  # exact


def test_a_run_that_failed_has_a_success_of_0():
    runs = tables.Cell([*({"seed": seed, "success": 0.4} for seed in (0, 2)), {"seed": 1, "error": "x"}])
    assert runs.by_seed("success") == {0: 0.4, 1: 0.0, 2: 0.4}


def record(study, task, method, seed, success, **varied):
    result = {"success": success, "area": success / 2, "start": 0.3, "curve": [[0, 0.3], [8, success]]}
    return {"studies": [study], "task": task, "method": method, "varied": varied, "seed": seed} | result


def smollm2_rate_records():
    """TROLL is best at 3e-4 and keeps half of it at 1e-3; all others are best at 1e-3 and keep a tenth. Runs on a CPU,
    where all is 0, do not count."""
    heights = {"troll": (0.1, 0.4, 0.2, 0.0)}
    records = []
    for method in smollm2_rate.LABELS:
        cells = zip(smollm2_rate.RATES, heights.get(method, (0.1, 0.2, 0.5, 0.05)), strict=False)
        for (rate, height), seed in product(cells, (*smollm2_rate.FIRST, *smollm2_rate.FRESH)):
            of_seed = height * (1 + 0.01 * (seed % 2))
            records.append(record("s", "h100", method, seed, of_seed, learning_rate=rate))
            records.append(record("s", "no-dropout", method, seed, 0.0, learning_rate=rate))
    return records


def test_smollm2s_rates_are_chosen_on_two_seeds_and_compared_on_others():
    records = smollm2_rate_records()
    first = [r for r in records if r["seed"] in smollm2_rate.FIRST]
    cells = smollm2_rate.next_cells(smollm2_rate.Runs(first)).splitlines()
    assert cells[3] == "      - {task: h100, method: troll, learning_rate: [3.0e-04, 1.0e-03]}"
    assert cells[6] == "      - {task: h100, method: clip-0.2, learning_rate: [1.0e-03, 3.0e-03]}"
    assert smollm2_rate.second_stage(first) == "Stage 2 has not run: nothing is decided."
    with pytest.raises(SystemExit, match=r"Stage 1 lacks runs of troll"):
        smollm2_rate.next_cells(smollm2_rate.Runs(first[1:]))
    row = smollm2_rate.second_stage(records).splitlines()[2].strip("| ").split(" | ")
    assert row[:4] == ["TROLL, ε 0.05", "clip 0.2", "+40.0 [+40.0, +40.0]", "holds"]
    assert row[4].startswith("-10.0 [-10.1, -10.") and row[5] == "fails"
    last = [r for r in records if (r["method"], r["seed"]) != ("tv-0.15", 20)]
    assert "holds so far (5 of 6 seeds)" in smollm2_rate.second_stage(last)


def test_the_pages_have_the_success_of_smollm2():
    records = read_records(EVIDENCE / "results" / "smollm2-rate.jsonl")
    runs = smollm2_rate.Runs(records)
    at = {m: [100 * cell.values("success").mean() for cell in runs.fresh(m)] for m in smollm2_rate.LABELS}
    best, later = ([f"{at[m][i]:.0f}" for m in smollm2_rate.LABELS] for i in (0, 1))
    readme = " ".join((EVIDENCE.parent / "README.md").read_text().split())
    troll, wide, _, clip, wide_clip, mask = (" and ".join(pair) for pair in zip(best, later, strict=True))
    assert f"TROLL {troll} %, with `kl_bound: 0.2` (added later) {wide} %; TV mask {mask} %, all from 3e-4" in readme
    assert f"; from 1e-3: clips {clip} %, {wide_clip} % |" in readme
    assert {runs.best(m) for m in ("troll", "troll-0.2", "tv-0.15")} == {3e-4}
    assert {runs.best(m) for m in ("clip-0.2", "clip-0.2-1.0")} == {1e-3}


def test_the_page_has_both_seeds_of_the_pull_on_smollm2():
    runs = smollm2_rate.Runs(read_records(EVIDENCE / "results" / "smollm2-rate.jsonl"), "no-dropout")
    page = " ".join((EVIDENCE / "README.md").read_text().split())
    at = lambda method, rate, seed: 100 * runs.cell(method, rate, [seed]).values("success")[0]
    of = lambda method, seed: [f"{at(method, rate, seed):.0f}" for rate in (3e-4, 1e-3, 3e-3)]
    said = "at 3e-4, 1e-3 and 3e-3: {}, {} and {} %, on a second seed {}, {} and {}."
    assert said.format(*of("pull", 13), *of("pull", 14)) in page
    assert "TROLL: {}, {} and {} %, then {}, {} and {}.".format(*of("troll", 13), *of("troll", 14)) in page
    clips = {seed: [f"{at(m, 1e-3, seed):.0f}" for m in ("clip-0.2", "clip-0.2-1.0")] for seed in (13, 14)}
    assert clips[14][0] == clips[14][1]
    assert "Clips at 1e-3: {} and {} %, then both {};".format(*clips[13], clips[14][0]) in page
    assert not any(at(m, 3e-3, 13) for m in ("clip-0.2", "clip-0.2-1.0", "tv-0.15"))
    assert at("pull", 1e-3, 13) - at("troll", 1e-3, 13) > 15 and at("pull", 3e-3, 14) > 5


def test_the_page_says_what_the_real_model_did():
    records = read_records(EVIDENCE / "results" / "smollm2-rate.jsonl")
    runs, page = smollm2_rate.Runs(records), " ".join((EVIDENCE / "README.md").read_text().split())
    mean = lambda cell, key="success": 100 * cell.values(key).mean()
    kept = {
        name: f"{100 * mean(after) / mean(best):.0f}"
        for name in smollm2_rate.LABELS
        for best, after in [runs.fresh(name)]
    }
    assert f"the default {kept['troll']} %, they {kept['clip-0.2']} and {kept['clip-0.2-1.0']}, which is" in page
    rows = {
        tuple(row[:2]): row[2:]
        for row in cells_of(smollm2_rate.second_stage(records))
        if row[0] == smollm2_rate.LABELS["troll"]
    }
    whole = lambda text: re.sub(r"\d+\.\d", lambda number: f"{float(number[0]):.0f}", text)
    lead = [whole(row[0]).replace("+", "").replace("-", "−") for row in rows.values()]
    assert f"{lead[0]} and {lead[1]} percentage points more" in page and f"keeps {kept['tv-0.15']}: {lead[2]}" in page
    assert [row[1] for row in rows.values()] == ["holds", "holds", "fails"]
    at_3e_3 = {name: mean(runs.cell(name, 3e-3, smollm2_rate.FIRST)) for name in smollm2_rate.LABELS}
    assert f"the default solved {at_3e_3.pop('troll'):.0f} %, all others at most {max(at_3e_3.values()):.1f}" in page
    area = {name: f"{mean(runs.fresh(name)[0], 'area'):.1f}" for name in smollm2_rate.LABELS}
    said = "area {} and {} at 1e-3; at 3e-4 the default {}, a bound of 0.2 {}, the mask {}."
    assert said.format(*(area[m] for m in ("clip-0.2", "clip-0.2-1.0", "troll", "troll-0.2", "tv-0.15"))) in page
    starts = [100 * record["start"] for record in records if record["task"] == smollm2_rate.TASK]
    assert f"at the start {min(starts):.0f} to {max(starts):.0f} % of its answers do" in page


def test_the_example_of_lora_has_the_settings_and_the_success_of_the_study():
    runs = smollm2_rate.Runs(read_records(EVIDENCE / "results" / "smollm2-rate.jsonl"))
    text = (EVIDENCE.parent / "examples" / "lora.py").read_text()
    (rate,), (bound,) = (re.findall(rf"{name}=([\d.e-]+),", text) for name in ("learning_rate", "kl_bound"))
    assert float(rate) == runs.best(f"troll-{bound}") == runs.best("troll")
    cell = runs.cell(f"troll-{bound}", float(rate), smollm2_rate.FRESH)
    start, ends = 100 * cell.values("start").max(), 100 * cell.values("success")
    said = f"from at most {np.ceil(start):.0f} % to between {ends.min():.0f} and {ends.max():.0f} %, on average to"
    assert f"{said} {ends.mean():.0f} %." in " ".join(text.split())
    choosing = (EVIDENCE.parent / "docs" / "choosing.md").read_text()
    assert {runs.best(name) for name in ("clip-0.2", "clip-0.2-1.0")} == {1e-3} and runs.best("tv-0.15") == float(rate)
    text = f"SmolLM2-135M, took {rate} with the projection or a mask, and 1e-3 with clips"
    assert text in " ".join(choosing.split())


@pytest.mark.slow
@pytest.mark.parametrize("grid", sorted(figures.FIGURES))
def test_every_figure_is_drawn_and_kept(grid, tmp_path):
    records = read_records(EVIDENCE / "results" / f"{grid}.jsonl")
    for name, (draw, study) in figures.FIGURES[grid].items():
        draw(records, study, tmp_path / f"{name}.png")
        assert (EVIDENCE / "figures" / f"{name}.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(report.TABLES) - {"gsm8k"}))  # never run yet
def test_the_pages_hold_the_tables_of_the_results(name):
    pages = [page.read_text() for page in report.PAGES]
    records = read_records(EVIDENCE / "results" / f"{name}.jsonl")
    command = f"run: python -m evidence.report evidence/{name}.yaml"
    assert (EVIDENCE / "tables" / f"{name}.md").read_text() == report.table_page(name, records), command
    assert [report.fill_in(text, name, records) for text in pages] == pages, command


def test_every_mark_of_a_page_names_a_table_and_every_table_has_a_caption():
    pages = [page.read_text() for page in report.PAGES]
    marks = {mark for text in pages for mark in re.findall(r"<!-- ([\w-]+) ([\w-]+) -->", text)}
    known = {(grid, name) for grid, made_by in report.TABLES.items() for name in made_by}
    assert ("rate", "verdicts") in marks <= known
    captions = [table.__doc__ or "" for made_by in report.TABLES.values() for table in made_by.values()]
    assert all(caption.strip().endswith(".") for caption in captions)


def test_a_page_of_tables_is_made_whole_from_the_records():
    records = read_records(EVIDENCE / "results" / "async-served.jsonl")
    page = report.table_page("async-served", records)
    assert (
        page.startswith("# Tables of `async-served`\n") and "\n## served\n\nOne run of each method on `label-2`" in page
    )
    assert report.TABLES["async-served"]["served"](records) in page


@pytest.mark.slow
def test_no_token_leaves_the_bound_in_any_run():
    """README.md says so of all runs with the projection."""
    runs = [
        (name, r)
        for name in ("age", "rate", "peers", "smollm2-rate")
        for r in read_records(EVIDENCE / f"results/{name}.jsonl")
    ]
    projected = [(name, r) for name, r in runs if r.get("kl_max") is not None]
    assert {name for name, _ in projected} == {"age", "rate", "peers", "smollm2-rate"}
    for name, r in projected:
        bound = float(r["method"].rpartition("-")[2]) if "-" in r["method"] else 0.05
        if name in ("rate", "peers"):  # which have `auto`
            bound = {8: 0.05, 32: 0.8}[r["varied"]["steps_per_generation"]]
        assert r["kl_max"] <= bound * (1 + 1e-3)

"""The arithmetic of the study's tables, against scipy and every resample there is, and its figure."""

from itertools import product

import numpy as np
import pytest
import scipy.stats

from evidence.adaptive_statements import STARTS, Results, difference_row, share_table
from evidence.figures import draw, mean_curve
from evidence.groups import estimate, group_runs
from evidence.tables import table_page

PLAN = {
    "groups": {"both, 8": {"tasks": ["a", "b"], "steps_per_generation": [8]}},
    "methods": {"TROLL": ["troll"], "clip": ["clip-0.2", "clip-0.5"]},
    "seeds": [1, 2, 3],
    "against": ["TROLL"],
}


def record(task, method, rate, seed, success, steps=8, iterations=None, **others):
    varied = {"learning_rate": rate, "steps_per_generation": steps}
    varied |= {} if iterations is None else {"num_iterations": iterations}
    return {"task": task, "method": method, "varied": varied, "seed": seed, "success": success} | others


def records_of(task, method, rate, *successes, **others):
    return [record(task, method, rate, seed, value, **others) for seed, value in enumerate(successes, 1)]


RECORDS = [
    *records_of("a", "troll", 1e-4, 0.5, 0.6, 0.4),
    *records_of("a", "troll", 2e-4, 0.2, 0.3, 0.1),
    *records_of("b", "troll", 1e-4, 0.1, 0.2, 0.0),
    *records_of("b", "troll", 2e-4, 0.3, 0.5, 0.4),
    *records_of("a", "clip-0.2", 1e-4, 0.4, 0.6, 0.3),
    *records_of("b", "clip-0.5", 1e-4, 0.2, 0.3, 0.1),
]


def test_an_interval_is_that_of_every_resample():
    values = np.array([0.5, 0.62, 0.55, 0.61, 0.58])
    one = estimate([values])
    drawn = [values[list(rows)].mean() for rows in product(range(5), repeat=5)]
    assert one == pytest.approx((values.mean(), *np.quantile(drawn, [0.025, 0.975])), abs=2e-3)
    # Tasks of equal weight, whatever their number of seeds; the spread of their mean is that of independent means
    two = estimate([values, np.linspace(0.0, 1.0, 50)])
    assert two.value == pytest.approx((values.mean() + 0.5) / 2)
    spread = np.hypot(values.std() / 5**0.5, np.linspace(0, 1, 50).std() / 50**0.5) / 2
    assert (two.high - two.low) / 2 == pytest.approx(scipy.stats.norm.ppf(0.975) * spread, rel=0.05)
    assert estimate([np.array([0.3])]) == (pytest.approx(0.3),) * 3


def test_cells_best_rates_and_differences():
    group = group_runs(RECORDS, PLAN)["both, 8"]
    assert group.best("TROLL", "a").rate == 1e-4 and group.best("TROLL", "b").rate == 2e-4
    assert group.mean("TROLL", None).value == pytest.approx((0.5 + 0.4) / 2)
    assert group.mean("TROLL", 1e-4).value == pytest.approx((0.5 + 0.1) / 2)
    assert group.mean("clip", 2e-4) is None, "a task lacks it"
    lead = group.lead("clip", "TROLL", 1e-4)
    pairs = [np.array([-0.1, 0.0, -0.1]), np.array([0.1, 0.1, 0.1])]
    assert lead == pytest.approx(estimate(pairs)) and lead.value == pytest.approx((-0.2 / 3 + 0.1) / 2)
    assert group.lead("clip", "TROLL", None).value == pytest.approx((-0.2 / 3 - 0.2) / 2)


def test_a_failed_run_counts_as_0_and_a_stopped_or_unreported_one_not_at_all():
    others = [
        record("a", "clip-0.2", 1e-4, 4, 1.0),  # of a seed that is not reported
        record("a", "clip-0.2", 1e-4, 3, None, error="its time was up"),
        record("a", "clip-0.2", 1e-4, 2, None, error="OutOfMemoryError"),
        record("a", "clip-0.2", 1e-4, 1, 0.4, steps=32),
        record("a", "clip-0.2", 1e-4, 1, 0.6),
        record("b", "clip-0.5", 1e-4, 1, 0.5),
    ]
    assert group_runs(others, PLAN)["both, 8"].mean("clip", 1e-4).value == pytest.approx((0.3 + 0.5) / 2)
    of_group = PLAN | {"groups": {"a": {"tasks": ["a"], "steps_per_generation": [8], "seeds": [4]}}}
    assert group_runs(others, of_group)["a"].mean("clip", 1e-4).value == 1


REUSE = [
    # The same rates and seeds in two schedules and in two sizes of update; seeds 8 and 9 choose
    *(record("a", "troll", 1e-4, seed, 0.6, 8, 4) for seed in (8, 9)),
    *(record("a", "troll", 1e-4, seed, 0.5, 2, 4) for seed in (8, 9)),
    *(record("a", "troll", 1e-4, seed, 0.9, 8, 8) for seed in (8, 9)),
    record("a", "troll", 2e-4, 8, 0.7, 8, 4),  # one of the two seeds that choose
    *(record("a", "trl-16", 1e-4, seed, 0.4, 1, 1) for seed in (8, 9)),
    *(record("a", "trl-64", 1e-4, seed, 0.3, 1, 1) for seed in (8, 9)),
    *records_of("a", "troll", 1e-4, 0.1, 0.2, 0.3, steps=8, iterations=4),
    *records_of("a", "troll", 1e-4, 0.2, 0.3, 0.4, steps=2, iterations=4),
    *records_of("a", "troll", 1e-4, 0.8, 0.8, 0.8, steps=8, iterations=8),
    *records_of("a", "trl-16", 1e-4, 0.1, 0.1, 0.1, steps=1, iterations=1),
    *records_of("a", "trl-64", 1e-4, 0.9, 0.9, 0.9, steps=1, iterations=1),
]
REUSE_PLAN = {
    "groups": {"a": {"tasks": ["a"], "num_iterations": [1, 4]}, "a, 8 uses": {"tasks": ["a"], "num_iterations": [8]}},
    "methods": {
        "TROLL": ["troll"],
        "TROLL 2x4": {"methods": ["troll"], "steps_per_generation": [2], "num_iterations": [4]},
        "TRL's default": ["trl-16", "trl-64"],
    },
    "choosing": [8, 9],
    "seeds": [1, 2, 3],
}


def test_schedules_and_sizes_of_update_are_settings_of_their_own_and_seeds_choose_among_them():
    """Runs that differed only in `num_iterations`, or in the method of the grid, overwrote each other in silence."""
    groups = group_runs(REUSE, REUSE_PLAN)
    values = {(name, method): groups[name].mean(method, None) for name in groups for method in groups[name].runs}
    assert {key: round(mean.value, 6) for key, mean in values.items()} == {
        ("a", "TROLL"): 0.2, ("a", "TROLL 2x4"): 0.3, ("a", "TRL's default"): 0.1, ("a, 8 uses", "TROLL"): 0.8,
    }  # fmt: skip
    page = table_page("name", REUSE, REUSE_PLAN)
    assert "| 0.0001 steps_per_generation 8 |" in page and "| 0.0001 trl-16 |" in page
    assert "on seeds 8, 9" in page and "| a | TROLL 2x4 | 0.0001 | 3 | 0 |" in page
    every = group_runs(REUSE, REUSE_PLAN | {"groups": {"a": {"tasks": ["a"]}}})  # 8x4 and 8x8 in one group
    assert len(every["a"].runs["TROLL"]) == 3
    page = table_page("name", REUSE, REUSE_PLAN | {"groups": {"a": {"tasks": ["a"]}}})
    assert all(f"| 0.0001 num_iterations {k} steps_per_generation 8 | 3 | 0 |" in page for k in (4, 8))
    # Without seeds that choose, the reported seeds do
    alone = group_runs(REUSE, {key: value for key, value in REUSE_PLAN.items() if key != "choosing"})
    assert alone["a"].mean("TRL's default", None).value == pytest.approx(0.9)
    # A method may have seeds of its own, as in the README's figure
    own = {"groups": {"a": {"tasks": ["a"]}}, "methods": {"TROLL": {"methods": ["troll"], "seeds": [1, 2]}}}
    assert group_runs(RECORDS, own)["a"].mean("TROLL", 1e-4).value == pytest.approx((0.5 + 0.6) / 2)


def test_pairs_of_two_starts_do_not_count():
    ours = records_of("a", "troll", 1e-4, 0.5, 0.6, start_digest="x")
    theirs = [record("a", "clip-0.2", 1e-4, seed, 0.1 * seed, start_digest=d) for seed, d in ((1, "x"), (2, "y"))]
    plan = PLAN | {"groups": {"a": {"tasks": ["a"]}}}
    assert group_runs(ours + theirs, plan)["a"].lead("TROLL", "clip", 1e-4).value == pytest.approx(0.4)
    assert group_runs(ours + theirs[1:], plan)["a"].lead("TROLL", "clip", 1e-4) is None


def curve_of(updates, heights, completions, seconds):
    points = {"curve": heights, "completions": completions, "seconds": seconds}
    return {name: [[at, value] for at, value in zip(updates, values, strict=True)] for name, values in points.items()}


def test_curves_are_averaged_at_equal_completions():
    """Of 64 completions used once, and of 512 used by 32 updates of 64: the last point of a generation counts."""
    once = curve_of([0, 8, 16], [0.1, 0.2, 0.3], [0, 512, 1024], [0.0, 60.0, 120.0])
    reuse = curve_of([0, 16, 32, 64], [0.1, 0.2, 0.4, 0.7], [0, 512, 512, 1024], [0.0, 60.0, 120.0, 240.0])
    show = lambda runs, cost: [pytest.approx(point) for point in mean_curve(runs, cost)[:, :2].tolist()]
    assert show([once, reuse], "completions") == [[0, 0.1], [512, 0.3], [1024, 0.5]]
    assert show([once, reuse], "minutes") == [[0, 0.1], [1.5, 0.3], [3, 0.5]]
    assert show([once, reuse], "updates") == [[0, 0.1], [16, 0.25]]
    older = [{name: run[name] for name in ("curve", "seconds")} for run in (once, reuse)]  # without completions
    assert show(older, "minutes") == [[0, 0.1], [1.5, 0.25]] and show([], "updates") == []


@pytest.mark.parametrize("plan", [PLAN, PLAN | {"figure": "curves", "rates": [None]}, {}])
def test_a_page_and_a_figure(plan, tmp_path):
    records = [r | {"curve": [[0, 0.1], [8, r["success"]]], "length": 4.0} for r in RECORDS]
    groups = group_runs(records, plan)
    row = "| both, 8 | TROLL | 45.0 [" if plan else "| a, 8 | clip-0.2 | 43.3 [30.0, 60.0] |"
    assert row in table_page("name", records, plan)
    draw(groups, plan, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_statements_of_the_adaptive_rate():
    tuning = [
        record("common", method, rate, seed, success)
        for method in ("trl", "troll")
        for rate, success in ((2e-4, 0.4), (4e-4, 0.3))
        for seed in (90, 91)
    ]
    reported = [
        record("common", method, rate, seed, success, steps)
        for seed in (92, 93)
        for method, rate, success, steps in [
            ("trl", 2e-4, 0.3, 1),
            ("troll", 2e-4, 0.5, 8),
            ("troll", 4e-4, 0.9, 8),  # better, but not on the seeds that choose
            ("troll-adaptive", 5e-5, 0.47, 8),
            ("troll-adaptive", 8e-4, 0.4 + 0.1 * (seed - 92), 8),
            ("troll-adaptive", 6.4e-3, 0.1, 8),  # no start of the statements
            ("troll-adaptive", 3.2e-3, 0.0, 32),
        ]
    ]
    results = Results(tuning + reported)
    lucky = record("common", "troll", 8e-4, 90, 0.9, 8)  # one of the two seeds that choose
    assert results.best_rate("common", "troll") == Results([*tuning, lucky]).best_rate("common", "troll") == 2e-4
    assert "| common | 2 | 50 | 94 |  | 90 |  |  | 90 |" in share_table(results, "troll")
    assert "3 of 4 runs" in share_table(results, "troll")
    assert "1 of 2 runs" in share_table(Results(tuning + reported, seeds=(92,)), "troll")
    assert "0 of 0 runs" in share_table(Results(tuning + reported, updates=[32]), "troll")
    elsewhere = record("common", "troll-adaptive", 5e-5, 92, 0.0, start_digest="y")
    there = record("common", "troll", 2e-4, 92, 0.5, start_digest="x")
    assert "| common | 2 | 50 | 94 |" in share_table(Results([*tuning, *reported, elsewhere, there]), "troll")
    starts = [record("common", "troll-adaptive", rate, 92, 0.1 * place) for place, rate in enumerate(STARTS)]
    starts.append(record("common", "troll-adaptive", STARTS[0], 93, 0.9))  # a seed that lacks the other starts
    over = Results(starts).over_starts("common", "troll-adaptive")
    assert over.keys() == {92} and over[92]["success"] == pytest.approx(0.2)
    leads = results.at_best_rate("common", "troll"), results.at_best_rate("common", "trl")
    assert difference_row("(d)", [leads]) == ["(d)", "+20.0", "0.5", "2"]
    worst = results.from_worst_start("common", "troll-adaptive")
    assert difference_row("(b)", [(worst, leads[1])])[1] == "+15.0 [+10.0, +20.0]"
    assert difference_row("(b)", [(worst, leads[1]), ({}, {})]) == ["(b)", "", "", ""]

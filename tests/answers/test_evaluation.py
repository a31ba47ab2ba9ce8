"""math_answers.evaluation without a model: statistics, scores, benchmarks, the samples file, comparisons."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
import scipy.stats
from real_problems import DATA, SIZES

from math_answers.evaluation.benchmarks import HUB, load_benchmark
from math_answers.evaluation.scoring import score, strict_answer, strict_form, strict_score, vote
from math_answers.evaluation.statistics import (
    Estimate,
    default_ks,
    estimate,
    majority_score,
    paired_difference,
    pass_at_k,
)
from math_answers.evaluation.tables import comparison_table, notes, plain


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


# Statistics


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact():
    exact = 1 - Fraction(math.comb(9_000, 3_000), math.comb(10_000, 3_000))
    assert pass_at_k(10_000, 1_000, 3_000) == pytest.approx(float(exact), abs=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(("samples", "correct", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
def test_pass_at_k_out_of_range(samples, correct, k):
    with pytest.raises(ValueError, match=r"samples|correct"):
        pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["1", "2", "2"], [1, 0, 0], 0),
        (["1", "2", "1"], [1, 0, 1], 1),
        ([None, None, None, "1"], [0, 0, 0, 1], 1),  # a sample without an answer has no vote
        ([None, None], [0, 0], 0),
        (["1", "2"], [1, 0], 1 / 2),  # a tie: the expectation of a draw
        (["3", "2", "1"], [0, 0, 1], 1 / 3),
        (["1", "1", "2"], [1, 0, 0], 1 / 2),  # one answer, and one of its comparisons ran out of time
    ],
)
def test_majority(answers, rewards, expected):
    for order in itertools.permutations(range(len(answers))):
        shuffled = [answers[i] for i in order], [rewards[i] for i in order]
        assert majority_score(*shuffled) == pytest.approx(expected)


def test_bootstrap_interval_is_that_of_all_resamples():
    values = np.array([[0.0, 3.0], [1.0, 1.0], [0.25, 0.0], [1.0, 7.0]])
    means = np.array([values[list(rows)].mean(axis=0) for rows in itertools.product(range(4), repeat=4)])
    for found, column, value in zip(estimate([values], 60_000, seed=1), means.T, values.mean(axis=0), strict=True):
        assert found.value == pytest.approx(value)
        for end, level in ((found.low, 0.025), (found.high, 0.975)):
            around = np.quantile(column, [level - 0.005, level + 0.005], method="inverted_cdf")
            assert around[0] <= end <= around[1]


def test_bootstrap_does_not_depend_on_its_batches(monkeypatch):
    values = np.random.default_rng(0).random((30, 3))
    whole = estimate([values], 500, seed=3)
    monkeypatch.setattr("math_answers.evaluation.statistics._BATCH_NUMBERS", 7 * 30 * 3)
    assert estimate([values], 500, seed=3) == whole
    assert estimate([values], 500, seed=4) != whole


def test_a_benchmark_of_one_problem_has_no_width():
    """scipy wants two observations."""
    assert estimate([np.array([[0.25]])], 100, seed=0) == [Estimate(0.25, 0.25, 0.25)]
    [both] = estimate([np.array([[1.0]]), np.array([[0.0], [1.0]])], 1_000, seed=0)
    assert (both.value, both.low, both.high) == (0.75, 0.5, 1)


def test_overall_is_the_mean_of_benchmarks_and_resamples_within_them():
    small, large = np.array([[1.0], [0.0]]), np.full((50, 1), 0.5)
    [both] = estimate([small, large], 4_000, seed=0)
    assert both.value == 0.5
    # Within `small` a mean is 0, 1/2 or 1; the constant benchmark halves that
    assert (both.low, both.high) == (0.25, 0.75)
    twice = np.random.default_rng(0).random((40, 1))
    [one], [two] = estimate([twice], 4_000, seed=0), estimate([twice, twice], 4_000, seed=0)
    # Two independent copies: an interval narrower by about the root of 2, not the same resamples twice
    assert 1.25 < (one.high - one.low) / (two.high - two.low) < 1.6


def test_paired_difference():
    generator = np.random.default_rng(0)
    hard = generator.random((80, 1))
    a, b = (hard > 0.5).astype(float), (hard > 0.4).astype(float)
    [difference] = paired_difference([a], [b], 10_000, seed=0)
    assert difference.value == pytest.approx((b - a).mean())
    # The differences are never negative: P(no difference) is P(no problem with one is drawn), counted on both tails, if
    # that is not below the least p-value of a test of signs
    share, differing = (b - a).mean(), int((b != a).sum())
    assert difference.p_value == pytest.approx(max(2 * (1 - share) ** 80, 2.0 ** (1 - differing)), abs=2e-3)
    exact = scipy.stats.binom(80, share).ppf([0.025, 0.975]) / 80
    assert (difference.low, difference.high) == pytest.approx(tuple(exact), abs=1 / 80 + 1e-9)
    [back] = paired_difference([b], [a], 10_000, seed=0)
    assert (back.value, back.low, back.high) == pytest.approx((-difference.value, -difference.high, -difference.low))
    assert back.p_value == difference.p_value
    [none] = paired_difference([a], [a], 100, seed=0)
    assert (none.value, none.low, none.high, none.p_value) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([a], [b[:-1]], 100, seed=0)


def test_p_value_is_below_5_percent_where_the_interval_leaves_0_out():
    generator = np.random.default_rng(1)
    seen = set()
    for _ in range(40):
        a, b = (generator.random((30, 1)) for _ in "ab")
        [difference] = paired_difference([a], [b + 0.15], 2_000, seed=0)
        outside = difference.low > 0 or difference.high < 0
        assert outside == (difference.p_value < 0.05) or abs(difference.p_value - 0.05) < 0.003
        seen.add(outside)
    assert seen == {True, False}


@pytest.mark.parametrize(("differing", "p_value"), [(0, 1), (1, 1), (2, 0.5), (5, 1 / 16), (6, 1 / 32), (8, 1 / 128)])
@pytest.mark.parametrize("sign", [1, -1])
def test_few_problems_that_differ_give_no_small_p_value(differing, p_value, sign):
    a = np.zeros((differing or 1, 2))
    b = np.stack([sign * np.arange(1, len(a) + 1) * (differing > 0), np.zeros(len(a))], axis=1)
    found, same = paired_difference([a], [b], 2_000, seed=0)
    assert (found.p_value, same.p_value) == (p_value, 1)


def test_p_value_of_equal_distributions_is_uniform():
    generator = np.random.default_rng(2)
    pairs = (generator.random((2, 60, 1)) for _ in range(300))
    p_values = [paired_difference([a], [b], 400, seed=0)[0].p_value for a, b in pairs]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_default_ks():
    assert [default_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


# Scores


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("so 5\n#### 1,234", "1,234"),
        ("Answer: 4\nNo.\n**Answer:** 7.", "7"),
        (r"\boxed{1}" + "\nAnswer: 2", "2"),
        (r"Answer: \boxed{3}", "3"),
        (r"\boxed{1} then \boxed{2", None),  # cut in its last box
        ("the answer is 5", None),
        ("Answer: 1 <think> no", None),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_strict_answer(text, answer):
    assert strict_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1,234", "1234.0", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"-\dfrac{1}{2}", "-1/2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        ("$72$", "72", True),
        ("1", "2", False),
        ("x+1", "1+x", False),  # no algebra
        ("12,34", "1234", False),
        ("1/0", "1", False),
    ],
)
def test_strict_form(one, other, equal):
    assert (strict_form(one) == strict_form(other)) == equal


def test_votes():
    assert vote("10 dollars") == vote("10") == vote("10.0") != vote("11")
    assert vote(None) is None
    spellings = [
        (r"\frac{1}{2}", r"\frac12", "0.5", "½", r"x=\frac12", "$x = 1/2$", r"\dfrac{1}{2}"),
        ("C", "(C)", r"\text{(C)}", r"\mathrm{C}", "(C) 12"),
        ("yes", "Yes", r"\text{Yes}"),
        ("1000", "1e3", "1,000", "1000.0", "10^3"),
        ("50%", r"50\%"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", "-0.5"),
        ("(1, 2)", r"\left(1,2\right)"),
        ("10^2",),  # is left to be computed: the verifier does not take it for 100
        *[(text,) for text in ("100", "50", "x", "X", "y=2x+1", "x=1, y=2", "101_2", "101", "x^2=4")],
    ]
    for votes in [{vote(text) for text in alike} for alike in spellings]:
        assert len(votes) == 1, votes
    assert len({vote(alike[0]) for alike in spellings}) == len(spellings)
    vote("9" * 100_000)


def test_score_says_how_it_decided():
    golds = [r"\boxed{2}", "2", r"So \boxed{2}.", "2", "???"]
    texts = ["no idea", r"\boxed{2.0}", "#### 3", r"\boxed{???}", r"\boxed{2}"]
    verdicts = score(golds, texts)
    assert [verdict.reward for verdict in verdicts] == [0, 1, 0, 0, None]
    assert verdicts[0].decided_by == "no_answer"
    assert verdicts[3].decided_by == "unreadable_answer"
    assert strict_score("72", "#### 72") == 1
    assert strict_score(r"\boxed{72}", "72") == 0


def test_unreadable_answers_are_asked_for_at_once(monkeypatch):
    """The workers were asked one answer at a time, so that only one of them had something to do."""
    asked = []

    def are_readable(answers):
        asked.append(list(answers))
        return dict.fromkeys(asked[-1], False)

    monkeypatch.setattr("math_answers.evaluation.scoring.are_readable", are_readable)
    texts = [r"\boxed{1}", r"\boxed{2}", r"\boxed{x + 1}", r"\boxed{x + 2}", "none", r"\boxed{2}"]
    paths = [verdict.decided_by for verdict in score(["1", "1", "x+2", "x+2", "1", "2"], texts)]
    assert [path == "unreadable_answer" for path in paths] == [False, True, True, False, False, False]
    assert len(asked) == 1 and sorted(asked[0])[0] == "2" and len(asked[0]) == 2


@pytest.mark.parametrize(("p_value", "shown"), [(2 / 10_001, "< 0.0002"), (4 / 10_001, "0.0004"), (1.0, "1")])
def test_a_p_value_at_the_floor_of_its_test_is_not_taken_for_one(p_value, shown):
    metric = {"a": 0.5, "b": 0.6, "value": 0.1, "low": 0.05, "high": 0.15, "p_value": p_value}
    result = {"benchmark": "b", "problems": 9, "metrics": {"mean": metric}}
    header, [row] = comparison_table({"results": [result], "bootstrap": {"samples": 10_000}})
    assert dict(zip(header, row, strict=True))["p"] == shown


# Benchmarks


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


HELD_OUT = {
    "amc23": {"id": 0, "problem": "p?", "answer": 27.0, "url": "u"},
    "minerva": {"problem": "p?", "solution": r"Then $\boxed{27}$", "type": "t", "idx": 1},
    "olympiadbench": {
        **{
            "id": 1,
            "subfield": "Algebra",
            "context": None,
            "question": "p?",
            "solution": ["s"],
            "final_answer": ["27"],
        },
        **{"is_multiple_answer": False, "unit": None, "answer_type": "Numerical", "error": None},
    },
    "omni_math": {"domain": ["d"], "difficulty": 8.0, "problem": "p?", "solution": "s", "answer": "27", "source": "x"},
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_local_files_in_the_schemas_of_their_hubs(tmp_path, name):
    benchmark = load_benchmark(f"{name}={write(tmp_path / 'rows.jsonl', [HELD_OUT[name]])}", instruction="Box it.")
    [problem] = benchmark.problems
    assert (benchmark.name, len(benchmark.ids)) == (name, 1)
    assert problem["prompt"] == [{"role": "user", "content": "p?\n\nBox it."}]
    assert [verdict.reward for verdict in score([problem["solution"]] * 2, [r"\boxed{27}", r"\boxed{28}"])] == [1, 0]


def test_answers_of_a_list_are_compared_together(tmp_path):
    row = HELD_OUT["olympiadbench"] | {"final_answer": ["$2$", "$-3$"]}
    [gold] = load_benchmark(f"olympiadbench={write(tmp_path / 'rows.jsonl', [row])}").problems["solution"]
    assert [verdict.reward for verdict in score([gold] * 2, [r"\boxed{2, -3}", r"\boxed{2}"])] == [1, 0]


@pytest.mark.parametrize("options", [["Rome", "Paris", "12"], {"A": "Rome", "B": "Paris", "C": "12"}])
def test_the_text_of_the_right_option_is_right(tmp_path, options):
    row = {"question": "p?", "answer": "B", "options": options}
    [problem] = load_benchmark(f"b={write(tmp_path / 'rows.jsonl', [row])}").problems
    assert problem["options"] == ["Rome", "Paris", "12"]
    texts = [r"\boxed{\text{Paris}}", r"\boxed{B}", r"\boxed{12}", r"\boxed{A}", "Paris"]
    rewards = [verdict.reward for verdict in score([problem["solution"]] * 5, texts, [problem["options"]] * 5)]
    assert rewards == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("width", [80, 120, 300])
def test_a_narrow_terminal_cuts_no_number(width, monkeypatch):
    """17.3 was shortened to 17… and pass@2 to pa…."""
    header = ["model", "benchmark", *(f"metric{i} %" for i in range(12))]
    rows = [["outputs/a-long-name/of-a-run", "gsm8k", *(f"{i}7.3 [{i}0.0, {i}9.0]" for i in range(12))]]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    text = plain(header, rows)
    assert "…" not in text and "..." not in text
    assert all(cell in text for cell in (*header, *rows[0]))
    assert max(map(len, text.splitlines())) <= width
    assert (text.count("outputs/a-long-name/of-a-run") == 1) == (width == 300)


def test_problem_ids_stay_when_rows_move_and_instructions_change(tmp_path):
    rows = [{"problem": f"p{i} ", "answer": str(i)} for i in (0, 1, 2, 2)]
    before = load_benchmark(f"b={write(tmp_path / 'a.jsonl', rows)}").ids
    path = write(tmp_path / "b.jsonl", rows[::-1])
    after = load_benchmark(f"b={path}", instruction="Box it.", system_prompt="You count.").ids
    assert sorted(before) == sorted(after) and before[0] == after[3]
    assert len(set(before)) == 4


@pytest.mark.parametrize("name", [name for name, split in SIZES if split == "test"])
def test_real_benchmarks(name):
    assert len(load_benchmark(f"{name}={DATA / name}").ids) == SIZES[name, "test"]
    assert len(load_benchmark(f"{name}={DATA / name}", max_problems=3).ids) == 3


@pytest.mark.parametrize("name", HUB)
def test_hub_benchmarks(name, monkeypatch):
    def load_dataset(path, config_name, *, split, streaming):
        assert (path, config_name, split) == (HUB[name].path, HUB[name].config_name, HUB[name].split)
        return datasets.Dataset.from_list([HELD_OUT.get(name, {"question": "p", "answer": "#### 27"})])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert score(load_benchmark(name).problems["solution"], [r"\boxed{27}"])[0].reward == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zzz", "'zzz' is neither gsm8k, math, "),
        ("b=nowhere.jsonl", "No such file or folder: nowhere.jsonl"),
        ("empty=empty.jsonl", "empty.jsonl is empty"),
        ("bad=bad.jsonl", r"columns a;.*`answer_column`"),
        ("bad.jsonl", "nor name=path, for a local file"),
    ],
)
def test_bad_benchmarks(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "bad.jsonl", [{"a": 1}])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_benchmark(spec)


@pytest.mark.parametrize(("problems", "points"), [(1, "100.0"), (16, "18.8")])
def test_the_rule_of_three_stays_within_all_points(problems, points):
    """Of one problem it said 300 points."""
    result = {"problems": problems, "metrics": {"mean@n": {"low": 0.0, "high": 0.0}}}
    assert f"may still be {points} points away" in notes({"results": [result]})[0]

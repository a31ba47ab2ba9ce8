"""troll_trl.evaluation without a model: statistics, majority, stored completions, benchmarks, comparisons."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
import scipy.stats

from tests.support.real_problems import DATA, SIZES
from troll_trl.evaluation import EvaluationArguments, evaluate, problems
from troll_trl.evaluation.problems import load_problems
from troll_trl.evaluation.samples import SAMPLES, append, begin, read_samples
from troll_trl.evaluation.scoring import majority_score
from troll_trl.evaluation.statistics import Estimate, estimate, pass_at_k


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- Statistics -------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for samples in range(1, 8):
        for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            subsets = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    exact = 1 - Fraction(math.comb(9_000, 3_000), math.comb(10_000, 3_000))
    assert pass_at_k(10_000, 1_000, 3_000) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["1", "2", "1"], [1, 0, 1], 1),
        ([None, None, None, "1"], [0, 0, 0, 1], 1),  # a sample without an answer has no vote
        ([None, None], [0, 0], 0),
        (["1", "2"], [1, 0], 1 / 2),  # a tie: the probability of a draw
        (["1", r"\frac{2}{4}", "0.5"], [1, 0, 0], 0),  # two spellings of one wrong answer
        (["0.5", r"\frac12", "2", "3"], [1, 1, 0, 0], 1),  # and of the right one
        (["1", "1", "2", "2.0", r"\frac{6}{2}", "3"], [1, 1, 0, 0, 0, 0], 1 / 3),
    ],
)
def test_majority(answers, rewards, expected):
    for order in itertools.islice(itertools.permutations(range(len(answers))), 24):
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


def test_overall_is_the_mean_of_benchmarks_and_resamples_within_them():
    small, large = np.array([[1.0], [0.0]]), np.full((50, 1), 0.5)
    # Within `small` a mean is 0, 1/2 or 1; the constant benchmark halves that
    assert estimate([small, large], 4_000, seed=0) == [Estimate(0.5, 0.25, 0.75)]
    assert estimate([np.array([[0.25]])], 100, seed=0) == [Estimate(0.25, 0.25, 0.25)]  # scipy wants two observations
    twice = np.random.default_rng(0).random((40, 1))
    [one], [two] = estimate([twice], 4_000, seed=0), estimate([twice, twice], 4_000, seed=0)
    # Two independent copies: an interval narrower by about the root of 2, not the same resamples twice
    assert 1.25 < (one.high - one.low) / (two.high - two.low) < 1.6


# -- Stored completions -----------------------------------------------------------------------------------------------


def score(path: Path, output: Path, **settings):
    """The results of stored completions by benchmark, and the values of their metrics."""
    results = evaluate(EvaluationArguments(samples=str(path), output=str(output), **settings))["results"]
    values = {row["benchmark"]: {name: one["value"] for name, one in row["metrics"].items()} for row in results}
    return {row["benchmark"]: row for row in results}, values


def test_a_problem_that_occurs_32_times_is_one_problem(tmp_path):
    """The interval was that of 384 independent problems, [45, 55]."""
    rows = [
        {"id": [turn, i], "question": f"{i} + 7?", "answer": i + 7, "completion": f"#### {i + 7 if i % 2 else 0}"}
        for turn in range(32)
        for i in range(12)
    ]  # fmt: skip
    results, _ = score(write(tmp_path / "sums.jsonl", rows), tmp_path / "out")
    [row] = results.values()
    assert (row["problems"], row["n"], row["samples"]) == (12, [32, 32], 384)
    ends = scipy.stats.binom(12, 0.5).ppf([0.025, 0.975]) / 12
    for metric in row["metrics"].values():
        assert (metric["value"], metric["low"], metric["high"]) == pytest.approx((0.5, *ends)) == (0.5, 0.25, 0.75)


def test_metrics_of_stored_completions_by_hand(tmp_path):
    texts = {"p": ["5", "6", "6", "5"], "q": ["1", "2", "3", "9"], "r": ["7", "7", "7", None]}
    golds = {"p": "5", "q": "9", "r": "7"}
    rows = [
        {"problem": name, "gold": golds[name], "completion": [f"so \\boxed{{{x}}}" if x else "no idea" for x in own]}
        for name, own in texts.items()
    ]
    results, values = score(write(tmp_path / "b.jsonl", rows), tmp_path / "out", k=[1, 2, 4])
    # Right: 2, 1 and 3 of 4. pass@2 is 1 − C(2,2)/6, 1 − C(3,2)/6 and 1. p is a tie of two answers, q one of four
    assert values["b"] == pytest.approx(
        {"mean": 6 / 12, "pass@2": (5 / 6 + 3 / 6 + 1) / 3, "pass@4": 1, "maj": (1 / 2 + 1 / 4 + 1) / 3}
    )
    assert results["b"]["no_answer"] == 1 / 12
    sample = read_samples(tmp_path / "out" / SAMPLES)[4]
    assert (sample["problem"], sample["sample"], sample["answer"], sample["reward"]) == ("q", 0, "1", 0)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| b | 3 | 4 | 50.0 [" in table
    # What was scored can be scored again, but neither over itself nor in place of another file's samples
    again, _ = score(tmp_path / "out" / SAMPLES, tmp_path / "again", k=[1, 2, 4])
    assert again == results
    fewer, values = score(tmp_path / "b.jsonl", tmp_path / "fewer", max_problems=2)
    assert (fewer["b"]["problems"], values["b"]["mean"]) == (2, 3 / 8)
    with pytest.raises(ValueError, match="overwritten"):
        score(tmp_path / "out" / SAMPLES, tmp_path / "out")
    with pytest.raises(ValueError, match="`samples` was"):
        score(tmp_path / "b.jsonl", tmp_path / "again")


def test_benchmarks_weigh_the_same_and_numbers_of_samples_may_differ(tmp_path):
    rows = [
        {"benchmark": name, "problem": text, "gold": "1", "completion": rf"\boxed{{{answer}}}"}
        for name, text, answer in [("a", "p", 1), ("a", "p", 1), ("a", "q", 2), ("b", "p", 2), ("b", "q", 1)]
    ]
    results, values = score(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    # In `a`, p counts as much as q although it has two samples
    assert values == {name: {"mean": 0.5} for name in ("a", "b", "overall")}
    assert results["a"]["n"] == [1, 2]


def test_an_output_that_cannot_be_a_folder_is_refused_first(tmp_path):
    """It was found after the model had been loaded, as `[Errno 17] File exists`."""
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"`output`: .*file is a file"):
            evaluate(EvaluationArguments(model="none", benchmarks=["b=none"], output=str(output)))


def test_completions_of_two_models_are_not_scored_as_one(tmp_path):
    rows = [{"model": name, "problem": "p", "gold": "1", "completion": "1"} for name in "ab"]
    with pytest.raises(ValueError, match="completions of a, b"):
        score(write(tmp_path / "x.jsonl", rows), tmp_path / "out")


# -- Comparisons ------------------------------------------------------------------------------------------------------


def scored(folder: Path, rewards: dict[tuple[str, str], list[int]], gold="1") -> str:
    folder.mkdir()
    append(
        folder,
        [
            {
                **{"benchmark": key[0], "problem": key[1], "sample": number, "gold": gold, "completion": ""},
                **{"tokens": 1, "truncated": False, "reward": float(reward), "answer": "1" if reward else "2"},
            }
            for key, own in rewards.items()
            for number, reward in enumerate(own)
        ],
    )
    return str(folder)


def compare(*folders: str, **settings) -> list[dict]:
    return evaluate(EvaluationArguments(compare=list(folders), **settings))["results"]


def test_comparison_is_the_bootstrap_of_paired_means(tmp_path, caplog):
    generator = np.random.default_rng(0)
    a, b = (generator.random((30, 4)) < share for share in (0.4, 0.6))
    sides = [{("b", f"p{i}"): row.tolist() for i, row in enumerate(side)} for side in (a, b)]
    only_b = {("b", "only in B"): [0] * 4}
    names = scored(tmp_path / "a", sides[0]), scored(tmp_path / "b", only_b | sides[1])
    caplog.set_level("INFO", "troll_trl.evaluation")
    [result] = compare(*names, output=str(tmp_path / "c"))
    assert result["problems"] == 30 and "30 problems that both" in caplog.text
    means = b.mean(axis=1) - a.mean(axis=1)  # of each problem
    found = result["metrics"]["mean"]
    assert (found["a"], found["b"], found["value"]) == pytest.approx((a.mean(), b.mean(), means.mean()))
    draws = np.random.default_rng(5).choice(means, (40_000, 30)).mean(axis=1)
    for end, level in ((found["low"], 0.025), (found["high"], 0.975)):
        below, at_most = (draws < end - 1e-9).mean(), (draws <= end + 1e-9).mean()
        assert below - 0.004 <= level <= at_most + 0.004
    assert list(result["metrics"]) == ["mean", "pass@2", "pass@4", "maj"]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text())["results"] == [result]
    [back] = compare(*names[::-1])
    assert back["metrics"]["mean"]["value"] == -found["value"]


def test_comparison_of_several_benchmarks_and_numbers_of_samples(tmp_path, caplog):
    a = scored(tmp_path / "a", {("x", "p"): [1, 0], ("x", "q"): [0, 0], ("y", "p"): [1, 1], ("z", "p"): [1]})
    b = scored(tmp_path / "b", {("x", "q"): [1], ("x", "p"): [1], ("y", "p"): [0]})
    caplog.set_level("INFO", "troll_trl.evaluation")
    x, y, overall = compare(a, b)
    assert [row["metrics"]["mean"]["value"] for row in (x, y, overall)] == [0.75, -1, -0.125]
    assert list(x["metrics"]) == ["mean"] and caplog.messages == []
    c = scored(tmp_path / "c", {("x", "p"): [1, 0, 0], ("x", "q"): [0, 0, 0]})
    [x] = compare(a, c)
    assert "maj" not in x["metrics"] and "maj" in caplog.text


def test_a_difference_without_an_interval_is_noted(tmp_path, capsys):
    """0 % against 100 % printed +100.0 [+100.0, +100.0], as if it were certain."""
    none, some, all_ = (
        scored(tmp_path / name, {("x", str(i)): [i < right] for i in range(10)})
        for name, right in (("none", 0), ("some", 5), ("all", 10))
    )
    for a, b, away in ((none, all_, 60), (some, some, 30)):
        compare(a, b)
        assert f"with 10 problems the truth may still be {away}.0 points away" in capsys.readouterr().out
    compare(none, some)
    assert "rule of three" not in capsys.readouterr().out
    score(Path(all_) / SAMPLES, tmp_path / "out", max_problems=6)
    note = "with 6 problems the truth may still be 50.0 points away"
    assert note in capsys.readouterr().out and note in (tmp_path / "out" / "table.md").read_text()


def test_every_cut_of_a_file_leaves_whole_samples(tmp_path):
    folder = Path(scored(tmp_path / "a", {("x", "π"): [1, 0]}))
    whole = read_samples(folder / SAMPLES)
    data = (folder / SAMPLES).read_bytes()
    first = data.index(b"\n")
    for end in range(len(data) + 1):
        (folder / SAMPLES).write_bytes(data[:end])
        kept = read_samples(folder / SAMPLES)
        assert kept == whole[: (end >= first) + (end >= len(data) - 1)]
        begin(folder, {}, overwrite=False)
        append(folder, [whole[0] | {"sample": 2}])
        assert read_samples(folder / SAMPLES) == [*kept, whole[0] | {"sample": 2}]


def test_what_cannot_be_compared(tmp_path):
    a = scored(tmp_path / "a", {("x", "p"): [1]})
    with pytest.raises(ValueError, match="no common benchmark"):
        compare(a, scored(tmp_path / "b", {("y", "p"): [1]}))
    with pytest.raises(ValueError, match="no problem of x in common"):
        compare(a, scored(tmp_path / "c", {("x", "q"): [1]}))
    with pytest.raises(ValueError, match="gold answers"):
        compare(a, scored(tmp_path / "d", {("x", "p"): [1]}, gold="2"))


# -- Benchmarks and arguments -----------------------------------------------------------------------------------------


def problems_of(*benchmarks: str, **settings):
    loaded = load_problems(EvaluationArguments(model="m", benchmarks=[*benchmarks], output="out", **settings))
    return [problem for own in loaded.values() for problem in own]


def test_benchmarks_are_their_test_splits(monkeypatch):
    assert len(problems_of(f"gsm8k={DATA / 'gsm8k'}")) == SIZES["gsm8k", "test"]
    asked = []
    monkeypatch.setattr(problems, "load_math_dataset", lambda *source, **columns: asked.append(source) or [])
    problems_of("gsm8k", "math")
    assert asked == [("openai/gsm8k", "test", "main"), ("DigitalLearningGmbH/MATH-lighteval", "test", "default")]


def test_rows_with_one_text_are_one_problem_with_the_gold_answer_of_each(tmp_path):
    rows = [{"problem": text, "answer": answer} for text, answer in (("p?", "27"), ("q", "1"), ("p?", "28"))]
    benchmark = f"mine={write(tmp_path / 'rows.jsonl', rows)}"
    first, other = problems_of(benchmark, instruction="Box it.", system_prompt="Think.")
    assert (first.benchmark, first.text, first.golds) == ("mine", "p?", [r"\boxed{27}", r"\boxed{28}"])
    assert first.prompt == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "p?\n\nBox it."},
    ]
    assert (other.text, len(other.golds)) == ("q", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Nothing to do"),
        ({"samples": "a", "compare": ["a", "b"]}, "too much"),
        ({"model": "m", "benchmarks": ["b=1", "b=2"], "output": "o"}, "'b' twice"),
        ({"model": "m", "benchmarks": ["b="], "output": "o"}, "'b=' has no path"),
        ({"model": "m", "benchmarks": ["b"], "output": ""}, "`output` is not set"),
        ({"model": "m", "benchmarks": ["b"], "output": "o", "n": 2, "k": [4]}, "pass@4 needs"),
        ({"model": "m", "benchmarks": ["b"], "output": "o", "n": 0}, "`n` must be at least 1"),
        ({"model": "m", "benchmarks": ["b"], "output": "o", "top_p": 1.5}, "`top_p` must be"),
    ],
)
def test_arguments_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        EvaluationArguments(**settings)

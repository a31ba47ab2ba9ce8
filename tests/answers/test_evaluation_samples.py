"""Samples files of math_answers.evaluation: torn lines, the Parquet copy, files of other tools, comparisons."""

import json
import re
import sys
import tracemalloc
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logged import logged

from math_answers.evaluation import EvaluationArguments, compare, score_file, summarize
from math_answers.evaluation.import_samples import read_rows
from math_answers.evaluation.output import Output, open_output
from math_answers.evaluation.problem_scores import read_scores
from math_answers.evaluation.samples import read_lines, write_parquet
from troll_trl.cli.evaluate import main

FULL = r"So it is \boxed{%s}."


def line(problem="p", sample=0, text="5", gold="5", model="m", benchmark="b", **other):
    reward = float(text == gold)
    return {
        **{"model": model, "benchmark": benchmark, "problem": problem, "index": 0, "sample": sample, "gold": gold},
        **{"completion": FULL % text, "tokens": 4, "truncated": False, "reward": reward, "answer": text},
        **{"path": "number", "strict": reward, **other},
    }


def write(path: Path, rows) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate_file(path: Path, output: Path, **settings):
    args = EvaluationArguments(samples=str(path), output=str(output), bootstrap_samples=50, **settings)
    with logged() as messages:
        summary = summarize(args, score_file(args))
    return summary, messages


def results(summary) -> dict:
    return {
        (row["model"], row["benchmark"]): {name: metric["value"] for name, metric in row["metrics"].items()}
        for row in summary["results"]
    }


# The file


def output_in(folder: Path) -> AbstractContextManager[Output]:
    write(folder / "run.json", [{}])
    return open_output(folder, {"settings": {}, "models": {}, "benchmarks": {}}, overwrite=False)


def test_every_torn_end_is_repaired(tmp_path):
    whole = [line(sample=0), line(sample=1, text="∞ \u2028 π")]
    path = tmp_path / "samples.jsonl"
    with output_in(tmp_path) as output:
        output.append(whole)
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        with logged() as messages, output_in(tmp_path) as output:
            kept = list(read_lines(path))
            assert kept == whole[: (end >= first - 1) + (end >= len(data) - 1)], end
            # A line cut before its newline is whole
            assert len(messages) == (end not in (0, first - 1, first, len(data) - 1, len(data))), end
            output.append([line(sample=2)])
        assert list(read_lines(path)) == [*kept, line(sample=2)]


def test_a_block_of_zeros_at_the_end_is_torn_too(tmp_path):
    """A power cut may leave a file longer than what was written."""
    path = write(tmp_path / "samples.jsonl", [line()])
    with path.open("ab") as file:
        file.write(bytes(100_000))
    with logged() as messages, output_in(tmp_path):
        assert list(read_lines(path)) == [line()]
    assert ["(line 2, 100000 bytes) is torn" in text for text in messages] == [True]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line()) + '\n{"model": \n' + json.dumps(line()) + "\n")
    with pytest.raises(ValueError, match=r"line 2 is not a JSON object, it begins with '\{\"model\":'"):
        list(read_lines(path))


def test_one_writer_at_a_time(tmp_path):
    with output_in(tmp_path), pytest.raises(ValueError, match="Another process is writing"), output_in(tmp_path):
        pass


def test_lone_surrogates_of_a_tokenizer_are_written(tmp_path):
    with output_in(tmp_path) as output:
        output.append([line(completion="\ud800")])
    assert next(read_lines(tmp_path / "samples.jsonl"))["completion"] == "?"


def test_parquet_has_the_same_rows_whatever_an_earlier_copy_held(tmp_path, monkeypatch):
    rows = [line(sample=i, tokens=None if i == 3 else i) for i in range(10)]
    path = write(tmp_path / "samples.jsonl", rows)
    monkeypatch.setattr("math_answers.evaluation.samples._ROWS_IN_MEMORY", 3)
    (tmp_path / ".samples.parquet.unfinished").touch()  # of a run that was killed
    for changed in (rows, rows[::-1]):
        write(path, changed)
        write_parquet(path, tmp_path / "samples.parquet")
        assert pq.read_table(tmp_path / "samples.parquet").to_pylist() == changed
    assert {file.name for file in tmp_path.iterdir()} == {"samples.jsonl", "samples.parquet"}


def test_memory_does_not_grow_with_the_completions(tmp_path):
    """64 MB of completions; the summary, its Parquet copy included, holds a fraction of that."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(256):
            row = line(problem=f"p{number // 8}", text="5") | {"completion": "x" * 250_000 + r"\boxed{5}"}
            file.write(json.dumps(row) + "\n")
    (tmp_path / "out").mkdir()
    path.rename(tmp_path / "out" / "samples.jsonl")
    args = EvaluationArguments(compare=["a", "b"], output=str(tmp_path / "out"), bootstrap_samples=10)
    pool = pa.default_memory_pool()
    tracemalloc.start()
    summary = summarize(args, {"settings": {}, "models": {}, "benchmarks": {}})
    peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    tracemalloc.stop()
    assert summary["results"][0]["metrics"]["mean@8"]["value"] == 1
    assert peak < 56 * 2**20  # a row group of 16 MB, as Python objects and in Arrow


def test_memory_does_not_grow_with_the_row_group_of_another_tools_parquet(tmp_path):
    """pandas writes all rows as one group, which was read at once."""
    texts = [f"{number:09}" * 500 for number in range(10_000)]  # 45 MB
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", use_dictionary=False, compression="none")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1
    pool = pa.default_memory_pool()
    before, peak, rows = pool.bytes_allocated(), 0, 0
    for row in read_rows(tmp_path / "x.parquet"):
        assert row["text"] == texts[rows]
        peak, rows = max(peak, pool.bytes_allocated() - before), rows + 1
    assert rows == len(texts)
    assert peak < 16 * 2**20


# Files of other tools

LM_EVAL = [
    {
        **{"doc_id": i // 2, "doc": {"question": f"q{i // 2}", "answer": "..."}, "target": f"Work.\n#### {i // 2}"},
        **{"arguments": {"gen_args_0": {"arg_0": "Q"}}, "resps": [["#### 0", "#### 1"]], "filtered_resps": ["0"]},
        **{"filter": ("strict-match", "flexible-extract")[i % 2], "metrics": ["exact_match"], "exact_match": 1.0},
    }
    for i in range(4)
]


@pytest.mark.parametrize(
    ("rows", "mean", "problems"),
    [
        (LM_EVAL, {"mean@2": 0.5, "pass@2": 1.0}, 2),  # each response stands there once for each filter
        ([{"response": "#### 1", "answer": 1.0}, {"response": "#### 1", "answer": 2.0}], {"mean@1": 0.5}, 2),
        (
            [{"id": "a", "completion": f"#### {i}", "solution": r"x is \boxed{1}"} for i in range(3)],
            {"mean@3": 1 / 3, "pass@1": 1 / 3, "pass@3": 1, "maj@3": 1 / 3},
            1,
        ),
        (
            [{"question": "long " * 50, "outputs": ["Answer: 7", "Answer: 7", "Answer: 8"], "final_answer": ["7"]}],
            {"mean@3": 2 / 3, "pass@2": 1, "maj@3": 1},
            1,
        ),
        (
            [
                {
                    "prompt": [{"role": "user", "content": "q"}],
                    "completion": [{"role": "assistant", "content": "#### 3"}],
                    "reward_model": {"ground_truth": "3"},
                }
            ],
            {"mean@1": 1},
            1,
        ),
        (  # TRL's log of completions, whose `answer` is what our reward read
            [
                {"step": 1, "prompt": g, "completion": "#### 3", "advantage": 0.0, "solution": g, "answer": "3"}
                for g in (r"\boxed{3}", r"\boxed{4}")
            ],
            {"mean@1": 0.5},
            2,
        ),
        ([{"doc": {"answer": "3"}, "response": {"text": ["#### 3", "#### 4"]}}], {"mean@2": 0.5}, 1),
        (  # `id` is that of the row, not of the problem
            [{"id": f"row {i}", "question": "q", "gold": "1", "response": f"#### {i}"} for i in range(2)],
            {"mean@2": 0.5, "pass@2": 1},
            1,
        ),
        (  # a message in parts, as OpenAI's interface writes it
            [
                {
                    "question": "q",
                    "gold": "12",
                    "response": [
                        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("#### 1", "2")]}
                    ],
                }
            ],
            {"mean@1": 1},
            1,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_other_tools(tmp_path, rows, mean, problems, kind):
    path = tmp_path / f"theirs.{kind}"
    if kind == "jsonl":
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    summary, messages = evaluate_file(path, tmp_path / "out")
    [(key, metrics)] = results(summary).items()
    assert key == ("theirs", "theirs")
    assert summary["results"][0]["problems"] == problems
    assert {name: metrics[name] for name in mean} == pytest.approx(mean)
    assert "completions from `" in messages[0]
    assert pq.read_table(tmp_path / "out" / "samples.parquet").num_rows == summary["results"][0]["samples"]


def test_names_of_models_and_benchmarks_are_kept(tmp_path):
    rows = [
        {"model": model, "task": task, "id": 1, "output": r"\boxed{1}", "target": "1", "truncated": task == "u"}
        for model, task in (("a", "t"), ("a", "u"), ("b", "t"))
    ]
    summary, _ = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert list(results(summary)) == [("a", "t"), ("a", "u"), ("b", "t"), ("a", "overall")]
    assert [row["truncated"] for row in summary["results"][:3]] == [0, 1, 0]
    assert summary["results"][0]["mean_tokens"] is None


def test_two_sample_files_of_lm_eval_are_one_benchmark(tmp_path):
    for name, hour in (("a", 10), ("b", 11)):
        rows = [
            {"doc_id": i, "target": "5", "resps": [[f"#### {5 + i * (name == 'a')}"]], "filter": "x"} for i in (0, 1)
        ]
        path = write(tmp_path / f"samples_gsm8k_cot_2026-01-01T{hour}-00-00.000001.jsonl", rows)
        evaluate_file(path, tmp_path / name)
    args = EvaluationArguments(compare=[str(tmp_path / "a"), str(tmp_path / "b")])
    [result] = compare(args)["results"]
    assert (result["benchmark"], result["metrics"]["mean"]["value"]) == ("gsm8k_cot", 0.5)


def test_options_of_a_file_are_those_of_a_multiple_choice(tmp_path):
    texts = (r"\boxed{12}", r"\boxed{10}", r"\boxed{B}")
    rows = [{"completion": text, "gold": "B", "options": ["10", "12"], "id": i} for i, text in enumerate(texts)]
    rows.append({"completion": r"\boxed{12}", "gold": "B", "options": [{"no": "texts"}], "id": 3})
    summary, _ = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert [row["reward"] for row in read_lines(tmp_path / "out" / "samples.jsonl")] == [1, 0, 1, 0]
    assert results(summary)["x", "x"]["mean@1"] == 0.5


def test_given_columns_are_taken(tmp_path):
    rows = [{"a": {"b": "#### 1"}, "c": "1", "d": 5, "text": "#### 2"}, {"a": {"b": "#### 2"}, "c": "1", "d": 5}]
    columns = {"completion_column": "a.b", "answer_column": "c", "problem_column": "d"}
    summary, messages = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out", **columns)
    assert results(summary)["x", "x"]["mean@2"] == 0.5
    assert "completions from `a.b`, gold answers from `c`, problems told apart by `d`" in messages[0]


def test_a_samples_file_of_ours_scores_as_it_did(tmp_path):
    rows = [line("p", 0), line("p", 1, "6"), line("q", 0, "7"), line("q", 1, "8")]
    summary, _ = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert results(summary)["m", "b"] == pytest.approx(
        {"mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25, "strict@2": 0.25}
    )
    rescored = list(read_lines(tmp_path / "out" / "samples.jsonl"))
    assert [{**row, "path": "", "index": 0} for row in rescored] == [{**row, "path": ""} for row in rows]


def test_scoring_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    rows = [{"id": i // 2, "text": f"#### {i}", "answer": "3"} for i in range(10)]
    path = write(tmp_path / "x.jsonl", rows)
    evaluate_file(path, tmp_path / "whole")
    monkeypatch.setattr("math_answers.evaluation.import_samples.BATCH", 4)
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    evaluate_file(path, tmp_path / "out")
    target = tmp_path / "out" / "samples.jsonl"
    assert target.read_bytes() == whole
    target.write_bytes(whole[: len(whole) // 2 + 5])
    _, messages = evaluate_file(path, tmp_path / "out")
    assert target.read_bytes() == whole
    assert any("torn" in text for text in messages) and any("are scored in" in text for text in messages)
    write(path, rows[1:])
    with pytest.raises(ValueError, match="the benchmark samples has changed"):
        evaluate_file(path, tmp_path / "out")
    summary, _ = evaluate_file(path, tmp_path / "out", overwrite=True)
    assert summary["results"][0]["samples"] == 9


def test_a_torn_last_line_of_another_tool_is_left_out_and_the_file_is_not_touched(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"text": "#### 1", "answer": "1"}])
    with path.open("a") as file:
        file.write('{"text": "####')
    before = path.read_bytes()
    summary, messages = evaluate_file(path, tmp_path / "out")
    assert summary["results"][0]["samples"] == 1
    assert any("(line 2, 14 bytes) is torn and left out" in text for text in messages)
    assert path.read_bytes() == before


def test_rows_without_a_completion_are_left_out_and_counted(tmp_path):
    rows = [{"id": i, "outputs": ["#### 1"] * i, "answer": "1"} for i in (1, 0, 2)]
    summary, messages = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert (summary["results"][0]["problems"], summary["results"][0]["samples"]) == (2, 3)
    assert any(": 1 rows without a completion are left out." in text for text in messages)


def test_null_completions_count_as_wrong_and_are_reported(tmp_path):
    rows = [{"id": 1, "text": None, "answer": "1"}, {"id": 2, "text": ["#### 1", None], "answer": "1"}]
    summary, messages = evaluate_file(write(tmp_path / "x.jsonl", [rows[1], rows[0]]), tmp_path / "out")
    assert (summary["results"][0]["samples"], summary["results"][0]["metrics"]["mean@1"]["value"]) == (3, 0.25)
    assert any(": 2 completions are null" in text for text in messages)


def test_uneven_numbers_of_samples_are_said(tmp_path):
    rows = [{"id": i, "outputs": ["#### 1"] * i, "answer": "1"} for i in (1, 3)]
    _, messages = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert any("the problems have from 1 to 3 samples" in text for text in messages)


def test_one_benchmark_without_readable_gold_answers_does_not_hide_the_others(tmp_path):
    rows = [{"task": task, "text": "#### 1", "answer": gold} for task, gold in (("t", "???"), ("u", "1"))]
    summary, messages = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert list(results(summary)) == [("x", "u")]
    assert any("x, t: the gold answer of 1 of 1 samples cannot be read" in text for text in messages)


def test_unreadable_gold_answers_are_left_out_and_counted(tmp_path):
    rows = [{"id": 1, "text": "#### 1", "answer": "1"}, {"id": 2, "text": "#### 1", "answer": "???"}]
    summary, messages = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    [result] = summary["results"]
    assert (result["problems"], result["samples"], result["unreadable_gold"]) == (1, 2, 1)
    assert result["metrics"]["mean@1"]["value"] == 1
    assert any("1 of 2 samples cannot be read" in text for text in messages)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"words": "#### 1", "answer": "1"}], {}, r"columns words, answer; its completion .*`completion_column`"),
        ([{"text": "#### 1", "goal": "1"}], {}, r"columns text, goal; its answer .*`answer_column`"),
        ([{"text": "1", "answer": "1"}], {"completion_column": "txt"}, "its completion was looked for in txt"),
        ([{"text": "1", "answer": "1"}, {"answer": "1"}], {}, "row 2 has no `answer` or `text`"),
        ([{"id": 1, "text": "1", "answer": "1"}, {"text": "1", "answer": "1"}], {}, "row 2 has no `id`"),
        ([{"id": 1, "text": "1", "answer": a} for a in "12"], {}, "row 2 has another gold answer than an earlier"),
        ([{"text": 5, "answer": "1"}], {}, "row 1 has no `answer` or `text` that can be used"),
        ([{"text": "1", "answer": "1"}], {"k": [4]}, "pass@4 needs 4 samples of every problem, and one has 1"),
        ([{"text": "1", "answer": "???"}], {}, "none of the gold answers can be read"),
        ([], {}, "holds no sample"),
    ],
)
def test_bad_samples_files(tmp_path, rows, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out", **settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "text,answer\n1,1\n", "line 1 is not a JSON object, it begins with 'text,answer'"),
        ("x.parquet", "no parquet", "not a parquet file"),
        ("missing.jsonl", None, "No such file"),
        ("x.json", '[\n{"text": "1", "answer": "1"}\n]', "is one JSON array"),
        ("x.jsonl", '{"a":' * 100_000, "holds no sample"),  # deeper than Python recurses
    ],
)
def test_unreadable_samples_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate_file(tmp_path / name, tmp_path / "out")


# Summaries and comparisons


def test_disagreements_are_counted_with_examples(tmp_path):
    rows = [line("p", 0, completion="The answer is 5"), line("p", 1), line("p", 2, completion=r"\boxed{5} #### 6")]
    summary, _ = evaluate_file(write(tmp_path / "x.jsonl", rows), tmp_path / "out")
    disagreements = summary["results"][0]["disagreements"]
    assert disagreements["count"] == 2
    assert disagreements["share"] == pytest.approx(2 / 3)
    shown = [(example["answer"], example["strict_answer"]) for example in disagreements["examples"]]
    assert shown == [("5", None), ("5", "6")]


def test_shares_of_what_befell_the_samples(tmp_path):
    paths = ["number", "timeout", "crash", "no_answer", "unreadable_answer", "refused", "no_answer", "text"]
    rows = [line("p", i, "6", path=path, tokens=i, truncated=i < 2) for i, path in enumerate(paths)]
    write(tmp_path / "samples.jsonl", rows)
    args = EvaluationArguments(compare=["a", "b"], output=str(tmp_path), bootstrap_samples=10)
    [result] = summarize(args, {"settings": {}, "models": {}, "benchmarks": {}})["results"]
    names = ("no_answer", "unparsable", "timed_out", "truncated", "mean_tokens")
    assert [result[name] for name in names] == [2 / 8, 2 / 8, 2 / 8, 2 / 8, 3.5]
    assert result["verifier_paths"]["refused"] == 1


def test_compare_on_common_problems(tmp_path):
    right = {"a": "1100", "b": "1110"}  # right or wrong on the problems 0 to 3
    for name, marks in right.items():
        rows = [line(f"p{i}", 0, "5" if mark == "1" else "6", model=name) for i, mark in enumerate(marks)]
        if name == "b":
            rows.append(line("p9", 0, model=name))
        write(tmp_path / name / "samples.jsonl", [*rows, line(benchmark=f"only {name}", model=name)])
    args = EvaluationArguments(compare=[str(tmp_path / "a"), str(tmp_path / "b" / "samples.jsonl")])
    with logged() as messages:
        [result] = compare(args)["results"]
    mean = result["metrics"]["mean"]
    assert (result["benchmark"], result["problems"], mean["a"], mean["b"], mean["value"]) == ("b", 4, 0.5, 0.75, 0.25)
    assert (mean["low"], mean["high"]) == (0, 0.75)
    assert mean["p_value"] == 1, "one problem differs"
    assert any("compared on the 4 problems" in text for text in messages)
    assert "`compare` leaves out only a, only b: only one of the two evaluations has it." in messages


def test_compare_two_files_of_samples_with_different_names(tmp_path):
    """Each file names its benchmark, and the two had none in common."""
    for name, answers in (("before", "56"), ("after", "55")):
        rows = [{"problem": f"p{i}", "completion": FULL % text, "answer": "5"} for i, text in enumerate(answers)]
        evaluate_file(write(tmp_path / f"{name}.jsonl", rows), tmp_path / name)
    with logged() as messages:
        [result] = compare(EvaluationArguments(compare=[str(tmp_path / "before"), str(tmp_path / "after")]))["results"]
    assert (result["benchmark"], result["metrics"]["mean"]["value"]) == ("before / after", 0.5)
    assert messages == ["`compare` pairs before of A with after of B: each is the only benchmark there."]


def test_compare_models_of_one_folder(tmp_path):
    rows = [line("p", model=model, benchmark=b, text=t) for model, t in (("a", "5"), ("b", "6")) for b in "xy"]
    write(tmp_path / "samples.jsonl", rows)
    args = EvaluationArguments(compare=["a", "b"], output=str(tmp_path))
    found = compare(args)["results"]
    assert [result["benchmark"] for result in found] == ["x", "y", "overall"]
    assert [result["metrics"]["mean"]["value"] for result in found] == [-1, -1, -1]
    with pytest.raises(ValueError, match=r"does not name one model: .* holds samples of a, b\."):
        compare(EvaluationArguments(compare=[str(tmp_path), str(tmp_path)]))
    with pytest.raises(ValueError, match=r"c does not name one model: .* holds samples of a, b\."):
        compare(EvaluationArguments(compare=["a", "c"], output=str(tmp_path)))


def test_compare_with_other_numbers_of_samples_leaves_maj_out(tmp_path):
    write(tmp_path / "a" / "samples.jsonl", [line("p", 0), line("p", 1, "6")])
    write(tmp_path / "b" / "samples.jsonl", [line("p", i) for i in range(4)])
    args = EvaluationArguments(compare=[str(tmp_path / "a"), str(tmp_path / "b")])
    with logged() as messages:
        [result] = compare(args)["results"]
    assert list(result["metrics"]) == ["mean", "pass@1", "pass@2", "strict"]
    assert messages[0].startswith("Problems have ") and " samples: maj" in messages[0]


@pytest.mark.parametrize("own", ["b", "c"])
def test_compare_says_what_is_not_finished(tmp_path, own):
    for name, samples, b in (("a", 5, own), ("b", 6, "b")):
        rows = [line(f"p{i // 2}", i % 2, model=name, benchmark=b) for i in range(samples)]
        write(tmp_path / name / "samples.jsonl", rows)
        settings = {"settings": {"n": 2}, "benchmarks": {b: {"problems": 3}}}
        (tmp_path / name / "run.json").write_text(json.dumps(settings))
    args = EvaluationArguments(compare=[str(tmp_path / "a"), str(tmp_path / "b" / "samples.jsonl")])
    with logged() as messages:
        [result] = compare(args)["results"]
    assert any(f"{tmp_path / 'a'} has 5 of 6 samples of {own}, all from the longest" in text for text in messages)
    assert any("`compare`: " in text and "from 1 to 2 samples" in text for text in messages)
    assert "maj" not in result["metrics"] and not any(f"{tmp_path / 'b'}" in text for text in messages)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([line("q")], "no problem of b in common"),
        ([line("p", gold="6")], "has the gold answers '5' in A and '6' in B"),
        (
            [line("p", benchmark="c"), line("p", benchmark="d")],
            "no benchmark; they have b and c, d.*column `benchmark`",
        ),
        ([line("q", benchmark="c")], "no problem of b / c in common"),
        ([{"text": "x", "answer": "1"}], "has no model, benchmark.*`samples`"),
        ([], "holds samples of none"),
    ],
)
def test_evaluations_that_cannot_be_compared(tmp_path, rows, message):
    write(tmp_path / "a" / "samples.jsonl", [line("p")])
    write(tmp_path / "b" / "samples.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        compare(EvaluationArguments(compare=[str(tmp_path / "a"), str(tmp_path / "b")]))


def test_a_summary_says_what_is_missing(tmp_path):
    write(tmp_path / "samples.jsonl", [line("p", 0)])
    record = {"settings": {"n": 2}, "models": {}, "benchmarks": {"b": {"problems": 1}}}
    args = EvaluationArguments(compare=["a", "b"], output=str(tmp_path), bootstrap_samples=10)
    [result] = summarize(args, record)["results"]
    assert result["complete"] is False
    assert read_scores(tmp_path / "samples.jsonl")["m", "b"].counts.tolist() == [1]


def test_gold_answers_of_another_tool_keep_their_digits(tmp_path):
    golds = ["12157665459056928803", "0.12345678901234567891", "1e22"]
    rows = [f'{{"completion": "\\\\boxed{{{gold}}}", "answer": {gold}}}' for gold in golds]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    evaluate_file(tmp_path / "rows.jsonl", tmp_path / "out")
    written = pq.read_table(tmp_path / "out" / "samples.parquet")
    assert written["gold"].to_pylist() == [*golds[:2], "1" + "0" * 22]
    assert written["reward"].to_pylist()[:2] == [1.0, 1.0]


@pytest.mark.parametrize("gold", ["1e-20000000", "1e20000000", "-1e-99999999999", "0e-99999999999", "[5, 2.5e-401]"])
def test_a_gold_answer_that_would_be_a_huge_text_is_refused_by_its_exponent(tmp_path, gold):
    """62 bytes wrote 60 MB, or ended in a MemoryError."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"completion": "x", "answer": 5}}\n{{"completion": "x", "answer": {gold}}}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl: row 2, `answer`: The number .*E[+-]?\d+ cannot be written"):
        evaluate_file(rows, tmp_path / "out")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 20_000


def test_exponents_beyond_all_arithmetic_are_texts(tmp_path):
    """`Decimal` raises what is no ValueError."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "x", "answer": 5, "time": 1e-99999999999999999999}\n')
    assert evaluate_file(rows, tmp_path / "out")[0]["results"][0]["samples"] == 1


HOSTILE = "m\x1b]0;owned\x07\x1b[2J\u202e<img src=x>`a`|[b](http://c)*d*\r\x9b1m"


def test_nothing_in_a_sample_commands_the_terminal_or_marks_up_the_table(tmp_path, capsys, monkeypatch):
    """A model's name with an escape sequence could rename the window; one with a link was one in `table.md`."""
    wrong = [line(f"{HOSTILE}{n}", n % 2, "6", model=HOSTILE, benchmark=HOSTILE, gold=HOSTILE) for n in range(3)]
    write(tmp_path / "rows.jsonl", [*wrong, line("q", model=HOSTILE, benchmark=HOSTILE)])
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    main(["--samples", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out"), "--bootstrap_samples", "20"])
    printed = "".join(capsys.readouterr())
    table = (tmp_path / "out" / "table.md").read_text()
    for text in (printed.replace("\r", ""), table):  # carriage returns of the progress bar
        assert [character for character in text if not character.isprintable() and character not in "\n\t"] == []
        assert r"m\x1b]0;owned\x07\x1b[2J\u202e" in text and r"\x9b1m" in text
    assert r"&lt;img src=x&gt;\`a\`\|[b]\(http://c)\*d\*" in table and "<img" not in table
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines() if row.startswith("|")}) == 1

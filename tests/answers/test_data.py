"""load_math_dataset: schemas, gold answers, local and hub sources, and what is refused."""

import json
import os
import re
import subprocess
import sys
import warnings
from decimal import Decimal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from real_problems import DATA, SIZES
from repository import ROOT
from tiny import tiny_tokenizer

from math_answers import math_accuracy_reward
from math_answers.data import load_math_dataset
from math_answers.data.files import load_rows as load_rows_of
from math_answers.data.problems import DAPO_PREFIX, DAPO_SUFFIX, EURUS_SUFFIX, report_overlap
from math_answers.data.prompts import PromptOptions, prepare_prompts

GSM8K = [
    {"question": "one?", "answer": "It is <<1*1234=1234>>1,234.\n#### 1,234"},
    {"question": "two?", "answer": "Less.\n#### -2"},
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_PREFIX}Find $x$.{DAPO_SUFFIX}", "role": "user"}],
        "reward_model": {"ground_truth": "21", "style": "rule"},
    }
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text):
    return [{"role": "user", "content": text}]


def load_rows(tmp_path, rows, **kwargs):
    """What is made of rows: `prompt` and `solution`, without the columns that stay as they are."""
    loaded = load_math_dataset(write(tmp_path / "rows.jsonl", rows), **kwargs)
    return loaded.select_columns(["prompt", "solution"])[:]


@pytest.mark.parametrize(
    ("rows", "prompt", "solution"),
    [
        (GSM8K, "one?", r"\boxed{1234}"),
        (
            [{"problem": "p", "solution": r"So \boxed{1}, no: \boxed{\frac{1}{2}}.", "level": "1"}],
            "p",
            r"\boxed{\frac{1}{2}}",
        ),
        ([{"problem": "p", "solution": r"\boxed{7}", "answer": r"\sqrt{2}"}], "p", r"\boxed{\sqrt{2}}"),
        ([{"problem": "p", "answer": 33}], "p", r"\boxed{33}"),
        ([{"problem": "p", "answer": 1e16}], "p", r"\boxed{10000000000000000}"),
        ([{"problem": "p", "answer": r"\$32,\!348"}], "p", r"\boxed{32348}"),
        ([{"problem": "p", "answer": r"$2\sqrt{3}$"}], "p", r"\boxed{2\sqrt{3}}"),
        ([{"Problem": "p", "Answer": 204, "ID": "2024-I-1"}], "p", r"\boxed{204}"),
        (DAPO, f"{DAPO_PREFIX}Find $x$.{DAPO_SUFFIX}", r"\boxed{21}"),
    ],
)
def test_known_schemas(tmp_path, rows, prompt, solution):
    loaded = load_rows(tmp_path, rows)
    assert loaded.keys() == {"prompt", "solution"}
    assert (loaded["prompt"][0], loaded["solution"][0]) == (user(prompt), solution)


def test_named_columns_win(tmp_path):
    rows = [{"problem": "no", "answer": "1", "text": "yes", "meta": {"gold": {"value": "2"}}}]
    loaded = load_rows(tmp_path, rows, problem_column="text", answer_column="meta.gold.value")
    assert loaded == {"prompt": [user("yes")], "solution": [r"\boxed{2}"]}
    loaded = load_rows(tmp_path, rows, answer_column="meta.gold.value")
    assert loaded == {"prompt": [user("no")], "solution": [r"\boxed{2}"]}


def test_other_columns_are_kept_for_the_reward_functions(tmp_path):
    rows = [
        {"problem": "p", "answer": "1", "level": 3, "meta": {"tags": ["a"]}, "options": 5, "completions": "no"},
        {"problem": "q", "answer": "???", "level": 4, "meta": {"tags": []}, "options": 5, "completions": "no"},
    ]
    with pytest.warns(UserWarning, match="Dropped 1 of the 2 rows"):
        loaded = load_math_dataset(write(tmp_path / "rows.jsonl", rows))[:]
    # Not those that a reward function takes with another meaning
    assert loaded == {
        "prompt": [user("p")],
        "solution": [r"\boxed{1}"],
        **{name: [rows[0][name]] for name in ("problem", "answer", "level", "meta")},
    }


def test_column_name_with_a_dot_in_it(tmp_path):
    loaded = load_rows(tmp_path, [{"a.b": "p", "c": "3"}], problem_column="a.b", answer_column="c")
    assert loaded == {"prompt": [user("p")], "solution": [r"\boxed{3}"]}


def test_instruction_and_system_prompt(tmp_path):
    loaded = load_rows(tmp_path, GSM8K, instruction="Box it.", system_prompt="Be brief.", max_samples=1)
    assert loaded["prompt"] == [[{"role": "system", "content": "Be brief."}, *user("one?\n\nBox it.")]]


def test_instruction_takes_the_place_of_that_of_dapo(tmp_path):
    assert load_rows(tmp_path, DAPO, instruction="Box it.")["prompt"] == [user("Find $x$.\n\nBox it.")]


def test_system_prompt_takes_the_place_of_that_of_the_data(tmp_path):
    rows = [{"problem": [{"role": "system", "content": "old"}, *user("p")], "answer": "1"}]
    assert load_rows(tmp_path, rows)["prompt"][0][0]["content"] == "old"
    assert load_rows(tmp_path, rows, system_prompt="new")["prompt"] == [
        [{"role": "system", "content": "new"}, *user("p")]
    ]


def test_unusable_rows_are_dropped_with_one_warning(tmp_path):
    golds = ["1", "", None, "???", "}", "2"]
    rows = [{"problem": f"p{index}", "answer": gold} for index, gold in enumerate(golds)]
    rows.append({"problem": None, "answer": "3"})
    with pytest.warns(UserWarning, match=r"Dropped 5 of the 7 rows .* row 1, problem='p1', answer=''") as record:
        loaded = load_rows(tmp_path, rows)
    assert len([warning for warning in record if "Dropped" in str(warning.message)]) == 1
    assert loaded == {"prompt": [user("p0"), user("p5")], "solution": [r"\boxed{1}", r"\boxed{2}"]}


def test_worked_solution_without_a_box_is_dropped(tmp_path):
    rows = [{"problem": "p", "solution": "x = 3"}, {"problem": "q", "solution": r"\boxed{3}"}]
    with pytest.warns(UserWarning, match="Dropped 1 of the 2 rows"):
        assert load_rows(tmp_path, rows)["prompt"] == [user("q")]


def test_missing_numbers_are_dropped(tmp_path):
    path = write(
        tmp_path / "rows.parquet", [{"problem": "p", "answer": 72.0}, {"problem": "q", "answer": float("nan")}]
    )
    with pytest.warns(UserWarning, match="Dropped 1 of the 2 rows"):
        loaded = load_math_dataset(path)
    assert math_accuracy_reward(["Answer: 72"], loaded["solution"][:]) == [1.0]


def test_no_usable_row_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"None of the 2 rows .* answer='\?'"):
        load_rows(tmp_path, [{"problem": "p", "answer": "?"}, {"problem": "q", "answer": ""}])


def test_texts_that_json_makes_dates_are_named_and_parquet_keeps_them(tmp_path):
    """The advice was to name the right columns, which they were."""
    rows = [{"problem": "When?", "answer": "2024-01-31"}]
    with pytest.raises(ValueError, match=r"column 'answer' has dates .* save it as Parquet"):
        load_math_dataset(write(tmp_path / "dates.jsonl", rows))
    assert load_math_dataset(write(tmp_path / "dates.parquet", rows))["solution"] == [r"\boxed{2024-01-31}"]


def test_missing_columns_lists_those_found(tmp_path):
    with pytest.raises(ValueError, match=r"has the columns text, label;.*\(problem, answer\).*`answer_column`"):
        load_rows(tmp_path, [{"text": "p", "label": "1"}])
    with pytest.raises(ValueError, match=r"has the columns question, answer;.*\(question, gold\)"):
        load_rows(tmp_path, GSM8K, problem_column="question", answer_column="gold")
    with pytest.raises(ValueError, match=r"reward_model\.truth"):
        load_rows(tmp_path, DAPO, problem_column="prompt", answer_column="reward_model.truth")


def test_problem_that_is_no_prompt(tmp_path):
    with pytest.raises(ValueError, match=r"must be text or chat messages.*got 5"):
        load_rows(tmp_path, [{"problem": 5, "answer": "1"}])
    with pytest.raises(ValueError, match="must be text or chat messages"):
        load_rows(tmp_path, [{"problem": [{"role": "user", "text": "p"}], "answer": "1"}])
    with pytest.raises(ValueError, match="ends with the role 'assistant'"):
        rows = [{"problem": [*user("p"), {"role": "assistant", "content": "Well"}], "answer": "1"}]
        load_rows(tmp_path, rows, instruction="Box it.")


@pytest.mark.parametrize("name", ["test.jsonl", "test.json", "test.parquet", "test-00000-of-00001.parquet"])
def test_folder(tmp_path, name):
    write(tmp_path / name, GSM8K)
    write(tmp_path / "train.jsonl", GSM8K[:1])
    assert len(load_math_dataset(tmp_path, "test")) == 2


def test_folder_of_shards_and_subfolder(tmp_path):
    write(tmp_path / "main" / "train-00000-of-00002.parquet", GSM8K[:1])
    write(tmp_path / "main" / "train-00001-of-00002.parquet", GSM8K[1:])
    loaded = load_math_dataset(str(tmp_path), config_name="main")
    assert loaded["solution"][:] == [r"\boxed{1234}", r"\boxed{-2}"]
    with pytest.raises(FileNotFoundError, match=r"'socratic'.*holds main"):
        load_math_dataset(tmp_path, config_name="socratic")


def test_a_part_of_a_split_is_taken_from_files_as_from_the_hub(tmp_path):
    """`train[:10]` of a single file was the whole file, and `train[:90%]` with `train[90%:]` twice the same rows."""
    rows = [{"problem": f"{n}", "answer": f"{n}"} for n in range(10)]
    file = write(tmp_path / "train.jsonl", rows)
    for name in (file, tmp_path):
        held_out = load_math_dataset(name, "train[80%:]")
        assert [prompt[0]["content"] for prompt in held_out["prompt"]] == ["8", "9"]
        assert len(load_math_dataset(name, "train[:3]")) == 3
        with pytest.raises(ValueError, match=r"'train\+test' .* joins splits of hub datasets alone\. Give .* train\."):
            load_math_dataset(name, "train+test")
        with pytest.raises(ValueError, match=r"Cannot read .* format: train\[a:\]"):
            load_math_dataset(name, "train[a:]")
    with pytest.raises(ValueError, match=r"a stream cannot be cut"):
        load_rows_of(str(file), "train[:3]", None, streaming=True)


def test_missing_or_doubtful_split_lists_the_files(tmp_path):
    write(tmp_path / "train.jsonl", GSM8K)
    with pytest.raises(FileNotFoundError, match=r"No split 'test' .* found train\.jsonl"):
        load_math_dataset(tmp_path, "test")
    write(tmp_path / "train.parquet", GSM8K)
    with pytest.raises(ValueError, match=r"more than once: train\.jsonl, train\.parquet"):
        load_math_dataset(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "data/gsm8k/train", "train.jsonl"])
def test_missing_path_is_named(name):
    with pytest.raises(FileNotFoundError, match=r"No such file or folder: .*(nowhere|where|train)"):
        load_math_dataset(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"problem": \n', "Cannot read .*rows.jsonl"),
        ("rows.parquet", "no parquet", "Cannot read .*rows.parquet"),
        ("rows.jsonl", "", "rows.jsonl is empty"),
        ("rows.csv", "problem,answer\n", "must end in one of .jsonl, .json, .parquet"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_math_dataset(tmp_path / name)


@pytest.mark.parametrize("count", [0, -1, True])
def test_max_samples_must_be_positive(tmp_path, count):
    with pytest.raises(ValueError, match=f"`max_samples` must be at least 1, got {count}"):
        load_rows(tmp_path, GSM8K, max_samples=count)


def test_max_samples_takes_the_first_rows(tmp_path):
    rows = [{"problem": f"p{index}", "answer": str(index)} for index in range(5)]
    assert load_rows(tmp_path, rows, max_samples=2)["solution"] == [r"\boxed{0}", r"\boxed{1}"]
    assert len(load_rows(tmp_path, rows, max_samples=9)["solution"]) == 5


def test_config_name_is_refused_for_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl has no configuration 'main'"):
        load_rows(tmp_path, GSM8K, config_name="main")


def test_hub_name(monkeypatch):
    calls = []

    def load_dataset(name, config_name, *, split, streaming):
        calls.append((name, config_name, split))
        return datasets.Dataset.from_list([{"problem": config_name, "solution": r"\boxed{1}"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_math_dataset("owner/math", "test", config_name="algebra, geometry")
    assert loaded["prompt"][:] == [user("algebra"), user("geometry")]
    assert calls == [("owner/math", "algebra", "test"), ("owner/math", "geometry", "test")]


@pytest.mark.parametrize("error", [datasets.exceptions.DatasetNotFoundError("gone"), ConnectionError("offline")])
def test_name_that_is_neither_local_nor_on_the_hub(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match=f"'data/gsm8k' is not a local file or folder .*{error}"):
        load_math_dataset("data/gsm8k")


@pytest.mark.parametrize(("name", "split"), SIZES)
def test_every_real_row_is_kept(name, split):
    count = SIZES[name, split]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = load_math_dataset(DATA / name, split)
    assert len(loaded) == count
    assert math_accuracy_reward(loaded["solution"][:200], loaded["solution"][:200]) == [1.0] * min(count, 200)


def test_instruction_of_the_real_dapo_prompts_is_replaced():
    for row in load_math_dataset(DATA / "dapo", instruction="Box it."):
        text = row["prompt"][0]["content"]
        assert "Answer" not in text and text.endswith("\n\nBox it.") and len(text) > 40


def test_path_with_glob_characters_is_a_path(tmp_path):
    path = write(tmp_path / "[run] *" / "train.jsonl", GSM8K)
    assert len(load_math_dataset(path)) == len(load_math_dataset(path.parent)) == 2


EURUS = [
    {
        "data_source": source,
        "prompt": [
            {"content": "When tackling complex reasoning tasks, ...", "role": "system"},
            {"content": f"{problem}{EURUS_SUFFIX}", "role": "user"},
        ],
        "ability": ability,
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    for source, problem, ability, gold in [
        ("numina_olympiads", "Find $x$.", "math", r"\frac{1}{2}"),
        ("taco", "Write a program.", "code", '{"inputs": ["1"], "outputs": ["2"]}'),
        ("numina_cn_k12", "Find $y$.", "math", r"y \in [1, 2)"),
    ]
]


def test_eurus_math_without_its_code_system_message_and_format(tmp_path):
    loaded = load_rows(tmp_path, EURUS, row_filter="ability=math", instruction="Box it.", system_prompt="")
    assert loaded == {
        "prompt": [user("Find $x$.\n\nBox it."), user("Find $y$.\n\nBox it.")],
        "solution": [r"\boxed{\frac{1}{2}}", r"\boxed{y \in [1, 2)}"],
    }
    untouched = load_rows(tmp_path, EURUS, row_filter="ability=math", max_samples=1)
    assert untouched["prompt"] == [EURUS[0]["prompt"]] or untouched["prompt"][0][1]["content"].endswith(EURUS_SUFFIX)


@pytest.mark.parametrize(
    ("row_filter", "message"),
    [
        ("ability", "must be column=value"),
        ("=math", "must be column=value"),
        ("topic=math", "has the columns data_source, prompt"),
        ("ability=poetry", r"leaves no row.*\['code', 'math'\]"),
    ],
)
def test_row_filter_that_cannot_be_meant(tmp_path, row_filter, message):
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path, EURUS, row_filter=row_filter)


GOOD_LINE = b'{"problem": "p", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD_LINE * 3 + b'{"problem": "p", "ans', r"line 4 of rows.jsonl is not complete JSON .*Was the file cut"),
        (GOOD_LINE * 3 + b'{"problem": "p", "ans\n' + GOOD_LINE, r"line 4 of rows.jsonl is not complete JSON"),
        (GOOD_LINE + b"5\n", r"line 2 of rows.jsonl is not a JSON object: 5"),
        (
            GOOD_LINE + b'{"problem": "a\\ud800", "answer": "1"}\n',
            r"line 2 of rows.jsonl is not UTF-8 .*surrogates not allowed",
        ),
        (GOOD_LINE + b"\x00\x00\n", r"line 2 of rows.jsonl is not complete JSON"),
        (
            GOOD_LINE + '{"problem": "caf\u00e9", "answer": "1"}\n'.encode("latin-1"),
            r"line 2 of rows.jsonl is not UTF-8",
        ),
        (
            '{"problem": "caf\u00e9", "answer": "1"}\n'.encode("latin-1"),
            r"line 1 of rows.jsonl is not UTF-8 .* Save the file as UTF-8",
        ),
        ((GOOD_LINE * 2).decode().encode("utf-16"), r"line 1 of rows.jsonl is not UTF-8 .* Save the file as UTF-8"),
    ],
)
def test_a_torn_or_wrongly_encoded_line_is_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_math_dataset(path)


def test_a_file_of_one_array_that_is_torn(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"problem": "p", "answer": "1"},\n{"problem": "p",\n')
    with pytest.raises(ValueError, match=r"Cannot read .*rows\.json"):
        load_math_dataset(path)
    path.write_text('[\n{"problem": "p", "answer": "1"},\n{"problem": "q", "answer": "2"}]\n')
    assert len(load_math_dataset(path)) == 2


def test_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD_LINE + b"\n\n" + GOOD_LINE.replace(b'p"', b'q"'))
    assert load_math_dataset(path)["prompt"][:] == [user("p"), user("q")]


def test_answers_of_several_types(tmp_path):
    golds = [1, "2", 2.5, r"\frac{1}{2}", None, True, {"a": 1}, [1], "1/3", "05"]
    rows = [{"problem": f"p{index}", "answer": gold} for index, gold in enumerate(golds)]
    with pytest.warns(UserWarning, match=r"Dropped 3 of the 10 rows"):
        loaded = load_rows(tmp_path, rows)
    expected = ["1", "2", "2.5", r"\frac{1}{2}", "1", "1/3", "05"]
    assert math_accuracy_reward([f"\\boxed{{{gold}}}" for gold in expected], loaded["solution"]) == [1.0] * 7


# What a JSON file has as answers, in one column, and the first that `datasets` reads as another number
LOST = [
    (["12157665459056928803"], "12157665459056928803"),
    (["5", "-9223372036854775809"], "-9223372036854775809"),
    (["9007199254740993", "0.5"], "9007199254740993"),
    (["123456789012345678901234567890", "5"], "123456789012345678901234567890"),
    (["123456789012345678901234567890", '"x"'], "123456789012345678901234567890"),
    (["[1, 12157665459056928803]", "[0.5]"], "12157665459056928803"),
    (["1", "0.1000000000000000055"], "0.1000000000000000055"),
    (["1", "1e400"], "1E+400"),
    (["1", "1e-400"], "1E-400"),
    (["null", "12157665459056928803"], "12157665459056928803"),
    (["0.123456789012345", '"x"'], "0.123456789012345"),
    (["5", "1e-12", '"x"'], "1E-12"),
    (["5", '"12157665459056928803.5"'], "'12157665459056928803.5'"),
    (["5", '"[1, 2]"'], "'[1, 2]'"),
    (["5", '"true"'], "'true'"),
]
KEPT = [
    ["1", "9223372036854775807"],
    ["9007199254740993", "9007199254740995"],
    ["12157665459056928803", '"x+1"'],
    ['"12157665459056928803"', '"0.1000000000000000055"'],
    ["9007199254740992", "0.5", "0.1", "2.50", "1e5"],
    ["[9007199254740993]", "[1, 2]"],
    ["0.3", '"x"', "-6.81", '"0.009"', '"[1, 2)"', "1e5"],
    ["0.3", "[0.3]", '"x"'],
]


def json_files(folder, answers):
    """The answers in a file of lines and one of an array, in a column and in one in a mapping."""
    for name, row in (
        ("flat", '{{"problem": "p{}", "answer": {}}}'),
        ("nested", '{{"prompt": "p{}", "reward_model": {{"ground_truth": {}, "weight": 0.5}}}}'),
    ):
        rows = [row.format(index, answer) for index, answer in enumerate(answers)]
        for suffix, text in ((".jsonl", "\n".join(rows)), (".json", "[" + ",\n".join(rows) + "]")):
            (folder / (name + suffix)).write_text(text)
            yield folder / (name + suffix)


@pytest.mark.parametrize(("answers", "lost"), LOST)
def test_a_number_that_would_lose_digits_is_named_with_its_row(tmp_path, answers, lost):
    """They became floats: right answers earned 0, and a row with 1e400 was missing."""
    index = next(index for index, answer in enumerate(answers) if lost.lower().replace("+", "").strip("'") in answer)
    for path in json_files(tmp_path, answers):
        place = f"line {index + 1}" if path.suffix == ".jsonl" else f"row {index}"
        with pytest.raises(
            ValueError, match=re.escape(f"{place} of {path.name}: ") + f".* (number|text) {re.escape(lost)}, which"
        ):
            load_math_dataset(path)


@pytest.mark.parametrize("answers", KEPT)
def test_numbers_keep_their_digits(tmp_path, answers):
    for path in json_files(tmp_path, answers):
        solutions = load_math_dataset(path)["solution"]
        for answer, solution in zip(answers, solutions, strict=True):
            assert math_accuracy_reward([f"\\boxed{{{str(answer).strip('[]')}}}".replace('"', "")], [solution]) == [1.0]


def test_decimals_of_an_array_and_of_an_object_over_several_lines(tmp_path):
    """`datasets` writes the rows of an array again, with ten decimals, and hands such an object to pandas."""
    path = tmp_path / "rows.json"
    path.write_text('[{"problem": "p", "answer": 0.1}, {"problem": "q", "answer": 0.12345678901}]')
    with pytest.raises(ValueError, match=r"row 1 .* number 0.12345678901, which would become 0.123456789\. Write all"):
        load_math_dataset(path)
    path.write_text('{"problem": "p",\n "answer": 12345678901234567890}')
    with pytest.raises(ValueError, match=r"line 1 of rows\.json is not a whole JSON object"):
        load_math_dataset(path)


def test_numbers_of_a_stream_and_of_a_parquet_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "level": 0.5}\n{"prompt": "q", "level": 9007199254740993}\n')
    with pytest.raises(ValueError, match=r"line 2 of rows\.jsonl: 'level' has the number 9007199254740993"):
        load_rows_of(str(path), "train", None, streaming=True)
    answers = pa.array([Decimal("123456789012345678901234567890"), Decimal("0.50")], pa.decimal128(38, 2))
    pq.write_table(pa.table({"problem": ["p", "q"], "answer": answers}), tmp_path / "rows.parquet")
    solutions = load_math_dataset(tmp_path / "rows.parquet")["solution"][:]
    assert solutions[1] == r"\boxed{0.50}" and solutions[0].startswith(r"\boxed{123456789012345678901234567890")


def test_reading_problems_does_not_look_through_the_verifier(tmp_path, monkeypatch):
    """`datasets` made its fingerprint of all objects that the function reaches: ten seconds a dataset."""
    hashed = []
    monkeypatch.setattr("datasets.fingerprint.Hasher.update", lambda self, value: hashed.append(value))
    assert load_rows(tmp_path, [{"problem": "p", "answer": "1"}])["solution"] == [r"\boxed{1}"]
    assert [value for value in hashed if callable(value)] == []


def test_trls_own_schema(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2", "source": "x"}]
    loaded = load_rows(tmp_path, rows)
    assert (loaded["prompt"][0], loaded["solution"][0]) == (user("1+1?"), r"\boxed{2}")


def test_a_problem_of_the_wrong_type_is_named_with_its_row(tmp_path):
    with pytest.raises(ValueError, match=r"Row 1: A problem must be text or chat messages.*got 5"):
        load_rows(tmp_path, [{"problem": "p", "answer": "1"}, {"problem": 5, "answer": "1"}])


def test_missing_fields_are_dropped(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, {"problem": "q"}, {"answer": "2"}, {}]
    with pytest.warns(UserWarning, match="Dropped 3 of the 4 rows"):
        assert load_rows(tmp_path, rows)["prompt"] == [user("p")]


def test_duplicates_are_kept_and_reported(tmp_path):
    rows = [
        {"problem": problem, "answer": gold} for problem, gold in [("Find x.", "1"), ("y?", "2"), ("find  X.", "3")]
    ]
    with pytest.warns(
        UserWarning, match=r"1 of the 3 rows .* \(the first: rows 0 and 2\), 1 of them with another gold"
    ):
        assert len(load_rows(tmp_path, rows)["prompt"]) == 3


def test_only_the_first_rank_warns(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_rows(tmp_path, [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": ""}])


def test_problems_of_the_benchmark_in_the_training_data_are_reported(tmp_path):
    train = load_math_dataset(write(tmp_path / "dapo.jsonl", DAPO), instruction="Box it.")
    rows = [{"problem": "Other", "answer": "1"}, {"problem": "FIND  $x$.", "answer": "21"}]
    benchmark = load_math_dataset(write(tmp_path / "benchmark.jsonl", rows), instruction="Box it.")
    with pytest.warns(UserWarning, match=r"1 of the 2 evaluation problems .* in row 1: 'FIND"):
        assert report_overlap(train, benchmark) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert report_overlap(train, benchmark.select([0])) == 0


def test_overlap_of_the_real_data():
    gsm8k = [load_math_dataset(DATA / "gsm8k", split) for split in ("train", "test")]
    assert report_overlap(*gsm8k) == 0
    with pytest.warns(UserWarning, match="{0} of the {0}".format(SIZES["gsm8k", "test"])):
        assert report_overlap(gsm8k[1], gsm8k[1]) == SIZES["gsm8k", "test"]


def test_long_prompts_are_dropped_with_a_count(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ extra }}"
    rows = [{"problem": " ".join(["w1"] * length), "answer": "1"} for length in (1, 5, 3, 9)]
    limit = {"tokenizer": tokenizer, "chat_template_kwargs": {"extra": "w2 w3"}}
    with pytest.warns(UserWarning, match=r"Dropped 2 of the 4 prompts .* more than `max_prompt_tokens=5` tokens"):
        kept = load_rows(tmp_path, rows, max_prompt_tokens=5, **limit)["prompt"]
    assert [len(prompt[0]["content"].split()) for prompt in kept] == [1, 3]  # 3 and 5 tokens with the template's
    assert len(load_rows(tmp_path, rows, max_prompt_tokens=11, **limit)["prompt"]) == 4
    with pytest.raises(ValueError, match=r"All 4 prompts .* more than `max_prompt_tokens=2`"):
        load_rows(tmp_path, rows, max_prompt_tokens=2, **limit)
    with pytest.raises(ValueError, match="needs a `tokenizer`"):
        load_rows(tmp_path, rows, max_prompt_tokens=5)
    with pytest.raises(ValueError, match="`max_prompt_tokens` must be at least 1, got 0"):
        load_rows(tmp_path, rows, max_prompt_tokens=0, **limit)


def test_an_empty_prompt_is_counted_and_left_to_the_trainer():
    """A null problem ended in the chat template's own error; the trainer names the row."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ messages[0]['content'] }} {% endfor %}"
    rows = datasets.Dataset.from_list([{"question": "w1"}, {"question": None}, {"question": "w1 w2 w3"}])
    options = PromptOptions(tokenizer=tokenizer, max_prompt_tokens=2)
    with pytest.warns(UserWarning, match="Dropped 1 of the 3 prompts"):
        kept = prepare_prompts(rows, "rows", options, "question")["prompt"]
    assert [len(prompt) for prompt in kept] == [1, 0]


MEASURE = """
import sys, threading, time, datasets
from pathlib import Path
from math_answers.data import load_math_dataset
from math_answers.data.files import load_rows as load_rows_of
datasets.disable_progress_bars()
anonymous = lambda: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
peak, before, done = 0, anonymous(), threading.Event()
def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch); thread.start()
rows = len(load_math_dataset(sys.argv[1])); done.set(); thread.join()
print(rows, peak - before)
"""


@pytest.mark.slow
def test_a_large_file_is_streamed(tmp_path):
    """A file of any size takes the memory of some batches: here 400 MB, within 300 MB."""
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for index in range(40_000):
            file.write(json.dumps({"problem": f"{index} {'long problem ' * 800}", "answer": str(index)}) + "\n")
    assert path.stat().st_size > 400e6
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    rows, megabytes = done.stdout.split()
    assert int(rows) == 40_000
    assert float(megabytes) < 300


def test_nothing_of_a_dataset_is_executed():
    """Only these calls could; a loading script or a pickle in a dataset must stay data."""
    for path in [
        path for folder in ("math_answers", "troll_trl", "scripts") for path in ROOT.glob(f"{folder}/**/*.py")
    ]:
        text = path.read_text()
        assert "trust_remote_code=True" not in text, path
        assert not re.search(r"(?<![\w.])(?:eval|exec)\(|pickle\.load|import pickle\b(?!_)", text), path
        assert text.count("torch.load(") == len(re.findall(r"torch\.load\([^\n]*weights_only=True\)", text)), path

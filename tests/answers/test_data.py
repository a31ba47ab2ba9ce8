"""load_math_dataset: schemas, gold answers, files, and what is refused."""

import json
import warnings
from decimal import Decimal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.real_problems import DATA, SIZES
from tests.tiny import tiny_tokenizer
from troll_trl.data import load_math_dataset
from troll_trl.data.problems import DAPO_PREFIX, DAPO_SUFFIX, EURUS_SUFFIX, report_overlap
from troll_trl.rewards import math_accuracy_reward

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
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text):
    return [{"role": "user", "content": text}]


def load_rows(tmp_path, rows, **kwargs):
    """What is made of rows: `prompt` and `solution`, without the columns that stay as they are."""
    loaded = load_math_dataset(write(tmp_path / "rows.jsonl", rows), **kwargs)
    return loaded.select_columns(["prompt", "solution"])[:]


# -- Columns and golds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "prompt", "solution"),
    [
        (GSM8K, "one?", r"\boxed{1,234}"),
        ([{"problem": "p", "solution": r"So \boxed{1}, no: \boxed{\frac12}."}], "p", r"\boxed{\frac12}"),
        ([{"problem": "p", "solution": r"\boxed{7}", "answer": r"\sqrt{2}"}], "p", r"\boxed{\sqrt{2}}"),
        ([{"problem": "p", "answer": 33}], "p", r"\boxed{33}"),
        ([{"problem": "p", "answer": 7e-7}], "p", r"\boxed{0.0000007}"),
        ([{"Problem": "p", "Answer": 204, "ID": "2024-I-1"}], "p", r"\boxed{204}"),
        ([{"question": "p", "final_answer": ["$2$", "-3"], "context": None}], "p", r"\boxed{$2$, -3}"),
        ([{"prompt": user("p"), "solution": "2"}], "p", r"\boxed{2}"),
        (DAPO, f"{DAPO_PREFIX}Find $x$.{DAPO_SUFFIX}", r"\boxed{21}"),
    ],
)  # fmt: skip
def test_known_schemas(tmp_path, rows, prompt, solution):
    loaded = load_rows(tmp_path, rows)
    assert (loaded["prompt"][0], loaded["solution"][0]) == (user(prompt), solution)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_files_of_each_kind(tmp_path, kind):
    loaded = load_math_dataset(write(tmp_path / f"rows.{kind}", GSM8K), "test")
    assert loaded["prompt"][:] == [user("one?"), user("two?")]
    assert loaded["solution"][:] == [r"\boxed{1,234}", r"\boxed{-2}"]
    rows = [{"problem": "p", "answer": "0.50"}, {"problem": "q", "answer": "007"}]  # as they are written
    assert load_math_dataset(write(tmp_path / f"numbers.{kind}", rows))["solution"][:] == [
        r"\boxed{0.50}",
        r"\boxed{007}",
    ]


def test_named_columns_win(tmp_path):
    rows = [{"problem": "no", "answer": "1", "text.x": "yes", "meta": {"gold": {"value": "2"}}}]
    loaded = load_rows(tmp_path, rows, problem_column="text.x", answer_column="meta.gold.value")
    assert loaded == {"prompt": [user("yes")], "solution": [r"\boxed{2}"]}


def test_other_columns_are_kept_for_the_reward_functions(tmp_path):
    row = {"problem": "p", "answer": "1", "level": 3, "meta": {"tags": ["a"]}, "completions": "no"}
    loaded = load_math_dataset(write(tmp_path / "rows.jsonl", [row]))[0]
    # Not those that a reward function takes with another meaning
    del row["completions"]
    assert loaded == {"prompt": user("p"), "solution": r"\boxed{1}", **row}


def test_rows_without_a_problem_or_an_answer_are_dropped_and_counted(tmp_path):
    no_answers = ["proof", r"\text{Proof}", "notfound", "not found", "nan", "['70']", "???", "}", "", None, "7" * 1001]
    answers = ["70", r"\infty", "none", "[70]", "A"]
    rows = [{"problem": f"p{index}", "answer": gold} for index, gold in enumerate([*answers, *no_answers])]
    with pytest.warns(UserWarning, match="12 of the 17 rows"):
        loaded = load_rows(tmp_path, [*rows, {"answer": "1"}])
    assert loaded["solution"] == [f"\\boxed{{{gold}}}" for gold in answers]
    with pytest.raises(ValueError, match="1 of the 1 rows"):
        load_rows(tmp_path, [{"problem": "p", "solution": "a worked one without a box: x = 3"}])


def test_numbers_that_cannot_be_right_are_dropped(tmp_path):
    """JSON's 12157665459056928803 becomes a rounded float."""
    golds = [72.0, float("nan"), 12157665459056928803.0]
    path = write(tmp_path / "rows.parquet", [{"problem": f"{gold}", "answer": gold} for gold in golds])
    with pytest.warns(UserWarning, match="2 of the 3 rows"):
        assert load_math_dataset(path)["solution"][:] == [r"\boxed{72}"]
    exact = pa.array([Decimal("123456789012345678901234567890.00")], pa.decimal128(38, 2))
    pq.write_table(pa.table({"problem": ["p"], "answer": exact}), path)
    assert load_math_dataset(path)["solution"][:] == [r"\boxed{123456789012345678901234567890.00}"]


def test_missing_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has the columns text, label;.*\(problem, answer\)"):
        load_rows(tmp_path, [{"text": "p", "label": "1"}])
    with pytest.raises(ValueError, match=r"reward_model\.truth"):
        load_rows(tmp_path, DAPO, problem_column="prompt", answer_column="reward_model.truth")


@pytest.mark.parametrize(("name", "split"), SIZES)
def test_every_real_row_is_kept(name, split):
    count = SIZES[name, split]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = load_math_dataset(DATA / name, split)
    assert len(loaded) == count
    assert math_accuracy_reward(loaded["solution"][:200], loaded["solution"][:200]) == [1.0] * min(count, 200)


# -- Prompts and filters ----------------------------------------------------------------------------------------------


def test_instruction_and_system_prompt(tmp_path):
    loaded = load_rows(tmp_path, GSM8K, instruction="Box it.", system_prompt="Be brief.", max_samples=1)
    assert loaded["prompt"] == [[{"role": "system", "content": "Be brief."}, *user("one?\n\nBox it.")]]
    rows = [{"problem": [{"role": "system", "content": "old"}, *user("p")], "answer": "1"}]
    assert load_rows(tmp_path, rows)["prompt"][0][0]["content"] == "old"
    new = [{"role": "system", "content": "new"}, *user("p")]
    assert load_rows(tmp_path, rows, system_prompt="new")["prompt"] == [new]


def test_instruction_takes_the_place_of_that_of_dapo(tmp_path):
    assert load_rows(tmp_path, DAPO, instruction="Box it.")["prompt"] == [user("Find $x$.\n\nBox it.")]
    for row in load_math_dataset(DATA / "dapo", instruction="Box it."):
        text = row["prompt"][0]["content"]
        assert "Answer" not in text and text.endswith("\n\nBox it.") and len(text) > 40


def test_eurus_math_without_its_code_system_message_and_format(tmp_path):
    rows = [
        {
            "prompt": [{"content": "When tackling ...", "role": "system"}, *user(f"{problem}{EURUS_SUFFIX}")],
            "ability": ability,
            "reward_model": {"ground_truth": gold, "style": "rule"},
        }
        for problem, ability, gold in [("Find $x$.", "math", "1"), ("Write.", "code", "{}"), ("$y$?", "math", "2")]
    ]  # fmt: skip
    loaded = load_rows(tmp_path, rows, row_filter="ability=math", instruction="Box it.", system_prompt="")
    assert loaded["prompt"] == [user("Find $x$.\n\nBox it."), user("$y$?\n\nBox it.")]
    assert len(load_rows(tmp_path, rows, row_filter="reward_model.ground_truth=2")["prompt"]) == 1


def test_a_problem_that_is_no_prompt_is_refused(tmp_path):
    for problem in (5, [{"role": "user", "text": "p"}]):
        with pytest.raises(ValueError, match="must be text or chat messages"):
            load_rows(tmp_path, [{"problem": problem, "answer": "1"}])
    with pytest.raises(ValueError, match="ends with the role 'assistant'"):
        rows = [{"problem": [*user("p"), {"role": "assistant", "content": "Well"}], "answer": "1"}]
        load_rows(tmp_path, rows, instruction="Box it.")


def test_long_prompts_are_dropped_with_a_count(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ extra }}"
    rows = [{"problem": " ".join(["w1"] * length), "answer": "1"} for length in (1, 5, 3, 9)]
    limit = {"tokenizer": tokenizer, "chat_template_kwargs": {"extra": "w2 w3"}}
    with pytest.warns(UserWarning, match="Dropped 2 of the 4 prompts"):
        kept = load_rows(tmp_path, rows, max_prompt_tokens=5, **limit)["prompt"]
    assert [len(prompt[0]["content"].split()) for prompt in kept] == [1, 3]  # 3 and 5 tokens with the template's


def test_problems_of_the_benchmark_in_the_training_data_are_reported(tmp_path):
    train = load_math_dataset(write(tmp_path / "dapo.jsonl", DAPO), instruction="Box it.")
    rows = [{"problem": "Other", "answer": "1"}, {"problem": "FIND  $x$.", "answer": "21"}]
    benchmark = load_math_dataset(write(tmp_path / "benchmark.jsonl", rows), instruction="Box it.")
    with pytest.warns(UserWarning, match="1 of the 2 evaluation problems"):
        assert report_overlap(train, benchmark) == 1
    assert report_overlap(train, benchmark.select([0])) == 0


# -- Files ------------------------------------------------------------------------------------------------------------

NESTED = {"prompt": "p" * 200, "reward_model": {"ground_truth": 3}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b'{"problem": "p"}', b'{"problem": '], "line 2 of"),
        ([b'{"problem": "p", "answer": "1"}', b'{"problem": "\xff", "answer": "1"}'], "line 2 of .* UTF-8"),
        (
            [json.dumps(NESTED).encode()] * 60_000 + [b'{"prompt": "q", "reward_model": {"ground_truth": "x"}}'],
            r"line 60001 of .*: the column 'reward_model.ground_truth' has 'x' \(str\), but int",
        ),
    ],
)
def test_the_line_that_cannot_be_read_is_named(tmp_path, lines, message):
    """`datasets` said "Couldn't cast array of type string to null", and neither file nor line."""
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message):
        load_math_dataset(tmp_path / "rows.jsonl")


def test_folder(tmp_path):
    write(tmp_path / "main" / "test.parquet", GSM8K[:1])
    write(tmp_path / "main" / "train-00000-of-00002.parquet", GSM8K[:1])
    write(tmp_path / "main" / "train-00001-of-00002.parquet", GSM8K[1:])
    for folder, config in ((tmp_path / "main", None), (tmp_path, "main")):
        assert len(load_math_dataset(folder, config_name=config)) == 2


def test_a_part_of_a_split_is_taken_from_files_as_from_the_hub(tmp_path):
    """`train[:10]` of a single file was the whole file, and `train[:90%]` with `train[90%:]` twice the same rows."""
    rows = [{"problem": f"{n}", "answer": f"{n}"} for n in range(10)]
    file = write(tmp_path / "[run] *" / "train.jsonl", rows)
    assert [prompt[0]["content"] for prompt in load_math_dataset(file, "train[80%:]")["prompt"]] == ["8", "9"]
    assert len(load_math_dataset(file, "train[:3]")) == 3

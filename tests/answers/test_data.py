"""load_math_dataset: schemas, gold answers, files and hub, and what is refused."""

import json
import re
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
        ([{"problem": "p", "answer": r"$2\sqrt{3}$"}], "p", r"\boxed{2\sqrt{3}}"),
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


def test_golds_that_are_no_answers_are_dropped_and_counted(tmp_path):
    no_answers = ["proof", r"\text{Proof}", "notfound", "nan", "['70']", "???", "}", "", None]
    answers = ["70", r"\infty", "none", "[70]", "A"]
    rows = [{"problem": f"p{index}", "answer": gold} for index, gold in enumerate([*answers, *no_answers])]
    with pytest.warns(UserWarning, match=r"9 of the 14 rows .* 'proof' \(1\)") as record:
        loaded = load_rows(tmp_path, rows)
    assert len([warning for warning in record if "Dropped" in str(warning.message)]) == 1
    assert loaded["solution"] == [f"\\boxed{{{gold}}}" for gold in answers]
    with pytest.raises(ValueError, match=r"1 of the 1 rows .* '\?' \(1\)"):
        load_rows(tmp_path, [{"problem": "p", "answer": "?"}])


def test_a_worked_solution_without_a_box_and_a_missing_problem_are_dropped(tmp_path):
    rows = [{"problem": "p", "solution": "x = 3"}, {"problem": "q", "solution": r"\boxed{3}"}, {"solution": "\\boxed1"}]
    with pytest.warns(UserWarning, match="2 of the 3 rows"):
        assert load_rows(tmp_path, rows)["prompt"] == [user("q")]


def test_numbers_that_cannot_be_right_are_dropped(tmp_path):
    """JSON's 12157665459056928803 becomes a rounded float."""
    golds = [72.0, float("nan"), 12157665459056928803.0]
    path = write(tmp_path / "rows.parquet", [{"problem": f"{gold}", "answer": gold} for gold in golds])
    with pytest.warns(UserWarning, match="2 of the 3 rows"):
        assert load_math_dataset(path)["solution"][:] == [r"\boxed{72}"]
    exact = pa.array([Decimal("123456789012345678901234567890.00")], pa.decimal128(38, 2))
    pq.write_table(pa.table({"problem": ["p"], "answer": exact}), path)
    assert load_math_dataset(path)["solution"][:] == [r"\boxed{123456789012345678901234567890.00}"]


def test_missing_columns_lists_those_found(tmp_path):
    with pytest.raises(ValueError, match=r"has the columns text, label;.*\(problem, answer\).*`answer_column`"):
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
    with pytest.raises(ValueError, match="`row_filter='ability=maths'` leaves no row"):
        load_rows(tmp_path, rows, row_filter="ability=maths")
    assert len(load_rows(tmp_path, rows, row_filter="reward_model.ground_truth=2")["prompt"]) == 1


def test_problem_that_is_no_prompt_is_named_with_its_row(tmp_path):
    with pytest.raises(ValueError, match=r"Row 1: .*must be text or chat messages.*got 5"):
        load_rows(tmp_path, [{"problem": "p", "answer": "1"}, {"problem": 5, "answer": "1"}])
    with pytest.raises(ValueError, match="must be text or chat messages"):
        load_rows(tmp_path, [{"problem": [{"role": "user", "text": "p"}], "answer": "1"}])
    with pytest.raises(ValueError, match="ends with the role 'assistant'"):
        rows = [{"problem": [*user("p"), {"role": "assistant", "content": "Well"}], "answer": "1"}]
        load_rows(tmp_path, rows, instruction="Box it.")


def test_max_samples_takes_the_first_rows(tmp_path):
    rows = [{"problem": f"p{index}", "answer": str(index)} for index in range(5)]
    assert load_rows(tmp_path, rows, max_samples=2)["solution"] == [r"\boxed{0}", r"\boxed{1}"]
    assert len(load_rows(tmp_path, rows, max_samples=9)["solution"]) == 5
    with pytest.raises(ValueError, match="`max_samples` must be at least 1, got 0"):
        load_rows(tmp_path, rows, max_samples=0)


def test_long_prompts_are_dropped_with_a_count(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ extra }}"
    rows = [{"problem": " ".join(["w1"] * length), "answer": "1"} for length in (1, 5, 3, 9)]
    limit = {"tokenizer": tokenizer, "chat_template_kwargs": {"extra": "w2 w3"}}
    with pytest.warns(UserWarning, match=r"Dropped 2 of the 4 prompts .* more than `max_prompt_tokens=5` tokens"):
        kept = load_rows(tmp_path, rows, max_prompt_tokens=5, **limit)["prompt"]
    assert [len(prompt[0]["content"].split()) for prompt in kept] == [1, 3]  # 3 and 5 tokens with the template's
    with pytest.raises(ValueError, match=r"All 4 prompts .* more than `max_prompt_tokens=2`"):
        load_rows(tmp_path, rows, max_prompt_tokens=2, **limit)


def test_an_empty_prompt_is_counted_and_left_to_the_trainer():
    """A null problem ended in the chat template's own error; the trainer names the row."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ messages[0]['content'] }} {% endfor %}"
    rows = datasets.Dataset.from_list([{"question": "w1"}, {"question": None}, {"question": "w1 w2 w3"}])
    options = PromptOptions(tokenizer=tokenizer, max_prompt_tokens=2)
    with pytest.warns(UserWarning, match="Dropped 1 of the 3 prompts"):
        kept = prepare_prompts(rows, "rows", options, "question")["prompt"]
    assert [len(prompt) for prompt in kept] == [1, 0]


def test_problems_of_the_benchmark_in_the_training_data_are_reported(tmp_path, monkeypatch):
    train = load_math_dataset(write(tmp_path / "dapo.jsonl", DAPO), instruction="Box it.")
    rows = [{"problem": "Other", "answer": "1"}, {"problem": "FIND  $x$.", "answer": "21"}]
    benchmark = load_math_dataset(write(tmp_path / "benchmark.jsonl", rows), instruction="Box it.")
    with pytest.warns(UserWarning, match=r"1 of the 2 evaluation problems .* in row 1: 'FIND"):
        assert report_overlap(train, benchmark) == 1
    monkeypatch.setenv("RANK", "3")  # the first rank warns
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert report_overlap(train, benchmark.select([0])) == 0
        assert report_overlap(train, benchmark) == 1


# -- Files and the hub ------------------------------------------------------------------------------------------------

NULLS = [{"problem": "p" * 200, "answer": None}] * 60_000
NESTED = [{"prompt": "p" * 200, "reward_model": {"ground_truth": 3}}] * 60_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"problem": "p"}\n{"problem": \n', r"line 2 of .*rows\.jsonl is not a JSON object"),
        ('{"problem": "p", "answer": "1"}\n\n[1, 2]\n', r"line 3 of .*rows\.jsonl is not a JSON object: \[1, 2\]"),
        (b'{"problem": "p", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n', r"line 2 of .*rows\.jsonl .* UTF-8"),
        ([*NULLS, {"problem": "q", "answer": "7"}], r"line 60001 of .*rows\.jsonl: the column 'answer' has '7'"),
        (
            [*NESTED, {"prompt": "q", "reward_model": {"ground_truth": "x"}}],
            r"line 60001 of .*rows\.jsonl: the column 'reward_model.ground_truth' has 'x' \(str\), but int in",
        ),
        ("", r"rows\.jsonl is empty"),
    ],
)
def test_the_line_that_cannot_be_read_is_named(tmp_path, content, message):
    """`datasets` said "Couldn't cast array of type string to null", and neither file nor line."""
    path = tmp_path / "rows.jsonl"
    if isinstance(content, list):
        write(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_math_dataset(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.txt"])
def test_unreadable_file_is_named(tmp_path, name):
    (tmp_path / name).write_text("problem,answer\n1,2,3,4,5\n1,2,3\n\n\n,1,2,3,4,5,6,7,8\n")
    with pytest.raises(ValueError, match=rf"Cannot read .*{name}"):
        load_math_dataset(tmp_path / name)


def test_folder(tmp_path):
    write(tmp_path / "main" / "test.parquet", GSM8K[:1])
    write(tmp_path / "main" / "train-00000-of-00002.parquet", GSM8K[:1])
    write(tmp_path / "main" / "train-00001-of-00002.parquet", GSM8K[1:])
    for folder, config in ((tmp_path / "main", None), (tmp_path, "main")):
        assert len(load_math_dataset(folder, config_name=config)) == 2
    write(tmp_path / "own" / "train.jsonl", GSM8K)
    with pytest.raises(ValueError, match='Unknown split "test"'):
        load_math_dataset(tmp_path / "own", "test")


def test_a_part_of_a_split_is_taken_from_files_as_from_the_hub(tmp_path):
    """`train[:10]` of a single file was the whole file, and `train[:90%]` with `train[90%:]` twice the same rows."""
    rows = [{"problem": f"{n}", "answer": f"{n}"} for n in range(10)]
    file = write(tmp_path / "[run] *" / "train.jsonl", rows)
    assert [prompt[0]["content"] for prompt in load_math_dataset(file, "train[80%:]")["prompt"]] == ["8", "9"]
    assert len(load_math_dataset(file, "train[:3]")) == 3


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "data/train.jsonl"])
def test_missing_path_is_named(name):
    with pytest.raises(FileNotFoundError, match=r"No such file or folder: .*(nowhere|where|train)"):
        load_math_dataset(name)


def test_hub_name(monkeypatch):
    calls = []

    def load_dataset(path, name, *, split, streaming):
        calls.append((path, name, split))
        return datasets.Dataset.from_list([{"problem": "p", "solution": r"\boxed{1}"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_math_dataset("owner/math", "test", config_name="algebra")
    assert calls == [("owner/math", "algebra", "test")]


def test_nothing_of_a_dataset_is_executed():
    """Only these calls could; a loading script or a pickle in a dataset must stay data."""
    for path in [
        path for folder in ("math_answers", "troll_trl", "scripts") for path in ROOT.glob(f"{folder}/**/*.py")
    ]:
        text = path.read_text()
        assert "trust_remote_code=True" not in text, path
        assert not re.search(r"(?<![\w.])(?:eval|exec)\(|pickle\.load|import pickle\b(?!_)", text), path
        assert text.count("torch.load(") == len(re.findall(r"torch\.load\([^\n]*weights_only=True\)", text)), path

"""What `troll grpo` trains on: problems with answers, rows as they are, streams and mixtures; and rewards by name."""

import json
from types import SimpleNamespace

import datasets
import pytest
from tiny import tiny_tokenizer
from trl import DatasetMixtureConfig
from trl.rewards import get_soft_overlong_punishment

from math_answers import math_accuracy_reward
from troll_trl.cli import training_data
from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.cli.reward_functions import is_math_accuracy, load_reward_function
from troll_trl.cli.training_data import load_datasets

CHATS = [{"prompt": [{"role": "user", "content": f"w{n} w5"}], "solution": f"x > {n}", "level": n} for n in range(6)]
TEXTS = [{"prompt": f"w{n} w5", "task": "code" if n % 2 else "math"} for n in range(6)]
PROBLEMS = [{"problem": f"w{n} w5", "answer": str(n), "level": n} for n in range(6)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The training and evaluation sets of settings, of files in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("chats", CHATS), ("texts", TEXTS), ("problems", PROBLEMS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_tokenizer().save_pretrained("model")

    def load(name=None, mixture=None, eval_strategy="no", seed=42, **settings):
        script_args = TrollScriptArguments(dataset_name=name and f"{name}.jsonl", **settings)
        script_args.mixture = DatasetMixtureConfig(**(mixture or {}))
        training_args = SimpleNamespace(
            eval_strategy=eval_strategy, seed=seed, chat_template_kwargs=None, trust_remote_code=False
        )
        model_args = SimpleNamespace(model_name_or_path="model", model_revision=None)
        return load_datasets(script_args, training_args, model_args)

    return load


OTHER_REWARD = {"reward_funcs": ["trl.rewards.accuracy_reward"]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "rows"), [("chats", CHATS), ("texts", TEXTS)])
def test_rows_with_a_prompt_are_taken_as_they_are(load, name, rows, streaming):
    """Neither read as mathematics nor dropped for a gold answer that is none; with all columns."""
    train, evaluation = load(name, dataset_streaming=streaming, **OTHER_REWARD)
    assert list(train) == rows and evaluation is None
    assert isinstance(train, datasets.IterableDataset) == streaming


@pytest.mark.parametrize("settings", [{}, OTHER_REWARD])
def test_problems_to_evaluate_on_that_are_trained_on_are_said_whatever_the_reward(load, settings):
    evaluation = {"eval_strategy": "steps", "eval_dataset_name": "problems.jsonl", "dataset_test_split": "test"}
    with pytest.warns(UserWarning, match="6 of the 6 evaluation problems are in the training data"):
        load("problems", **evaluation, **settings)


@pytest.mark.parametrize(
    ("evaluation", "asked"),
    [
        ({}, ("d.jsonl", "test", "main")),
        ({"eval_dataset_config": "hard"}, ("d.jsonl", "test", "hard")),
        ({"eval_dataset_name": "d.jsonl"}, ("d.jsonl", "test", "main")),
        ({"eval_dataset_name": "d.jsonl", "eval_dataset_config": "hard"}, ("d.jsonl", "test", "hard")),
        ({"eval_dataset_name": "e.jsonl"}, ("e.jsonl", "test", None)),
    ],
)
def test_evaluation_data_of_the_same_dataset_are_of_its_configuration(load, evaluation, asked, monkeypatch):
    seen = []

    def load_rows(name, split, config, streaming):
        seen.append((name, split, config))
        return datasets.Dataset.from_list(TEXTS), []

    monkeypatch.setattr(training_data, "load_rows", load_rows)
    load("d", dataset_config="main", eval_strategy="steps", dataset_test_split="test", **evaluation, **OTHER_REWARD)
    assert seen == [("d.jsonl", "train", "main"), asked]


@pytest.mark.parametrize("streaming", [False, True])
def test_instruction_filter_and_limits_hold_for_any_rows(load, streaming, capsys):
    options = {"dataset_streaming": streaming, "system_prompt": "w1", "instruction": "w2"}
    train, _ = load("texts", row_filter="task=code", max_train_samples=2, **options, **OTHER_REWARD)
    system = {"role": "system", "content": "w1"}
    asked = [[system, {"role": "user", "content": f"w{n} w5\n\nw2"}] for n in (1, 3)]
    assert list(train) == [{"prompt": prompt, "task": "code"} for prompt in asked]


@pytest.mark.parametrize("streaming", [False, True])
def test_long_prompts_of_plain_text_are_dropped(load, streaming, tmp_path):
    rows = [{"prompt": "w1 w2 w3"}, {"prompt": "w1 w2"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = lambda load=load: load("long", max_prompt_tokens=2, dataset_streaming=streaming, **OTHER_REWARD)
    if streaming:
        assert list(load()[0]) == rows[1:]
        return
    with pytest.warns(UserWarning, match="Dropped 1 of the 2 prompts"):
        assert list(load()[0]) == rows[1:]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chats", {}),  # math_accuracy
        ("chats", {"reward_funcs": ["math_answers.math_accuracy_reward"]}),
        ("chats", {"answer_column": "solution", **OTHER_REWARD}),
        ("problems", OTHER_REWARD),  # no prompt to train on otherwise
    ],
)
def test_gold_answers_are_read_where_they_are_wanted(load, name, settings):
    train, _ = load(name, **settings)
    assert train[2]["prompt"] == [{"role": "user", "content": "w2 w5"}] and train[2]["level"] == 2
    gold = train[2]["solution"]
    assert math_accuracy_reward([rf"\boxed{{{'x > 2' if name == 'chats' else 2}}}"], [gold]) == [1.0]


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_of_a_named_column_need_no_gold_answer(load, streaming, tmp_path):
    """As of open-r1's `dataset_prompt_column`, with a reward of its own: an answer was looked for, and not found."""
    rows = [{"task": {"text": f"w{n} w5"}, "tests": [n]} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dataset_streaming": streaming, **OTHER_REWARD}
    train, _ = load("tasks", problem_column="task.text", **options)
    assert list(train) == [{**row, "prompt": [{"role": "user", "content": row["task"]["text"]}]} for row in rows]
    with pytest.raises(ValueError, match=r"`problem_column`: tasks.jsonl has no 'text', it has task, tests\."):
        load("tasks", problem_column="text", **options)
    with pytest.raises(ValueError, match=r"a problem and its answer were looked for"):
        load("tasks", problem_column="task.text")  # math_accuracy


def test_rows_with_neither_prompt_nor_problem_are_refused_with_what_was_looked_for(load, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"text": "w1"}\n')
    with pytest.raises(ValueError, match=r"has the columns text; .*Without `math_accuracy` a column `prompt`"):
        load("odd", **OTHER_REWARD)


# -- Mixtures ---------------------------------------------------------------------------------------------------------

TWO_FILES = [
    {"path": "json", "data_files": "texts.jsonl", "fraction": 0.25, "columns": ["prompt"]},
    {"path": "json", "data_files": "texts.jsonl", "fraction": 0.75, "columns": ["prompt"]},
]


def test_a_mixture_with_a_test_split_that_is_the_same_in_every_process(load):
    mixture = {"datasets": [dict(entry) for entry in TWO_FILES], "test_split_size": 0.25}
    train, evaluation = load(mixture=mixture, eval_strategy="steps", dataset_test_split="test", **OTHER_REWARD)
    assert (len(train), len(evaluation), train.column_names) == (6, 2, ["prompt"])
    again = load(mixture=mixture, eval_strategy="steps", dataset_test_split="test", **OTHER_REWARD)
    assert again[1]["prompt"][:] == evaluation["prompt"][:]
    others = [
        load(mixture=mixture, eval_strategy="steps", dataset_test_split="test", seed=seed, **OTHER_REWARD)[1]["prompt"]
        for seed in range(5)
    ]
    assert any(other[:] != evaluation["prompt"][:] for other in others)


def test_a_mixture_of_problems_and_a_streamed_one(load):
    entry = {"path": "json", "data_files": "problems.jsonl"}
    assert load(mixture={"datasets": [entry]})[0]["solution"][:2] == [r"\boxed{0}", r"\boxed{1}"]
    entry = {"path": "json", "data_files": "texts.jsonl"}
    streamed, _ = load(mixture={"datasets": [entry], "streaming": True}, **OTHER_REWARD)
    assert isinstance(streamed, datasets.IterableDataset) and list(streamed) == TEXTS


def test_streamed_rows_cannot_be_split(load):
    entry = {"path": "json", "data_files": "texts.jsonl"}
    with pytest.raises(ValueError, match=r"`datasets`: .* streamed rows have no split"):
        load(mixture={"datasets": [entry], "streaming": True, "test_split_size": 0.5}, **OTHER_REWARD)


def test_named_columns_hold_for_an_evaluation_file_that_has_them(load, tmp_path):
    """Such a file was refused, with the advice to name its columns."""
    own = [{"task": f"w{n} w5", "key": str(n)} for n in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"task": "w7 w5", "key": "7"}) + "\n")
    names = {"problem_column": "task", "answer_column": "key", "eval_strategy": "steps"}
    for file, solution in (("evaluation.jsonl", "7"), ("problems.jsonl", "0")):
        train, evaluation = load("own", eval_dataset_name=file, **names)
        assert train[2]["solution"] == r"\boxed{2}" and evaluation[0]["solution"] == f"\\boxed{{{solution}}}"


def test_data_without_a_test_split_are_not_evaluated_on(load):
    """The one split of a file has any name, so `test` would be the training data."""
    for option in ("dataset_test_split", "dataset_train_split"):
        splits = {"dataset_test_split": "train[50%:]"} | {option: "test"}
        with pytest.raises(ValueError, match=rf"`{option}` is 'test', but the single file .* `train` alone"):
            load("problems", eval_strategy="steps", **splits)
    with pytest.raises(ValueError, match=r"problems\.jsonl has no split to evaluate on\. Set `dataset_test_split`"):
        load("problems", eval_strategy="epoch")
    with pytest.raises(ValueError, match=r"no split 'test', it has train\."):
        load(mixture={"datasets": [dict(TWO_FILES[0])]}, eval_strategy="epoch", **OTHER_REWARD)
    assert len(load("problems", eval_strategy="epoch", eval_dataset_name="texts.jsonl", **OTHER_REWARD)[1]) == 6


# -- Rewards by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "trl.rewards."])
def test_a_function_that_makes_a_reward_is_called_with_its_arguments(prefix):
    ids = [[1] * length for length in (1, 7, 9, 12)]
    reward = load_reward_function(f"{prefix}get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)")
    assert reward(completion_ids=ids) == get_soft_overlong_punishment(10, 5)(completion_ids=ids)
    assert len({*reward(completion_ids=ids)}) > 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl.rewards.get_soft_overlong_punishment(max_completion_len=3)", "missing 1 required .*soft_punish_cache"),
        ("trl.rewards.get_soft_overlong_punishment(max_completion_len=3", "never closed"),
        ("trl.rewards.get_soft_overlong_punishment(max_completion_len=n)", "malformed node"),
        ("trl.rewards.get_x(a=1)", "has no attribute get_x"),
        ("math_acuracy", "which is none of math_accuracy, accuracy_reward, "),
    ],
)
def test_what_is_no_reward_function_is_refused_by_name(name, expected):
    with pytest.raises(ValueError, match=expected):
        load_reward_function(name)


@pytest.mark.parametrize("path", ["", "rewards.", "rewards.functions."])
def test_the_reward_is_known_by_every_path(path):
    """Else its rows would not get gold answers."""
    name = f"math_answers.{path}math_accuracy_reward"
    assert is_math_accuracy("math_accuracy") and is_math_accuracy(name)
    assert load_reward_function(name) is load_reward_function("math_accuracy") is math_accuracy_reward


@pytest.mark.parametrize(
    "name",
    ["mine.math_accuracy_reward", "math_answers.answer_format_reward", "accuracy_reward", "math_accuracy_reward"],
)
def test_other_rewards_are_not_taken_for_it(name):
    assert not is_math_accuracy(name)

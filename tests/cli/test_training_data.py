"""What `troll grpo` trains on: problems with answers, rows as they are, streams and mixtures; and rewards by name."""

import json
import re
from types import SimpleNamespace

import datasets
import pytest
from trl import DatasetMixtureConfig
from trl.rewards import get_soft_overlong_punishment

from tests.tiny import tiny_tokenizer
from troll_trl.cli import training_data
from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.cli.reward_functions import check_signature, is_math_accuracy, load_reward_function
from troll_trl.cli.training_data import load_datasets
from troll_trl.rewards import math_accuracy_reward

CHATS = [{"prompt": [{"role": "user", "content": f"w{n} w5"}], "solution": f"x > {n}", "level": n} for n in range(6)]
TEXTS = [{"prompt": f"w{n} w5", "task": "code" if n % 2 else "math"} for n in range(6)]
PROBLEMS = [{"problem": f"w{n} w5", "answer": str(n), "level": n} for n in range(6)]


def write_rows(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The training and evaluation sets of settings, of files in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("chats", CHATS), ("texts", TEXTS), ("problems", PROBLEMS)):
        write_rows(tmp_path, name, rows)
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


@pytest.mark.parametrize(("name", "rows", "streaming"), [("chats", CHATS, False), ("texts", TEXTS, True)])
def test_rows_with_a_prompt_are_taken_as_they_are(load, name, rows, streaming):
    """Neither read as mathematics nor dropped for a gold answer that is none; with all columns."""
    train, evaluation = load(name, dataset_streaming=streaming, **OTHER_REWARD)
    assert list(train) == rows and evaluation is None
    assert isinstance(train, datasets.IterableDataset) == streaming


def test_a_configuration_that_a_folder_lacks_is_refused_and_none_is_unset(load, tmp_path):
    """The shipped configs of GSM8K have `main`, and a folder of one's own was "without any data files"."""
    (tmp_path / "hard.jsonl").mkdir()
    write_rows(tmp_path / "hard.jsonl", "train", PROBLEMS)
    with pytest.raises(ValueError, match="`dataset_config` is 'main', but the folder hard"):
        load("hard", dataset_config="main")
    assert len(load("hard", dataset_config="")[0]) == 6


def test_problems_to_evaluate_on_that_are_trained_on_are_said_whatever_the_reward(load):
    evaluation = {"eval_strategy": "steps", "eval_dataset_name": "problems.jsonl", "dataset_test_split": "test"}
    with pytest.warns(UserWarning, match="6 of the 6 evaluation problems"):
        load("problems", **evaluation, **OTHER_REWARD)


@pytest.mark.parametrize(
    ("evaluation", "asked"),
    [
        ({}, ("d.jsonl", "test", "main")),
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
def test_instruction_filter_and_limits_hold_for_any_rows(load, streaming):
    options = {"dataset_streaming": streaming, "system_prompt": "w1", "instruction": "w2"}
    train, _ = load("texts", row_filter="task=code", max_train_samples=2, **options, **OTHER_REWARD)
    system = {"role": "system", "content": "w1"}
    asked = [[system, {"role": "user", "content": f"w{n} w5\n\nw2"}] for n in (1, 3)]
    assert list(train) == [{"prompt": prompt, "task": "code"} for prompt in asked]


def test_long_prompts_of_plain_text_are_dropped(load, tmp_path):
    write_rows(tmp_path, "long", [{"prompt": "w1 w2 w3"}, {"prompt": "w1 w2"}])
    with pytest.warns(UserWarning, match="Dropped 1 of the 2 prompts"):
        assert load("long", max_prompt_tokens=2, **OTHER_REWARD)[0]["prompt"][:] == ["w1 w2"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chats", {}),  # math_accuracy
        ("chats", {"answer_column": "solution", **OTHER_REWARD}),
        ("problems", OTHER_REWARD),  # no prompt to train on otherwise
    ],
)
def test_gold_answers_are_read_where_they_are_wanted(load, name, settings):
    train, _ = load(name, **settings)
    assert train[2]["prompt"] == [{"role": "user", "content": "w2 w5"}] and train[2]["level"] == 2
    gold = train[2]["solution"]
    assert math_accuracy_reward([rf"\boxed{{{'x > 2' if name == 'chats' else 2}}}"], [gold]) == [1.0]


def test_prompts_of_a_named_column_need_no_gold_answer(load, tmp_path):
    """As of open-r1's `dataset_prompt_column`, with a reward of its own."""
    rows = [{"task": {"text": f"w{n} w5"}, "tests": [n]} for n in range(3)]
    write_rows(tmp_path, "tasks", rows)
    train, _ = load("tasks", problem_column="task.text", **OTHER_REWARD)
    assert list(train) == [{**row, "prompt": [{"role": "user", "content": row["task"]["text"]}]} for row in rows]
    with pytest.raises(ValueError, match="`problem_column`"):
        load("tasks", problem_column="text", **OTHER_REWARD)


def test_a_mixture_with_a_test_split_that_is_the_same_in_every_process(load):
    entries = [{"path": "json", "data_files": "texts.jsonl", "fraction": share} for share in (0.25, 0.75)]
    mixture = {"datasets": entries, "test_split_size": 0.25}
    options = {"mixture": mixture, "eval_strategy": "steps", "dataset_test_split": "test", **OTHER_REWARD}
    train, evaluation = load(**options)
    assert (len(train), len(evaluation)) == (6, 2)
    assert load(**options)[1]["prompt"][:] == evaluation["prompt"][:]
    assert any(load(seed=seed, **options)[1]["prompt"][:] != evaluation["prompt"][:] for seed in range(5))


def test_a_mixture_of_problems(load):
    entry = {"path": "json", "data_files": "problems.jsonl"}
    assert load(mixture={"datasets": [entry]})[0]["solution"][:2] == [r"\boxed{0}", r"\boxed{1}"]


# -- Evaluation data --------------------------------------------------------------------------------------------------


def test_named_columns_hold_for_an_evaluation_file_that_has_them(load, tmp_path):
    write_rows(tmp_path, "own", [{"task": f"w{n} w5", "key": str(n)} for n in range(3)])
    write_rows(tmp_path, "evaluation", [{"task": "w7 w5", "key": "7"}])
    names = {"problem_column": "task", "answer_column": "key", "eval_strategy": "steps"}
    for file, solution in (("evaluation.jsonl", "7"), ("problems.jsonl", "0")):
        train, evaluation = load("own", eval_dataset_name=file, **names)
        assert train[2]["solution"] == r"\boxed{2}" and evaluation[0]["solution"] == f"\\boxed{{{solution}}}"


def test_data_without_a_test_split_are_not_evaluated_on(load):
    """The one split of a file has any name, so `test` would be the training data."""
    for option in ("dataset_test_split", "dataset_train_split"):
        splits = {"dataset_test_split": "train[50%:]"} | {option: "test"}
        with pytest.raises(ValueError, match=f"`{option}` is 'test'"):
            load("problems", eval_strategy="steps", **splits)
    with pytest.raises(ValueError, match="no split to evaluate on"):
        load("problems", eval_strategy="epoch")


# -- Rewards by name --------------------------------------------------------------------------------------------------


def test_a_function_that_makes_a_reward_is_called_with_its_arguments():
    ids = [[1] * length for length in (1, 7, 9, 12)]
    reward = load_reward_function("get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)")
    assert reward(completion_ids=ids) == get_soft_overlong_punishment(10, 5)(completion_ids=ids)
    assert len({*reward(completion_ids=ids)}) > 2


@pytest.mark.parametrize(
    "name", ["os.sep", "math_acuracy", "trl.rewards.get_x", "trl.rewards.accuracy_reward(limit=n)"]
)
def test_what_is_no_reward_function_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"`reward_funcs` names {re.escape(repr(name))}"):
        load_reward_function(name)


def test_a_reward_function_that_the_trainer_cannot_call_is_refused():
    """It failed in the first update."""

    def takes_all(prompts, completions, completion_ids, answer, **kwargs): ...
    def takes_completions(completions): ...
    def takes_gold(completions, gold, **kwargs): ...

    check_signature("mine", takes_all, ["prompt", "answer"])
    check_signature("mine", takes_gold, None)  # of a stream, whose columns are not known
    for function, missing in ((takes_completions, "prompts"), (takes_gold, "gold"), (takes_all, "answer")):
        with pytest.raises(ValueError, match=f"`reward_funcs` names 'mine'.* '{missing}'"):
            check_signature("mine", function, ["prompt", "solution"])


def test_the_reward_is_known_by_every_path_and_no_other_is_taken_for_it():
    """Else its rows would not get gold answers."""
    for name in (
        "math_accuracy",
        "troll_trl.rewards.math_accuracy_reward",
        "troll_trl.rewards.functions.math_accuracy_reward",
    ):
        assert is_math_accuracy(name) and load_reward_function(name) is math_accuracy_reward
    for name in ("mine.math_accuracy_reward", "troll_trl.rewards.answer_format_reward", "accuracy_reward"):
        assert not is_math_accuracy(name)

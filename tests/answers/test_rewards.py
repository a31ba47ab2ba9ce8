"""The reward functions in a training: batches, kinds of completions and gold answers, what is logged."""

import pickle
import subprocess
import sys

import pytest
from repository import ROOT

from math_answers import answer_format_reward, math_accuracy_reward
from math_answers.rewards.answers import MAX_ANSWER_CHARACTERS
from math_answers.rewards.verifier import DECIDERS


def test_a_batch_has_a_reward_for_each_row_in_its_order():
    golds = ["72", r"2\sqrt{3}", "C", None, r"2\sqrt{3}", "72", "proof", "x^2-1"]
    answers = ["72", r"\sqrt{12}", "D", "5", r"\sqrt{13}", "7", "proof", "(x-1)(x+1)"]
    rewards = math_accuracy_reward([f"\\boxed{{{answer}}}" for answer in answers], golds)
    assert rewards == [1.0, 1.0, 0.0, None, 0.0, 0.0, None, 1.0]
    assert math_accuracy_reward([], []) == []


def test_chat_and_plain_completions_score_the_same():
    texts = [r"\boxed{4}", "Answer: 5", "no answer"]
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    assert math_accuracy_reward(texts, ["4"] * 3) == math_accuracy_reward(chat, ["4"] * 3) == [1.0, 0.0, 0.0]


def test_the_last_assistant_message_counts():
    call, final = ({"role": "assistant", "content": rf"\boxed{{{number}}}"} for number in (1, 3))
    tool = {"role": "tool", "content": r"\boxed{2}"}
    completions = [[call, tool, final], [call, tool], [{"role": "assistant", "content": None}], []]
    assert math_accuracy_reward(completions, ["3", "1", "1", "1"]) == [1.0, 1.0, 0.0, 0.0]


def test_parts_of_a_message():
    parts = [{"type": "text", "text": r"\boxed{"}, {"type": "image"}, {"type": "text", "text": "4}"}]
    for content in (parts, [r"\boxed{", "4}"]):
        assert math_accuracy_reward([[{"role": "assistant", "content": content}]], ["4"]) == [1.0]


@pytest.mark.parametrize("gold", [r"2\sqrt{3}", r"$2\sqrt{3}$", r"\boxed{2\sqrt{3}}", r"It is \boxed{2\sqrt{3}}."])
def test_a_gold_answer_in_any_wrapping(gold):
    assert math_accuracy_reward([r"\boxed{2\sqrt3}", r"\boxed{2}"], [gold, gold]) == [1.0, 0.0]


def test_golds_that_are_no_text():
    """Datasets hold numbers, and mixed ones `None` for the rows of another task."""
    golds = [None, 72, 72.0, 0.5, 1e16, float("nan"), ["70"]]
    answers = ["72", "72", "72", r"\frac12", "10000000000000000", "nan", "70"]
    completions = [f"\\boxed{{{answer}}}" for answer in answers]
    assert math_accuracy_reward(completions, golds) == [None, 1.0, 1.0, 1.0, 1.0, None, None]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="2 texts"):
        math_accuracy_reward(["Answer: 1", "Answer: 2"], ["1"])
    for completion in (None, 5, [r"\boxed{5}"], [{"content": 5}]):
        for rewarded in (math_accuracy_reward, answer_format_reward):
            with pytest.raises(TypeError, match="Row 1"):
                rewarded(["Answer: 72", completion], solution=["72"] * 2)


def test_logged_columns_and_metrics():
    """The metrics have the same names whatever happens: ranks average by name."""
    columns, metrics = {}, {}
    completions = ["Answer: 1", "none", r"\boxed{\sqrt{12}}", "Answer: " + "9" * 5000]
    golds = ["1", None, r"2\sqrt{3}", "4"]
    math_accuracy_reward(completions, golds, metrics.__setitem__, columns.__setitem__, prompts=[""] * 4)
    assert metrics == {f"math_accuracy/{decider}": 0.0 for decider in DECIDERS} | {
        f"math_accuracy/{decider}": 0.25 for decider in ("rules", "no_gold", "math_verify", "refused")
    }
    assert columns["solution"] == ["1", "[none]", r"2\sqrt{3}", "4"]
    assert columns["answer"] == ["1", "[none]", r"\sqrt{12}", "9" * MAX_ANSWER_CHARACTERS]
    assert columns["answer_path"] == ["rules", "no_gold", "math_verify", "refused"]


def test_answer_format_reward():
    completions = [
        r"\boxed{5}",
        "Answer: 1,234.5",
        r"\boxed{\frac12}",
        r"\boxed{5 apples}",
        "5",
        r"\boxed{x}",
        "Answer: " + "9" * 2000,
    ]
    assert answer_format_reward(completions) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_reward_function_can_be_pickled():
    """TRL's asynchronous rollout worker sends reward functions to another process."""
    assert pickle.loads(pickle.dumps(math_accuracy_reward)) is math_accuracy_reward


def test_a_reward_needs_neither_torch_nor_trl():
    """Not when it is imported, and not when it pays."""
    code = r"""
import sys
from math_answers import math_accuracy_reward
answers = [r"\boxed{72}", r"\boxed{x^2+2x+1}", r"\boxed{7}"]
assert math_accuracy_reward(answers, ["72", "(x+1)^2", "8"]) == [1.0, 1.0, 0.0]
assert not {"torch", "transformers", "trl", "datasets", "troll_trl", "sympy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

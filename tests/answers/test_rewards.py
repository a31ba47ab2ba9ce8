"""The reward functions in a training: batches, kinds of completions and gold answers, what is logged."""

import subprocess
import sys

import pytest
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig

from tests.support.thoughts import OPENED, THOUGHTS, thinking_tokenizer
from tests.tiny import tiny_model
from tests.trl_comparison import OURS, make_trainer
from troll_trl.cli.make_trainer import TRAINERS, restore_thought_tag
from troll_trl.rewards import answer_format_reward, extract_answer, math_accuracy_reward
from troll_trl.rewards.answers import MAX_ANSWER_CHARACTERS, opened_thought
from troll_trl.rewards.verifier import DECIDERS


def test_a_batch_has_a_reward_for_each_row_in_its_order():
    golds = ["72", r"2\sqrt{3}", "C", None, r"2\sqrt{3}", "72", "proof", "x^2-1"]
    answers = ["72", r"\sqrt{12}", "D", "5", r"\sqrt{13}", "7", "proof", "(x-1)(x+1)"]
    rewards = math_accuracy_reward([f"\\boxed{{{answer}}}" for answer in answers], golds)
    assert rewards == [1.0, 1.0, 0.0, None, 0.0, 0.0, None, 1.0]
    assert math_accuracy_reward([], []) == []


def test_the_last_message_of_the_assistant_counts_with_all_its_parts():
    call, final = ({"role": "assistant", "content": rf"\boxed{{{number}}}"} for number in (1, 3))
    tool = {"role": "tool", "content": r"\boxed{2}"}
    parts = [{"type": "text", "text": r"\boxed{"}, {"type": "image"}, {"type": "text", "text": "4}"}]
    completions = [[call, tool, final], [call, tool], [{"role": "assistant", "content": None}], []]
    completions += [[{"role": "assistant", "content": content}] for content in (parts, [r"\boxed{", "4}"])]
    assert math_accuracy_reward(completions, ["3", "1", "1", "1", "4", "4"]) == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def test_a_thought_that_the_prompt_opens():
    """A thought that was cut off after a box with the gold answer was paid."""
    completions = [r"Perhaps \boxed{5}", r"Perhaps \boxed{4}.</think> \boxed{5}"]
    assert math_accuracy_reward(completions, ["5", "5"], opened_by_prompt="<think>\n") == [0.0, 1.0]
    opened = {"2+3? <think>\n": "<think>\n", "[THINK]": "[THINK]\n", "<think>\n\n</think>\n\n": "", "<think> 2+3?": ""}
    assert {prompt: opened_thought(prompt) for prompt in ("", *opened)} == {"": "", **opened}


@pytest.mark.parametrize(("special", "chats"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(("opens", "cases"), [("", THOUGHTS), ("<think>", OPENED)])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_training_reads_the_tags_of_thoughts(kind, opens, cases, special, chats, tmp_path):
    """As special tokens, TRL leaves them out of completions: answers in thoughts were paid, and others were not. A tag
    of the template was put back for TRL's clip alone, since the guard wraps the rewards of our trainers."""
    tokenizer = thinking_tokenizer(special, opens)
    texts = [text for text, _ in cases for _ in range(4)]
    prompt = [{"role": "user", "content": "2+2?"}] if chats else f"2+2? {opens}"
    rows = [{"prompt": prompt, "solution": "4"}] * len(texts)
    config = getattr(TRAINERS[kind], "_config_class", {"grpo": GRPOConfig, "rloo": RLOOConfig}[kind[0]])
    trainer = make_trainer(
        *(TRAINERS[kind], config, tmp_path, tiny_model(vocab_size=len(tokenizer))),
        reward=[math_accuracy_reward, answer_format_reward],
        **{"tokenizer": tokenizer, "dataset": Dataset.from_list(rows), "beta": 0.0},
        **{"per_device_train_batch_size": len(texts), "steps_per_generation": 1},
    )
    restore_thought_tag(trainer)
    ids = [tokenizer(text).input_ids for text in texts]
    trainer._generate_single_turn = lambda *_: (ids, None) if kind[0] == "grpo" else ids
    trainer._generate_and_score_completions(rows)
    logged = {name: dict(zip(texts, rewards, strict=True)) for name, rewards in trainer._logs["rewards"].items()}
    assert logged["math_accuracy_reward"] == dict(cases)
    assert logged["answer_format_reward"] == {text: extract_answer(opens + text) is not None for text in texts}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_thoughts_that_trl_parses_are_left_to_it(algorithm, tmp_path):
    """Only its GRPO does."""
    tokenizer = thinking_tokenizer()
    tokenizer.response_template = {"fields": {"content": {"content": "text"}}}
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4"}] * 8)
    options = {"tokenizer": tokenizer, "dataset": rows, "reward": math_accuracy_reward, "beta": 0.0}
    trainer = make_trainer(*OURS[algorithm], tmp_path, tiny_model(vocab_size=len(tokenizer)), **options)
    before = trainer.reward_funcs
    restore_thought_tag(trainer)
    assert (trainer.reward_funcs == before) == (algorithm == "grpo")


def test_a_gold_answer_in_any_wrapping():
    golds = [r"2\sqrt{3}", r"$2\sqrt{3}$", r"\boxed{2\sqrt{3}}", r"It is \boxed{2\sqrt{3}}."]
    assert math_accuracy_reward([r"\boxed{2\sqrt3}"] * 4, golds) == [1.0] * 4


def test_golds_that_are_no_text():
    """Datasets hold numbers, and mixed ones `None` for the rows of another task."""
    golds = [None, 72, 72.0, 0.5, 1e16, float("nan"), ["70"]]
    answers = ["72", "72", "72", r"\frac12", "10000000000000000", "nan", "70"]
    completions = [f"\\boxed{{{answer}}}" for answer in answers]
    assert math_accuracy_reward(completions, golds) == [None, 1.0, 1.0, 1.0, 1.0, None, None]


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


def test_a_plain_number_in_a_form_that_is_read_earns_the_format_reward():
    paid = [r"\boxed{5}", "Answer: 1,234.5"]
    unpaid = [r"\boxed{\frac12}", r"\boxed{5 apples}", "5", r"\boxed{x}", "Answer: " + "9" * 2000]
    assert answer_format_reward(paid + unpaid) == [1.0] * 2 + [0.0] * 5


@pytest.mark.parametrize("package", ["rewards", "data", "evaluation"])
def test_answers_load_nothing_of_the_training(package):
    """So any trainer of TRL may use them. import-linter does not see `troll_trl/__init__.py`, which must stay lazy."""
    code = f"import sys, troll_trl.{package}; print(*(name for name in sys.modules if name.startswith('troll_trl.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    allowed = ("troll_trl.rewards", "troll_trl.data", "troll_trl.evaluation")
    assert loaded and [name for name in loaded if not name.startswith(allowed)] == []

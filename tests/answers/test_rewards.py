"""math_accuracy_reward: what is read as the answer, and when two answers are equal."""

import pickle
import subprocess
import sys
import threading
import time

import pytest
from datasets import Dataset
from repository import ROOT
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from math_answers.rewards import (
    MAX_ANSWER_CHARACTERS,
    answer_format_reward,
    extract_answer,
    math_accuracy_reward,
    verifier,
)
from math_answers.rewards.verifier import DECIDERS, choices
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


def reward(gold, answer):
    return math_accuracy_reward([f"So the result is \\boxed{{{answer}}}."], [f"\\boxed{{{gold}}}"])[0]


RIGHT = [
    ("72", "72"),
    ("72", "72.00"),
    ("72", "072"),
    ("72", "72."),
    ("1234", "1,234"),
    ("1234", "1{,}234"),
    ("1234", r"1,\!234"),
    ("1234", r"1\,234"),  # math-verify alone reads 1 + 234
    ("1234567", "1 234 567"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("36", r"\$36"),
    ("36", "$36$"),
    (r"\$18.90", "18.9"),
    ("12", "12 dollars per hour"),
    ("12", r"12\text{ apples}"),
    ("12", r"\text{12 cm}"),
    ("15\\mbox{ cm}^2", "15"),
    ("50", r"50\%"),
    ("0.5", "50%"),
    ("-5", "\u22125"),
    ("-5", "-5"),
    (r"\frac12", "0.5"),
    ("0.5", r"\dfrac{1}{2}"),
    (r"\frac{3}{4}", "3/4"),
    (r"-\frac{35}{9}", r"\frac{-35}{9}"),
    (r"137 \frac{1}{2}", "137.5"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"120^\circ", "120"),
    ("(a+5)(b+2)", "ab + 2a + 5b + 10"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ("-2,1", "1, -2"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"),
    (r"x \in [-2,7]", "[-2, 7]"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} \frac15 \\ -3.6 \end{pmatrix}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", r"\textbf{Even}"),
    (r"\text{(C)}", "C"),
]

WRONG = [
    ("72", "73"),
    ("72", "7 2"),
    ("10100", "10, 100"),  # a list
    ("10, 100", "10100"),
    ("1234", "234"),
    ("-5", "5"),
    ("5", "5 million"),
    (".0000672", "0.000067"),  # math-verify alone rounds both to six places
    (r"\frac12", "2"),
    (r"\frac13", "0.33"),
    (r"2\sqrt{3}", "2"),  # TRL's accuracy_reward reads this gold answer, unwrapped, as 2
    ("x=5", "x=6"),
    ("(3,5)", "(5,3)"),
    ("(3,4]", "(3,4)"),
    (r"1 \pm \sqrt{19}", r"1 + \sqrt{19}"),
    ("12", "12 or 13"),
    ("12", "12, 13"),
    (r"\text{Evelyn}", "Carla"),
    (r"\text{even}", "neve"),  # as products of letters these are equal
    ("12", "twelve"),
    ("12", r"\frac{12}{"),
    ("12", ""),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right_answers(gold, answer):
    assert reward(gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_answers(gold, answer):
    assert reward(gold, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{3}, then \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace closes nothing
        (r"a stray } and \boxed{8}", "8"),
        (r"\boxed{3} and then a cut \boxed{\frac{1}{2}", "3"),
        (r"a cut \boxed{12", None),
        (r"<think>\boxed{3}</think> it is \boxed{4}", "4"),
        (r"<think>\boxed{3}</think> no box here", None),
        (r"<think>\boxed{3} and the thought never ends", None),
        (r"\boxed{1}</think> a template opened the thought \boxed{2}", "2"),
        (r"Answer: 3, that is \boxed{4}. Answer: 5", "4"),
        ("We add.\nAnswer: 42", "42"),
        ("**Answer:** 42", "42"),
        ("**Final Answer**: 42.", "42"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer:\n\n$$\n42\n$$", "42"),
        ("Answer: 3.5", "3.5"),
        ("20 + 22 = 42\n#### 42", "42"),
        ("The answer is 42. I hope it is correct.", "42"),
        ("The final answer is: 42", "42"),
        ("20 + 22 is 42", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_extracted_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("line", ["Answer: $42$", r"Answer: \(42\)", r"Answer: \[42\]", r"Answer: \$42", "Answer: $42"])
def test_answer_line_with_math_delimiters(line):
    assert math_accuracy_reward([line], [r"\boxed{42}"]) == [1.0]


@pytest.mark.parametrize("hostile", [r"\boxed{" * 20_000, "the answer is " + "\n *" * 50_000, "answer" * 20_000])
def test_extraction_takes_time_linear_in_the_text(hostile):
    start = time.process_time()
    assert extract_answer(hostile) is None
    assert time.process_time() - start < 2  # a quadratic scan of the boxes alone takes over a minute


def test_chat_and_plain_completions_score_the_same():
    texts = [r"\boxed{4}", "Answer: 5", "no answer"]
    solution = [r"\boxed{4}"] * 3
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    assert math_accuracy_reward(texts, solution) == math_accuracy_reward(chat, solution) == [1.0, 0.0, 0.0]


def test_last_assistant_message_counts():
    call = {"role": "assistant", "content": r"\boxed{1}"}
    tool = {"role": "tool", "content": r"\boxed{2}"}
    final = {"role": "assistant", "content": r"\boxed{3}"}
    assert math_accuracy_reward([[call, tool, final]], [r"\boxed{3}"]) == [1.0]
    assert math_accuracy_reward([[call, tool]], [r"\boxed{1}"]) == [1.0]
    assert math_accuracy_reward([[{"role": "assistant", "content": None}]], [r"\boxed{1}"]) == [0.0]
    assert math_accuracy_reward([[]], [r"\boxed{1}"]) == [0.0]


@pytest.mark.parametrize("gold", ["", r"\boxed{}", r"\boxed{???}", "7" * (MAX_ANSWER_CHARACTERS + 1)])
def test_unparsable_gold_is_skipped(gold):
    assert math_accuracy_reward([r"\boxed{1}"], [gold]) == [None]


@pytest.mark.parametrize("gold", [r"2\sqrt{3}", r"$2\sqrt{3}$", r"\boxed{2\sqrt{3}}", r"It is \boxed{2\sqrt{3}}."])
def test_gold_in_any_wrapping(gold):
    assert math_accuracy_reward([r"\boxed{2\sqrt3}", r"\boxed{2}"], [gold, gold]) == [1.0, 0.0]


def test_overlong_answer_is_wrong():
    assert reward("7", "0" * MAX_ANSWER_CHARACTERS + "7") == 0.0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="2 completions but 1 solutions"):
        math_accuracy_reward(["Answer: 1", "Answer: 2"], ["1"])
    for gold, name in (([72], "list"), (True, "bool"), (float("nan"), "float")):
        with pytest.raises(TypeError, match=f"Row 1: a solution must be text .*, a {name}"):
            math_accuracy_reward(["Answer: 72"] * 2, ["72", gold])
    for completion in (None, 5, [r"\boxed{5}"], [None], [{"content": [None]}], [{"content": 5}], {"content": "5"}):
        for rewarded in (math_accuracy_reward, answer_format_reward):
            with pytest.raises(TypeError, match=r"Row 1: a completion must be text, or .* chat messages .*; got .*\."):
                rewarded(["Answer: 72", completion], solution=["72"] * 2)


def test_golds_that_are_no_text():
    """Datasets hold numbers, and mixed ones `None` for the rows of another task."""
    metrics = {}
    golds = [None, 72, 72.0, 0.5, 1e16]
    answers = ["72", "72", "72", r"\frac12", "10000000000000000"]
    completions = [f"\\boxed{{{answer}}}" for answer in answers]
    assert math_accuracy_reward(completions, golds, metrics.__setitem__) == [None, 1.0, 1.0, 1.0, 1.0]
    assert metrics["math_accuracy/no_gold"] == 0.2 and metrics["math_accuracy/unparsed"] == 0.0


def test_the_text_of_the_option():
    options = [["Rome", "Paris"], {"A": "12", "B": r"\frac{1}{2}"}, None, ["A) 1", "B) 2"]]
    texts = [r"\boxed{\text{Paris}}", r"\boxed{0.5}", r"\boxed{B}", r"\boxed{2}"]
    assert math_accuracy_reward(texts, ["B"] * 4, options=options) == [1.0] * 4
    assert math_accuracy_reward(texts, ["A"] * 4, options=options) == [0.0] * 4
    assert math_accuracy_reward(texts, ["B"] * 4) == [0.0, 0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="4 gold answers but 1 `options`"):
        math_accuracy_reward(texts, ["B"] * 4, options=options[:1])


OPTIONS = {"A": "50 m", "B": "75 m", "C": "90 m"}


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{75 m}. The answer is (A).",
        r"\boxed{(A) 75 m}",
        r"\boxed{\text{(C) } 75\text{ m}}",
        r"\boxed{75 m (A)}",
        r"\boxed{75 m, A}",
        r"\boxed{75 m or A}",
        r"\boxed{A} and \boxed{75 m}",
        r"\boxed{A: 75 m}",
        r"\boxed{75\text{ m, option A}}",
        r"\boxed{(A)(B) 75 m}",
        "Answer: A. 75 m",
        "Answer: 75 m (C)",
    ],
)
def test_the_text_of_one_option_and_the_letter_of_another_are_two_guesses(completion):
    assert math_accuracy_reward([completion], ["B"], options=[OPTIONS]) == [0.0]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {letter.lower(): text for letter, text in OPTIONS.items()},
        list(OPTIONS.values()),
        [f"{letter}) {text}" for letter, text in OPTIONS.items()],
        {"label": list(OPTIONS), "text": list(OPTIONS.values())},
        {"text": list(OPTIONS.values())},
        [{"label": letter, "text": text} for letter, text in OPTIONS.items()],
        [{"Key": letter.lower(), "Value": text} for letter, text in OPTIONS.items()],
        [{letter: text} for letter, text in OPTIONS.items()],
    ],
)
def test_forms_of_an_options_column(options):
    texts = [r"\boxed{75 m}", r"\boxed{(B) 75 m}", r"\boxed{B}", r"\boxed{50 m}", r"\boxed{A}"]
    assert math_accuracy_reward(texts, ["B"] * 5, options=[options] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [5, "A) 50 m B) 75 m", {"first": "50 m"}, [["50 m"], ["75 m"]]])
def test_options_that_cannot_be_read_are_warned_of(options, caplog):
    """Once: a warning came for every row, because each has other options."""
    choices._warned.clear()
    texts = [r"\boxed{75 m}", "Answer: B", r"\boxed{1 m}"]
    assert math_accuracy_reward(texts, ["B"] * 3, options=[options, options, "A) 1 m B) 2 m"]) == [0.0, 1.0, 0.0]
    assert len(caplog.messages) == 1 and repr(options) in caplog.messages[0]


def test_expressions_of_the_problem_pay_only_on_demand():
    golds, texts = ["9025", r"\frac{\sqrt{3}}{2}"], [r"\boxed{95^2}", r"\boxed{\sin 60^\circ}"]
    assert math_accuracy_reward(texts, golds) == [0.0, 0.0]
    assert math_accuracy_reward(texts, golds, allow_unevaluated=True) == [1.0, 1.0]


def test_the_trainer_can_start_the_workers():
    assert math_accuracy_reward.start_workers is verifier.start


def test_logged_columns():
    logged = {}
    math_accuracy_reward(["Answer: 1", "none"], ["1", "2"], log_extra=logged.__setitem__, prompts=["", ""])
    assert logged == {"solution": ["1", "2"], "answer": ["1", "[none]"], "answer_path": ["text", "no_answer"]}


def test_logged_metrics_have_the_same_names_whatever_happens():
    metrics = {}
    math_accuracy_reward(["Answer: 1", "none", "Answer: 3.0", "Answer: 4"], ["1", "2", "3", "???"], metrics.__setitem__)
    assert metrics.keys() == {f"math_accuracy/{path}" for path in DECIDERS}
    shares = {name.partition("/")[2]: value for name, value in metrics.items() if value}
    assert shares == {"text": 0.25, "no_answer": 0.25, "number": 0.25, "unparsed": 0.25}


def test_timeouts_score_zero_and_are_counted(monkeypatch):
    """A policy that writes what never ends must cost a step seconds, not the run."""
    monkeypatch.setattr("math_answers.rewards.functions.TIMEOUT_SECONDS", 0.5)
    metrics = {}
    golds = [r"\Gamma(7)", "12", "12", "12"]
    completions = [r"\boxed{\Gamma(10^{10})}", r"\boxed{100000000!}", r"\boxed{9^{9^{9^9}}}", r"\boxed{12}"]
    assert math_accuracy_reward(completions, golds, metrics.__setitem__) == [0.0, 0.0, 0.0, 1.0]
    assert metrics["math_accuracy/timeout"] == 0.25 and metrics["math_accuracy/refused"] == 0.5


def test_endless_answers_are_not_remembered_nor_logged():
    """Four thousand cached answers of a megabyte each would be the memory of the trainer."""
    logged = {}
    completions = [f"\\boxed{{{digit * 1_000_000}}}" for digit in "123"]
    assert math_accuracy_reward(completions, ["12"] * 3, log_extra=logged.__setitem__) == [0.0] * 3
    assert max(map(len, logged["answer"])) == MAX_ANSWER_CHARACTERS
    before = verifier._decide_by_rules.cache_info().currsize
    math_accuracy_reward(completions, ["13"] * 3)
    assert verifier._decide_by_rules.cache_info().currsize == before


def test_parts_of_a_message():
    parts = [{"type": "text", "text": r"\boxed{"}, {"type": "image"}, {"type": "text", "text": "4}"}]
    for content in (parts, [r"\boxed{", "4}"]):  # a list of texts raised AttributeError
        assert math_accuracy_reward([[{"role": "assistant", "content": content}]], ["4"]) == [1.0]


def test_reward_function_can_be_pickled():
    """TRL's asynchronous rollout worker sends reward functions to another process."""
    assert pickle.loads(pickle.dumps(math_accuracy_reward)) is math_accuracy_reward


def test_overlong_penalty_is_trls_own():
    penalty = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert penalty(completion_ids=[[1] * 80, [1] * 90, [1] * 101]) == [0.0, -0.5, -1.0]


def test_works_outside_the_main_thread():
    rewards = []
    arguments = ([r"\boxed{\frac{2}{4}}", r"\boxed{\frac{2}{3}}"], [r"\boxed{\frac12}"] * 2)
    thread = threading.Thread(target=lambda: rewards.extend(math_accuracy_reward(*arguments)))
    thread.start()
    thread.join()
    assert rewards == [1.0, 0.0]


def test_a_reward_needs_neither_torch_nor_trl():
    """Not when it is imported, and not when it pays, for answers that workers decide either."""
    code = r"""
import sys
from math_answers import math_accuracy_reward, verify
answers = [r"\boxed{72}", r"\boxed{x^2+2x+1}", r"\boxed{7}"]
assert math_accuracy_reward(answers, ["72", "(x+1)^2", "8"]) == [1.0, 1.0, 0.0]
assert verify(["2"], [r"\boxed{2}"])[0].reward == 1.0
assert not {"torch", "transformers", "trl", "datasets", "troll_trl"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_troll_trainer_starts_the_workers_when_it_is_built(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(math_accuracy_reward, "start_workers", lambda: started.append(True))
    arguments = TrollGRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    rows = Dataset.from_dict({"prompt": ["w1 w2"] * 4, "solution": [r"\boxed{1}"] * 4})
    TrollGRPOTrainer(
        model=tiny_model(),
        reward_funcs=[math_accuracy_reward, get_soft_overlong_punishment(10, 5)],  # which has none to start
        args=arguments,
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )
    assert started == [True]


def test_trainer_logs_how_it_was_decided(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    rows = Dataset.from_dict({"prompt": ["w1 w2"] * 4, "solution": [r"\boxed{1}"] * 4})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=math_accuracy_reward,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {name: logged[name] for name in logged if name.startswith("math_accuracy/")} == {
        f"math_accuracy/{path}": float(path == "no_answer") for path in DECIDERS
    }
    assert set(trainer._logs["extra"]) == {"solution", "answer", "answer_path"}

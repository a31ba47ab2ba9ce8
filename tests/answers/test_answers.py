"""Which text is the answer, and which answers are right: labelled cases, properties, real solutions."""

import json
import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tests.support.real_problems import DATA, SIZES
from tests.support.repository import TESTS
from troll_trl.rewards import extract_answer, verify
from troll_trl.rewards.verifier.notation import normalise
from troll_trl.rewards.verifier.numbers import read_number

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reward(gold, answer):
    return verify([gold], [f"So it is \\boxed{{{answer}}}."])[0].reward


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_labelled_cases():
    rows = read_lines(TESTS / "data" / "answers.jsonl")
    verdicts = verify([row["gold"] for row in rows], [row["completion"] for row in rows])
    wrong = [
        (row["reason"], row["gold"], row["completion"], verdict)
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict.reward != row["verdict"]
    ]
    assert rows and wrong == []


# Extraction

EXTRACTED = [
    (r"first \boxed{3}, then \boxed{4}", "4"),
    (r"so $\boxed5$.", "5"),
    (r"\framebox[3cm][r]{8}", "8"),
    (r"\boxed{x=\boxed{5}}", "x={5}"),
    (r"\boxed{3 \boxed{4}", "4"),
    (r"\boxed{3}, hence by the lemma \boxed{4}", "4"),
    (r"\boxed{5}. And again: \boxed{5}", "5"),
    (r"\boxed{1} \quad \text{and} \quad \boxed{2}", "{1}, {2}"),
    (r"$x=\boxed{1}$ or $x=\boxed{2}$", "{1}, {2}"),
    (r"\boxed{1} or, in other words, \boxed{2}", "{1}, {2}"),
    (r"\boxed{5} \to \boxed{7}", "7"),
    (r"$\boxed{5}$ \quad\Longrightarrow\quad $\boxed{7}$", "7"),
    (r"\boxed{5} => \boxed{6} → \boxed{7}", "7"),
    (r"\boxed{5} \top \boxed{7}", "{5}, {7}"),
    (r"A → \boxed{1}, B → \boxed{2}", "{1}, {2}"),  # arrows from names to values, not from a step to the next
    (r"$x \Rightarrow \boxed{1}$ or $x \to \boxed{2}$", "{1}, {2}"),
    (r"x = \boxed{1}, \to \boxed{2}", "{1}, {2}"),
    # A box that only shows where the answer goes
    (r"\boxed{5}. I used \boxed{} as \boxed{\text{your answer}} and \boxed{\dots}", "5"),
    (r"The answer is 5. \boxed{}", "5"),
    # Thoughts
    (r"<think>\boxed{3}</think> no box here", None),
    (r"<think>\boxed{3} and the thought never ends", None),
    (r"\boxed{1}</think> a template opened the thought \boxed{2}", "2"),
    (r"[THINK]\boxed{3}[/THINK]\boxed{4}", "4"),
    (r"<|channel|>analysis<|message|>\boxed{3}<|channel|>final<|message|>\boxed{4}", "4"),
    (r"<|channel>thought \boxed{3}<channel|>\boxed{4}", "4"),
    (r"<|channel|>finally<|message|>\boxed{3}", None),
    # Without a box
    ("<answer>3</answer> or <answer>\n5\n</answer>", "5"),
    ("<answer>The answer is 5.</answer>", "5"),
    ("<answer>5", None),
    ("Answer: 1\n**Final Answer:** 2", "2"),
    ("Answer:\n\n$$\n42\n$$", "42"),
    ("20 + 22 = 42\n#### 42", "42"),
    ("The answer is 42. I hope it is correct.", "42"),
    ("Answer: 42 because 6 * 7 = 42", "42"),
    ("Answer: 64, in total", "64"),
    ("Answer: 64 (which is even)", "64"),
    ("Answer: (1, 2), (3, 4)", "(1, 2), (3, 4)"),
    ("20 + 22 is 42", None),
    # An operator next to the box belongs to the answer
    (r"-\boxed{5}", "-{5}"),
    (r"$\boxed{5}!$", "{5}!"),
    (r"$\boxed{5}^2$", "{5}^2"),
    (r"$\boxed{5}\pi$", r"{5}\pi"),
    (r"$\frac{1}{\boxed{5}}$", r"\frac{1}{{5}}"),
    (r"$2(\boxed{5})$", "2{(5)}"),
    (r"\boxed{5} million", "5 million"),
    (r"it isn't \boxed{5}", r"\neq {5}"),
    # What only looks like an operator does not
    (r"It is \boxed{5}!", "5"),
    (r"- \boxed{5}", "5"),
    (r"3 + 2 = \boxed{5}", "5"),
    (r"Step 2: $\boxed{5}$ - done", "5"),
    (r"$\boxed{5}/\mathrm{cm}$", "5"),
    (r"costs \$\boxed{5}", "5"),
]


@pytest.mark.parametrize(("text", "answer"), EXTRACTED)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


HOSTILE = [
    r"\boxed{" * 30_000,
    r"\boxed{1} " * 20_000,
    r"\boxed{" * 20_000 + "}" * 20_000,
    "the answer is " + "\n *" * 50_000,
    "Answer: " * 30_000,
    "Answer: 1" + " " * 100_000 + "x",
    "\\" * 100_000,
    "{" * 100_000,
    "<think>" * 20_000 + "</think>" * 20_000,
    "9" * 1_000_000,
    r"\boxed{" + r"\boxed{1}" * 30_000 + "}",
    r"\boxed{1} or" + " a" * 30_000 + r"\boxed{2}",
    r"\boxed{" + "the answer " * 30_000 + "}",
    "<answer>" * 30_000 + "</answer>",
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: f"{text[:12]}...")
def test_extraction_and_verdict_in_linear_time(hostile):
    start = time.process_time()
    verdicts = verify(["12"] * 2, [hostile, f"\\boxed{{{hostile}}}"])
    assert time.process_time() - start < 20  # milliseconds if it is linear, minutes if it is not
    assert all(verdict.reward == 0.0 for verdict in verdicts)


@pytest.mark.parametrize(
    "pattern",
    ["1,", "1/", "1 ", "-", "(", "x^", r"\frac", r"\text{a}", "1e", r"\pm ", "a=", "_", "{,}", "A", "x_1", " cm", "^2"],
)
def test_comparison_of_the_longest_answers_is_fast(pattern):
    """No worker protects this process from a regular expression that backtracks."""
    start = time.process_time()
    for answer in (pattern * (1000 // len(pattern)), pattern * (990 // len(pattern)) + "!", "1" + pattern * 200 + "1"):
        verify(["12", "x=5", "(1,2)", r"\text{Evelyn}", "C"], [f"\\boxed{{{answer[:1000]}}}"] * 5)
    assert time.process_time() - start < 5


# Properties

fractions = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=400)


def spellings(value: Fraction):
    """Ways to write a fraction."""
    sign, top, bottom = ("-" if value < 0 else ""), abs(value.numerator), value.denominator
    if bottom == 1:
        ways = [f"{sign}{top}", f"{sign}{top:,}", f"{sign}{top}.0", f"\\text{{{sign}{top}}}", f"{sign}{top}."]
        ways += [f"{sign}{top:,}".replace(",", "{,}"), f"{sign}{top:,}".replace(",", r"\,"), f"{sign}{top}e0"]
        return [*ways, f"x = {sign}{top}", f"{sign}{top}\\text{{ metres}}", f"{sign}{100 * top}\\%"]
    ways = [
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"\\dfrac{{{sign}{top}}}{{{bottom}}}",
        f"{sign}{top}/{bottom}",
        f"${sign}\\tfrac{{{3 * top}}}{{{3 * bottom}}}$",
        f"x = {sign}{top}/{bottom}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}\\text{{ metres}}".replace("-", "\u2212"),
    ]
    if top > bottom:
        ways.append(f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}")
    return ways


@PROPERTY
@given(fractions, st.data())
def test_spellings_of_a_number_are_equal(value, data):
    gold, answer = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    assert reward(gold, answer) == 1.0


@PROPERTY
@given(fractions, fractions, st.data())
def test_different_numbers_are_different(value, other, data):
    assume(value != other and abs(value) not in (100 * abs(other), abs(other) / 100))
    gold, answer = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(other)))
    assert reward(gold, answer) == 0.0


@PROPERTY
@given(fractions, st.integers(0, 6), st.integers(1, 6))
def test_a_decimal_is_read_exactly(value, places, repeated):
    scaled = abs(value) * 10**places
    assert read_number(f"{int(scaled)}e-{places}").value == Fraction(int(scaled), 10**places)
    digits = f"{int(scaled) % 10**repeated:0{repeated}d}"
    number = read_number(normalise(rf"2.{'0' * places}\overline{{{digits}}}"))
    assert number.value == 2 + Fraction(int(digits), 10**places * (10**repeated - 1))


@PROPERTY
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_lists_in_any_order_tuples_in_one(values, random):
    shuffled = random.sample(values, len(values))
    gold = ", ".join(map(str, values))
    assert reward(gold, ", ".join(map(str, shuffled))) == 1.0
    assert reward(gold, "\\{" + ", ".join(map(str, shuffled)) + "\\}") == 1.0
    assert reward(f"({gold})", f"({', '.join(map(str, shuffled))})") == float(shuffled == values)
    assert reward(gold, ", ".join(map(str, values[:-1]))) == 0.0
    assert reward(gold, ", ".join(map(str, [*values, 51]))) == 0.0
    assert reward(str(values[0]), gold) == 0.0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60), st.sampled_from(["12", r"2\sqrt{3}", "(1, 2)", r"\text{Evelyn}", "x=5"]))
@example("\ud800", "12")
@example("²⁄₃", "12")
@example("९", "9")
def test_any_text_gets_a_verdict(text, gold):
    verdicts = verify([gold] * 2, [f"\\boxed{{{text}}}", f"Answer: {text}"])
    assert all(verdict.reward in (0.0, 1.0) and verdict.decided_by != "crash" for verdict in verdicts)
    # To be right, an answer has to write the gold answer
    if text.isascii() and not set(text) & set("12345xEe"):
        assert all(verdict.reward == 0.0 for verdict in verdicts)


TOKENS = [*r"0123456789+-*/^_{}()[]|=<>,;:.!%$&~'xyei ", r"\frac", r"\sqrt", r"\boxed", r"\text", r"\pm", r"\{", r"\}"]
TOKENS += [r"\infty", r"\cup", r"\in", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\le", r"\times", r"\%", "10^"]
latex = st.lists(st.sampled_from(TOKENS), max_size=30).map("".join)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(latex, latex)
def test_any_latex_gets_a_verdict(gold, answer):
    verdict = verify([gold], [f"\\boxed{{{answer}}}"])[0]
    assert verdict.reward in (0.0, 1.0) or verdict.decided_by == "no_gold"


# Real solutions


@pytest.mark.parametrize(
    ("name", "split", "solution"),
    [("gsm8k", "train", "answer"), ("gsm8k", "test", "answer"), ("math500", "test", "solution")],
)
def test_every_solution_is_right_for_its_own_problem_alone(name, split, solution):
    rows = read_lines(DATA / name / f"{split}.jsonl")
    golds, solutions = [row["answer"].rpartition("####")[2].strip() for row in rows], [row[solution] for row in rows]
    assert len(rows) == SIZES[name, split]
    assert [row for row, verdict in enumerate(verify(golds, solutions)) if verdict.reward != 1.0] == []
    others = golds[1:] + golds[:1]
    verdicts = verify(others, solutions)
    paid = {(gold, own) for gold, own, one in zip(others, golds, verdicts, strict=True) if one.reward and gold != own}
    assert paid <= {("x=5", "5")}  # that problem asks for x

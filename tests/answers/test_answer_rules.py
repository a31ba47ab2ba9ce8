"""What would pay for not solving the problem, and what is only another spelling, made by rule for any value."""

import importlib.util
import json
import random
import re
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from real_problems import DATA
from repository import ROOT

from math_answers.rewards import math_accuracy_reward, verifier
from math_answers.rewards.verifier import verify

_spec = importlib.util.spec_from_file_location("reward_kinds", ROOT / "benchmarks" / "reward_kinds.py")
assert _spec is not None and _spec.loader is not None
reward_kinds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reward_kinds)

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rewards(gold, answers):
    """Of several boxed answers to one gold answer: one call, for the workers run in parallel."""
    answers = list(answers)
    verdicts = verify([gold] * len(answers), [f"So it is \\boxed{{{answer}}}." for answer in answers])
    return {answer: verdict.reward for answer, verdict in zip(answers, verdicts, strict=True)}


def all_of(reward, gold, answers):
    assert {answer: given for answer, given in rewards(gold, answers).items() if given != reward} == {}


# The integer of a general solution

SOLUTIONS = [
    r"\frac{{\pi}}{{4}}+{0}\pi",
    r"x=2\pi {0}-\frac{{\pi}}{{3}}",
    r"\frac{{(2{0}+1)\pi}}{{6}}",
    r"{0}\cdot 90^\circ",
]
SOLUTIONS += [
    r"\pm\frac{{\pi}}{{6}}+2{0}\pi",
    r"(-1)^{{{0}}}\frac{{\pi}}{{6}}+{0}\pi",
    r"\arctan 3+{0}\pi, \frac{{{0}\pi}}{{5}}",
]
STATED = [
    "",
    r", {0}\in\mathbb{{Z}}",
    r", {0} \in Z",
    r"\text{{ for any integer }} {0}",
    r" ({0} \text{{ is an integer}})",
    r",\ {0}=0,\pm1,\pm 2,\dots",
]


@PROPERTY
@given(st.sampled_from(SOLUTIONS), st.permutations("jkmnN"), st.sampled_from(STATED), st.sampled_from(STATED))
def test_the_integer_of_a_general_solution_may_have_another_letter(solution, letters, stated, said):
    own, theirs = letters[:2]
    gold = (solution + stated).format(own)
    assert rewards(gold, [(solution + said).format(theirs)]).popitem()[1] == 1.0
    all_of(0.0, gold, [solution.format(other) for other in (f"2{theirs}", "i", "e", "x", "3", f"{own}{theirs}")])
    all_of(0.0, gold, [f"{theirs} = {solution.format(theirs).removeprefix('x=')}"])


@pytest.mark.parametrize("listed", [r"0,\pm1,\pm3,\dots", r"0,\pm1,\pm1,\dots", r"0,\pm1,\pm2,\pm4,\ldots"])
def test_a_list_with_gaps_is_not_all_integers(listed):
    for gold, answer in ((r"x=\frac{\pi}{2}+k\pi", r"x=\frac{\pi}{2}+k\pi"), (r"\frac{k\pi}{2}", r"\frac{k\pi}{2}")):
        all_of(0.0, rf"{gold}, k\in\mathbb{{Z}}", [f"{answer}, k={listed}", f"k={listed}"])
    all_of(0.0, r"\mathbb{Z}", [f"k={listed}"])


@pytest.mark.parametrize(
    "text", ["all posıtive real numbers", "all posİtive real numbers", r"all real numbers more than 3\%"]
)
def test_letters_and_units_beside_words_for_a_set_are_no_set(text):
    for gold in (r"(0,\infty)", r"(3,\infty)"):
        verdicts = verify([gold] * 2, [rf"\boxed{{{text}}}", rf"\boxed{{\text{{{text}}}}}"])
        assert [verdict.reward for verdict in verdicts] == [0.0, 0.0]
        assert "crash" not in {verdict.decided_by for verdict in verdicts}


@pytest.mark.parametrize("names", ["", "(x,y)=", "(a, b) = "])
def test_an_integer_of_a_pair_may_have_another_letter(names):
    gold = names + r"(2k+1,3k), k\in\mathbb{Z}"
    all_of(1.0, gold, [r"(2t+1,3t), t\in\mathbb{Z}", rf"{names}(2n+1,3n), n \text{{ an integer}}"])
    all_of(0.0, gold, [r"(2t+1,3t)", r"(2t+1,3n), t\in\mathbb{Z}", r"(3t,2t+1), t\in\mathbb{Z}"])


@pytest.mark.parametrize("gold", [r"({0}\pi,{1}\pi)", r"{0}\pi+{1}", r"{1}+\frac{{{0}\pi}}{{2}}"])
def test_two_letters_are_not_one(gold):
    """A letter that the answer has elsewhere is not free: a policy would write one for both."""
    wrong = [gold.format(*pair) for pair in ("kk", "mm", "nn", "mk", "nk", "mn")]
    all_of(0.0, gold.format("k", "m"), wrong)


@pytest.mark.parametrize(
    "gold", [r"\pi {0}^2", r"\frac{{2\pi}}{{{0}}}", r"({0}-2)\pi", r"\cos({0}\pi)", "2{0}+1", r"\pi^{0}"]
)
def test_a_letter_of_the_problem_keeps_its_name(gold):
    all_of(0.0, gold.format("n"), [gold.format("k"), gold.format("x")])


# Multiple choice

SEVERAL = [
    "({})({})",
    "{}. {}",
    r"({}) \text{{ or }} ({})",
    "({}), ({})",
    "({}) and ({})",
    "{}/{}",
    "{} {}",
    "{}{}",
    "{}-{}",
]
SEVERAL += [
    r"\{{{},{}\}}",
    "[{}][{}]",
    "({}) 12 ({}) 13",
    "option {} or {}",
    r"\text{{({})}} \text{{({})}}",
    "({}) = ({})",
]
ONE = [
    "{}",
    "({})",
    "{}.",
    "{})",
    r"\text{{({})}}",
    r"\textbf{{({})}}\ 12",
    "({}) 12",
    "{}. Paris",
    "Option {}",
    "[{}]",
]


@PROPERTY
@given(st.lists(st.sampled_from("ABCDEFGHIJ"), min_size=2, max_size=2, unique=True))
def test_an_answer_to_a_choice_names_exactly_one_option(letters):
    gold, other = letters
    all_of(0.0, gold, [form.format(*pair) for form in SEVERAL for pair in ((gold, other), (other, gold))])
    all_of(1.0, gold, [form.format(gold) for form in ONE])
    all_of(0.0, gold, [form.format(other) for form in ONE])


@PROPERTY
@given(
    st.sampled_from("ABCDE"), st.sampled_from(["orange", "android", "notes", "isosceles", "button", "-3", "is right"])
)
def test_an_option_may_begin_like_a_conjunction(gold, text):
    all_of(1.0, gold, [f"({gold}) {text}", f"({gold}). {text}"])
    all_of(0.0, gold, [f"{gold}'", f"({gold}) is wrong", f"({gold})^2", f"({gold}) or {text}", f"not ({gold})"])


# Points that tell functions apart

places = st.sampled_from([-5000, -300, -17, -2, -1, 0, 1, 2, 3, 40, 777, 60000])


@PROPERTY
@given(places, st.sampled_from(["x", "t", "z"]))
def test_an_absolute_value_is_neither_of_its_branches(place, letter):
    inside = f"{letter}-({place})"
    branches = [f"{letter}-({place})", f"{place}-{letter}"]
    for gold in (f"|{inside}|", rf"\sqrt{{({inside})^2}}", rf"\max({inside},{place}-{letter})"):
        all_of(0.0, gold, branches)
    for gold in branches:
        all_of(0.0, gold, [f"|{inside}|"])
    all_of(1.0, f"|{inside}|", [rf"\sqrt{{({inside})^2}}", f"|{place}-{letter}|"])


@PROPERTY
@given(places, st.sampled_from([r"\max", r"\min"]))
def test_a_maximum_is_neither_of_its_arguments(place, function):
    all_of(0.0, f"{function}(x,{place})", ["x", str(place)])
    all_of(1.0, f"{function}(x,{place})", [f"{function}({place},x)"])


@PROPERTY
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
def test_products_of_two_variables_see_both_signs_of_each(a, b, c):
    gold = f"{c}xy+({a})x+({b})y"
    all_of(0.0, gold, [gold.replace("xy", "x|y|"), gold.replace("xy", "|x|y"), gold.replace("xy", "|xy|")])
    all_of(1.0, gold, [f"({b})y+{c}yx+({a})x"])


# Equations


@PROPERTY
@given(st.integers(2, 99), st.integers(2, 99), st.integers(2, 99), st.integers(2, 99))
def test_a_true_identity_is_no_other_true_identity(a, b, c, d):
    assume(a * b != c * d and len({a, b, c, d}) == 4)
    gold = rf"{a * b}={a}\cdot {b}"
    all_of(0.0, gold, ["1=1", rf"{c * d}={c}\cdot {d}", f"{a * b}={a * b}", "x=x"])
    all_of(1.0, gold, [rf"{a * b}={b}\cdot {a}", rf"{a}\cdot {b}={a * b}"])


@PROPERTY
@given(st.integers(-9, 9).filter(bool), st.integers(-9, 9), st.integers(2, 9), st.integers(1, 5))
def test_a_line_is_its_solutions_however_it_is_written(slope, shift, factor, step):
    gold = f"y={slope}x+({shift})"
    same = [f"{slope}x-y+({shift})=0", f"{factor}y={factor * slope}x+({factor * shift})"]
    all_of(1.0, gold, same)
    all_of(
        0.0, gold, [f"y={slope}x+({shift + step})", f"y={slope + step}x+({shift})", f"y={slope}|x|+({shift})", "1=1"]
    )


def test_a_point_of_comparison_may_be_a_solution_of_both():
    """(17, -29) is one of the points, and lies on this line: the same equation earned 0."""
    all_of(1.0, "y=-2x+5", ["-2x-y+5=0", "2y=-4x+10"])
    all_of(0.0, "y=-2x+5", ["y=-x-12", "y=-3x+22"])  # through the same point


@PROPERTY
@given(st.integers(0, 99))
def test_only_a_name_may_stand_before_a_value(value):
    all_of(
        1.0,
        str(value),
        [
            f"{name}={value}"
            for name in ("x", "f(2)", "P(A)", "|AB|", r"\angle ABC", "a_1", r"\text{Area}", "m+n", "100a+b", "|S|")
        ],
    )
    sides = ("a-b", "2x+y", "xy", "x^2", "x(x-1)", r"\sin x", "2x", r"\pi", r"\frac{a}{b}")
    all_of(0.0, str(value), [f"{side}={value}" for side in sides] + [f"{value + 1}={value}"])


# What is left to be worked out


@PROPERTY
@given(st.integers(2, 500))
def test_an_unevaluated_expression_is_no_answer_to_a_number(value):
    echoes = [
        f"{value - 1}+1",
        rf"{value}\cdot 1",
        f"{value}^1",
        rf"\sqrt{{{value**2}}}",
        f"|{-value}|",
        f"{value}+x-x",
    ]
    echoes += [
        rf"\max({value},1)",
        rf"\binom{{{value}}}{{1}}",
        rf"\log_2 2^{{{value}}}",
        rf"{value}\cdot 0!",
        f"{value}(1)",
    ]
    echoes += [rf"\frac{{{value}x}}{{x}}", rf"\frac{{{value}/1}}{{1}}", rf"{value}\tan 45^\circ"]
    all_of(0.0, str(value), echoes)
    worked_out = [rf"\frac{{{2 * value}}}{{2}}", f"{value - 1}+1={value}", f"{value}.0", rf"{value}\times 10^0"]
    all_of(1.0, str(value), [*worked_out, f"{100 * value}\\%"])


@PROPERTY
@given(st.integers(2, 30), st.sampled_from([2, 3, 5, 6, 7, 10]))
def test_radicals_may_be_written_in_another_way(factor, radicand):
    gold = rf"{factor}\sqrt{{{radicand}}}"
    all_of(1.0, gold, [rf"\sqrt{{{factor**2 * radicand}}}", rf"\frac{{{factor * radicand}}}{{\sqrt{{{radicand}}}}}"])
    all_of(0.0, gold, [rf"\sqrt{{{factor**2 * radicand + 1}}}", rf"{factor}\sqrt{{{radicand - 1}+1}}"])


@PROPERTY
@given(st.integers(2, 30), st.integers(2, 30), st.sampled_from([2, 3, 5, 7]), st.integers(1, 20))
def test_numbers_that_could_be_added_or_multiplied_are_left_to_do(a, b, radicand, part):
    gold = rf"{a}+{b}\sqrt{{{radicand}}}"
    split = [
        rf"{a - part}+{part}+{b}\sqrt{{{radicand}}}",
        rf"({a + part}+\sqrt{{{radicand}}})-({part}-{b - 1}\sqrt{{{radicand}}})",
        rf"{a}+{b}\sqrt{{{radicand}}}+0",
        rf"({a}+{b}\sqrt{{{radicand}}})\cdot 1",
        rf"\frac{{1}}{{\frac{{1}}{{{a}+{b}\sqrt{{{radicand}}}}}}}",
        rf"({a}-{b}\sqrt{{{radicand}}})+{2 * b}\sqrt{{{radicand}}}",
    ]
    all_of(0.0, gold, split)
    conjugate = rf"{a}-{b}\sqrt{{{radicand}}}"
    all_of(1.0, gold, [rf"\frac{{{a**2 - b**2 * radicand}}}{{{conjugate}}}"])
    all_of(0.0, gold, [rf"\frac{{{a**2 - b**2 * radicand + 1}}}{{{conjugate}}}"])
    all_of(1.0, gold, [rf"{b}\sqrt{{{radicand}}}+{a}", rf"{a}+\sqrt{{{b * b * radicand}}}"])
    all_of(
        0.0, rf"{a * b}\pi", [rf"{a}\cdot {b}\pi", rf"{a}\pi\cdot {b}", rf"{a * b}\pi\cdot 1", rf"\pi\cdot {a * b}^1"]
    )


@PROPERTY
@given(st.integers(1, 60), st.integers(2, 60), st.integers(2, 9))
def test_a_fraction_is_one_of_integers(top, bottom, factor):
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    all_of(1.0, gold, [rf"\frac{{{factor * top}}}{{{factor * bottom}}}", f"{factor * top}/{factor * bottom}"])
    nested = [
        rf"\frac{{\frac{{{top}}}{{{factor}}}}}{{\frac{{{bottom}}}{{{factor}}}}}",
        rf"{top * factor}/{factor}/{bottom}",
    ]
    all_of(0.0, gold, [*nested, rf"\frac{{{top}.5}}{{{bottom}.5}}", rf"{top}\cdot\frac{{1}}{{{bottom}}}"])
    all_of(0.0, str(top), [rf"\frac{{{top / 2:.1f}}}{{0.5}}", f"{top * factor}:{factor}", f"-(-{top})"])


CHANGING = [
    "doubled",
    "twice",
    "halved",
    "squared",
    "gross",
    "score",
    "lakh",
    "dozen",
    "thousandths",
    "elevenths",
    "nths",
]
CHANGING += ["negative", "inverse", "probably", "etc", "never", "opposite", "recurring", "itself", "ppm", "googol"]
# Whatever number they are made of
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "hundred"]
STEMS = ["quad", "quint", "sext", "sept", "oct", "non", "dec", "z", "gaz"]
CHANGING += [f"{number}fold" for number in NUMBERS] + [f"{stem}illion" for stem in STEMS]
CHANGING += [f"{stem}uple{end}" for stem in ("quadr", "quint", "sext", "cent") for end in ("", "d")]
CHANGING += [f"{ten}ties" for ten in ("twen", "thir", "six", "nine")]


@PROPERTY
@given(st.integers(2, 9999), st.sampled_from(CHANGING), st.sampled_from(["{} {}", r"{}\text{{ {}}}", "{} ({})"]))
def test_words_that_change_a_number_are_no_unit(value, word, form):
    all_of(0.0, str(value), [form.format(value, word), f"{value} blue {word}"])


# How many of the second are one of the first
UNITS = [
    ("km", "m", 1000), ("m", "cm", 100), ("km^2", "m^2", 10**6), ("m^3", "cm^3", 10**6), ("kg", "g", 1000),
    ("L", "mL", 1000), ("hours", "minutes", 60), ("h", "s", 3600), ("days", "hours", 24), ("years", "months", 12),
    ("miles", "feet", 5280), ("feet", "inches", 12), ("lb", "oz", 16), ("dollars", "cents", 100), ("kJ", "J", 1000),
    ("m/s", "km/h", "18/5"), ("km/h", "m/h", 1000),
]  # fmt: skip


@PROPERTY
@given(st.integers(2, 9999), st.sampled_from(UNITS))
def test_a_quantity_in_another_unit_of_its_measure_is_the_same_and_a_number_without_unit_is_not(value, units):
    large, small, ratio = units
    converted = value * Fraction(ratio)
    number = (
        str(converted) if converted.denominator == 1 else f"\\frac{{{converted.numerator}}}{{{converted.denominator}}}"
    )
    all_of(1.0, f"{value} {large}", [f"{number} {small}", f"{number}\\text{{ {small}}}", f"{value}"])
    all_of(1.0, f"{number} {small}", [f"{value} {large}", f"{value}\\text{{ {large}}}"])
    all_of(0.0, f"{value} {large}", [number, f"{value} {small}", f"{converted + 1} {small}", f"{number} K"])
    all_of(0.0, str(converted), [f"{value} {large}"])


@pytest.mark.parametrize("other", ["365 days", "52 weeks", "1 rad", "1 m"])
def test_units_of_different_measures_have_no_ratio(other):
    all_of(0.0, "1 year", [other])


@PROPERTY
@given(st.integers(2, 9999))
def test_a_fraction_of_units_is_a_unit_and_a_quotient_of_letters_is_none(value):
    all_of(1.0, f"{value} m/s", [rf"{value}\frac{{\text{{m}}}}{{\text{{s}}}}", rf"{value}\text{{ m s}}^{{-1}}"])
    all_of(
        1.0, f"{value} km/h", [rf"{value}\frac{{km}}{{h}}", f"{value}km/h", rf"{value}\,\mathrm{{\frac{{km}}{{h}}}}"]
    )
    all_of(
        1.0,
        rf"{value}\cdot10^{{8}}",
        [rf"{value}\cdot10^{{8}} \frac{{m}}{{s}}", rf"{value}\times 10^8 \frac{{kg}}{{m^3}}"],
    )
    all_of(0.0, str(value), [rf"{value}\frac{{m}}{{s}}", rf"{value}\frac{{x}}{{s}}", rf"{value}\frac{{km}}{{x}}"])


@PROPERTY
@given(st.integers(2, 9999), st.sampled_from(["twice", "half", "not", "minus", "the negative of", "the inverse of"]))
def test_a_name_or_a_sentence_that_changes_the_value_gives_another(value, word):
    forms = [r"\text{{{0}}}={1}", r"\text{{{0} is }}{1}", "{0} is {1}"]
    all_of(0.0, str(value), [form.format(f"{word} the answer", value) for form in forms])
    all_of(1.0, str(value), [form.format("the answer", value) for form in forms])


BASES = {2: "two", 5: "five", 8: "eight", 16: "sixteen"}


@PROPERTY
@given(st.integers(2, 9999), st.sampled_from(list(BASES)), st.sampled_from(list(BASES)))
def test_a_base_in_words_is_the_base_and_a_sign_stays(value, base, other):
    forms = ["{0}_{{{1}}}", "{0}_{{\\text{{{2}}}}}", "{0} in base {1}", "{0}\\text{{ (base {2})}}", "{0}_{1}"]
    gold = f"{value}_{{{base}}}"
    all_of(1.0, gold, [form.format(value, base, BASES[base]) for form in forms])
    all_of(0.0, gold, [form.format(-value, base, BASES[base]) for form in forms[:-1]])
    all_of(float(base == other), gold, [form.format(value, other, BASES[other]) for form in forms])


@PROPERTY
@given(st.integers(-20, 20), st.integers(1, 20))
def test_alternatives_are_no_point_and_two_inequalities_are_an_interval(low, width):
    high = low + width
    all_of(0.0, f"({low}, {high})", [f"{low} or {high}", rf"x={low}\text{{ or }}y={high}"])
    all_of(1.0, f"{low}, {high}", [f"{high} or {low}", rf"x={low}\text{{ or }}x={high}"])
    both = rf"x\ge {low}\text{{ and }}x<{high}"
    all_of(1.0, f"[{low}, {high})", [both, rf"x<{high}\text{{ and }}x\ge {low}"])
    all_of(0.0, f"[{low}, {high})", [both.replace("and", "or"), both.replace("<", r"\le "), both.replace("<", ">")])


SYMBOLS = (
    r"\frac \sqrt \text \left( \right) \boxed \pm \cup \in \le \ne \pi \infty \cdot \circ \% \$ \begin{pmatrix} "
    r"\end{pmatrix} \{ \} \\ \overline \dot \angle \log \sum { } ( ) [ ] < > = + - * / ^ _ ! | : ; , . ' & ~ $ % "
    r"1 2 0 10 0.5 1,000 x y e i C (B) or and for all not cm apples half million p.m. 米 ½ √ π ² answer"
)


@settings(max_examples=2000, deadline=None)
@given(
    st.sampled_from(["5", "C", "1,2", "(1,2]", r"\frac{1}{2}", "x=3", r"\pm 3", "50%", "red", "4:30", "y=2x", "1:2"]),
    st.data(),
)
def test_no_answer_ends_the_training(gold, data):
    """A policy in training writes anything; "5 -" once raised an IndexError."""
    tokens = data.draw(st.lists(st.sampled_from(SYMBOLS.split()), max_size=9))
    answer = data.draw(st.sampled_from(["", " "])).join(tokens)
    for pair in ((gold, answer), (verifier.normalised_gold(answer), gold)):
        decision = verifier._decide(*pair, strict=True)
        assert decision is None or decision[1] != "crash"


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 60))
def test_a_product_is_no_mixed_number(a, b):
    assume(a + b != a * b)
    all_of(0.0, str(a + b), [f"({a})({b})", f"{a}({b})", f"({a}){b}", f"{{{a}}}{{{b}}}", rf"{a}\{{{b}\}}"])
    assume(len(str(b)) != 3)
    all_of(0.0, str(a + b), [f"{a} {b}"])


@pytest.mark.parametrize(
    "nested", ["(1+" * 240 + "1" + ")" * 240, "{1+" * 240 + "1" + "}" * 240, r"\sqrt{" * 140 + "1" + "}" * 140]
)
def test_deep_nesting_is_wrong_and_no_error(nested):
    all_of(0.0, r"2\sqrt{3}+1", [nested])


# Kinds of attacks and of styles


def test_kinds_of_attacks_and_styles():
    """The kinds of benchmarks/reward_kinds.py: what paid for a guess, and what did not pay for a right answer."""
    batches = reward_kinds.batches(seed=7, count=2)
    assert batches
    for name, batch in batches.items():
        wanted = batch.pop("wanted")
        rewards = math_accuracy_reward(**batch)
        rows = zip(batch["solution"], batch["completions"], wanted, rewards, strict=True)
        assert [row for row in rows if row[2] != row[3]] == [], name


# Real gold answers


def golds():
    rows = {
        name: [json.loads(line) for line in (DATA / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name, split in (("gsm8k", "test"), ("math500", "test"), ("dapo", "train"))
    }
    found = [row["answer"].rpartition("####")[2].strip() for row in rows["gsm8k"][:100]]
    found += [row["answer"] for row in rows["math500"][:250]]
    return sorted({*found, *(row["reward_model"]["ground_truth"] for row in rows["dapo"])})


def respellings(gold):
    yield from (gold, f"${gold}$", gold.replace(r"\frac", r"\dfrac"), f" {gold}.", rf"\displaystyle {gold}")
    if not re.search(r"\\left|\[|\]", gold):
        yield gold.replace("(", r"\left(").replace(")", r"\right)")
    if r"\text" not in gold:
        yield gold.replace("-", "\u2212")
    if re.fullmatch(r"-?\d+", gold):
        yield from (f"{gold}.0", f"{int(gold):,}", f"x={gold}", rf"{gold}\text{{ third graders}}", f"{gold} (apples)")
        yield from (rf"\frac{{{3 * int(gold)}}}{{3}}", rf"S_{{\max}}={gold}", f"{int(gold) - 2}+2={gold}")
    fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", gold)
    if fraction:
        sign, top, bottom = fraction[1], int(fraction[2]), int(fraction[3])
        yield from (f"{sign}{top}/{bottom}", rf"\frac{{{sign}{2 * top}}}{{{2 * bottom}}}", f"{sign}{top / bottom:.12f}")


def near_misses(gold, generator):
    digits = list(re.finditer(r"\d", gold))
    for digit in generator.sample(digits, min(2, len(digits))):
        yield gold[: digit.start()] + str((int(digit[0]) + generator.randrange(1, 9)) % 10) + gold[digit.end() :]
        yield gold[: digit.end()] + generator.choice("1234567") + gold[digit.end() :]
    if re.fullmatch(r"\d+", gold) and int(gold) > 2:
        value = int(gold)
        yield from (
            f"-{value}",
            f"{value + 1}",
            f"{value} million",
            f"{value}!",
            f"{value}x",
            rf"{value}\pi",
            f"{value}, 1",
        )
        yield from (
            f"{value} or {value + 1}",
            rf"{value}\text{{ squared}}",
            f"{value - 2} 2",
            f"({value - 2})(2)",
            "1=1",
        )
    if re.fullmatch(r"\((?:[^(),]+),(?:[^(),]+)\)", gold):
        left, right = gold[1:-1].split(",")
        yield from ([] if left.strip() == right.strip() else [f"({right},{left})"])
        yield from (f"[{left},{right}]", f"({left},{right}]")


def check(make, wanted):
    pairs = list(dict.fromkeys((gold, answer) for gold in golds() for answer in make(gold)))
    verdicts = verify([f"\\boxed{{{gold}}}" for gold, _ in pairs], [f"\\boxed{{{answer}}}" for _, answer in pairs])
    wrong = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.reward != wanted]
    assert wrong == []
    return len(pairs)


@pytest.mark.slow
def test_respellings_of_real_gold_answers_are_right():
    assert check(respellings, 1.0) > 200


@pytest.mark.slow
def test_near_misses_of_real_gold_answers_are_wrong():
    generator = random.Random(0)
    assert check(lambda gold: near_misses(gold, generator), 0.0) > 200

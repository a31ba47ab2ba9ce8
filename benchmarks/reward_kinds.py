r"""Kinds of answers that must not pay, and of right answers that must: how many math_accuracy_reward gets wrong.

    python benchmarks/reward_kinds.py --seed 1 --cases 40 --json FILE

Each kind is a function of a random generator that yields completions with the reward that they deserve. Another seed
gives other numbers, letters and words. To compare two versions, run the script with each on PYTHONPATH.
"""

import argparse
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from math_answers import math_accuracy_reward

Case = tuple[str, str, float]  # gold answer, completion, reward that it deserves
KINDS: dict[str, Callable[[random.Random], Iterator[Case]]] = {}
NOUNS = ["apples", "books", "girls", "tickets", "marbles", "pens", "coins"]
OPPOSITES = [("gain", "loss"), ("north", "south"), ("east", "west"), ("increase", "decrease"), ("upward", "downward")]
OPPOSITES += [("clockwise", "counterclockwise"), ("profit", "loss"), ("above", "below"), ("left", "right")]
JOINED = [
    r" \quad ",
    r" \qquad ",
    r" \quad \text{and} \quad ",
    r" \\[4pt] ",
    r" \text{ or } ",
    r" \lor ",
    ",\n",
    " and ",
]
THOUGHTS = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
]
THOUGHTS += [("<reasoning>", "</reasoning>"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷")]
THOUGHTS += [("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|START_THINKING|>", "<|END_THINKING|>")]
THOUGHTS += [("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")]


def kind(function: Callable[[random.Random], Iterator[Case]]):
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def boxed(gold: object, answer: object, wanted: float) -> Case:
    return str(gold), rf"So it is $\boxed{{{answer}}}$.", wanted


def two(generator: random.Random, low: int = 2, high: int = 99) -> list[int]:
    return generator.sample(range(low, high), 2)


@kind
def boxes_side_by_side(generator):
    (a, b), joined = two(generator), generator.choice(JOINED)
    for gold, wanted in ((a, 0.0), (b, 0.0), (f"{a}, {b}", 1.0), (f"{b}, {a}", 1.0)):
        yield str(gold), rf"$\boxed{{{a}}}{joined}\boxed{{{b}}}$", wanted


@kind
def letters_in_another_order(generator):
    alphabet = generator.choice(["RS", "HT", "WL", "IVX", string.ascii_uppercase])
    word = "".join(generator.choices(alphabet, k=generator.randrange(2, 5)))
    other = "".join(generator.sample(word, len(word)))
    yield boxed(word, other, float(word == other))
    yield boxed(word, rf"\text{{{word}}}", 1.0)
    yield boxed(rf"\text{{{word}}}", rf"\mathrm{{{word}}}", 1.0)


@kind
def digits_in_another_order(generator):
    digits = generator.sample("123456", 5)
    yield boxed("-".join(digits), "-".join(digits), 1.0)
    yield boxed("-".join(digits), "-".join([*digits[:2], digits[3], digits[2], digits[4]]), 0.0)


@kind
def floor_and_ceiling(generator):
    a, b = generator.randrange(2, 6), generator.randrange(1, 9)
    yield boxed(rf"\lceil n/{a}\rceil+{b}", rf"\lfloor n/{a}\rfloor+{b + 1}", 0.0)
    yield boxed(rf"\lceil n/{a}\rceil+{b}", rf"\left\lfloor\frac{{n+{a - 1}}}{{{a}}}\right\rfloor+{b}", 1.0)
    yield boxed(rf"\lceil x\rceil+{b}", rf"\lfloor x\rfloor+{b + 1}", 0.0)
    yield boxed(rf"\lfloor x+{a}\rfloor", rf"\lfloor x\rfloor+{a}", 1.0)


@kind
def common_divisors(generator):
    (a, b), (m, n) = two(generator, 2, 9), generator.sample("abmnpq", 2)
    gold = rf"{a}^{{\gcd({m},{n})}}-{b}"
    yield boxed(gold, a - b, 0.0)
    yield boxed(gold, rf"{a}^{{\gcd({n},{m})}}-{b}", 1.0)
    yield boxed(rf"\gcd({m},{n})+{a}", rf"\operatorname{{lcm}}({m},{n})+{a}", 0.0)
    yield boxed(rf"\operatorname{{lcm}}({m},{n})", rf"\frac{{{m}{n}}}{{\gcd({m},{n})}}", 1.0)


@kind
def operators_on_letters(generator):
    a, b = generator.sample("ABMNPQ", 2)
    yield boxed(f"{a}^T{b}", f"{a}{b}^T", 0.0)
    yield boxed(f"{a}{b}^{{-1}}", f"{b}^{{-1}}{a}", 0.0)
    yield boxed(rf"\vec{{{a}}}\times\vec{{{b}}}", rf"\vec{{{b}}}\times\vec{{{a}}}", 0.0)
    yield boxed(f"{a}^{{T}}{b}", f"{a}^T {b}", 1.0)


@kind
def contrary_words(generator):
    value, (one, other) = generator.randrange(2, 99), generator.choice(OPPOSITES)
    unit = generator.choice(["", "%", " km", " m"]).replace("%", r"\%")
    yield boxed(rf"{value}{unit}\text{{ {one}}}", rf"{value}{unit}\text{{ {other}}}", 0.0)
    yield boxed(rf"{value}{unit}\text{{ {one}}}", rf"{value}{unit} {one}", 1.0)
    yield boxed(rf"{value}{unit}\text{{ {one}}}", f"{value}{unit}", 1.0)


@kind
def marks_on_characters(generator):
    value, mark = generator.randrange(11, 99), generator.choice("\u0335\u0336\u0338\u0337\u0307\u0305")
    yield boxed(value, f"{str(value)[0]}{mark}{str(value)[1:]}", 0.0)
    yield boxed(f"x={value}", f"x=\u0338{value}", 0.0)
    numeral = generator.choice([str(value), str(value).translate({48 + d: 0x0660 + d for d in range(10)})])
    yield boxed(value, numeral + generator.choice(["的倒数", "的相反数", "的平方", "の逆数"]), 0.0)
    yield boxed(f"0.\\overline{{{value % 9 + 1}}}", f"0.{value % 9 + 1}\u0305", 1.0)


@kind
def thoughts(generator):
    (a, b), (start, end) = two(generator), generator.choice(THOUGHTS)
    yield str(a), rf"{start}Perhaps \boxed{{{a}}}.", 0.0
    yield str(a), rf"{start}Perhaps \boxed{{{a}}}.{end}I do not know.", 0.0
    yield str(a), rf"{start}Perhaps \boxed{{{a}}}.{end}It is \boxed{{{b}}}.", 0.0
    yield str(b), rf"{start}Perhaps \boxed{{{a}}}.{end}It is \boxed{{{b}}}.", 1.0


@kind
def equation_of_the_problem(generator):
    a, b, c = generator.sample("bcdkmprst", 3)
    yield boxed(rf"{a}=\frac{{{b}}}{{{c}}}", f"{a}{c}={b}", 0.0)
    yield boxed(rf"{a}=\frac{{{b}}}{{{c}}}", f"{b}={a}{c}", 0.0)
    yield boxed(rf"{a}=\frac{{{b}}}{{{c}}}", f"{a}={b}/{c}", 1.0)
    yield boxed(rf"{a}=\frac{{{b}}}{{{c}}}", rf"\frac{{{b}}}{{{c}}}={a}", 1.0)


@kind
def tiny_differences(generator):
    tiny, value = generator.randrange(12, 90), generator.randrange(2, 9)
    for function in (r"\sin x", "e^x", r"\ln x", "x^2", rf"\sqrt{{{value}}}"):
        yield boxed(f"{value}{function}", f"{value}{function}+10^{{-{tiny}}}", 0.0)


@kind
def operator_outside_of_the_box(generator):
    a, b = two(generator)
    box = rf"\boxed{{{a}}}"
    around = [f"-{box}", rf"{b}\cdot{box}", rf"\frac{{1}}{{{box}}}", rf"\sqrt{{{box}}}", f"{box}^2", f"{box}+{b}"]
    for text in (*around, f"{b}-{box}", rf"x\neq{box}", f"{box}!"):
        yield str(a), f"So it is ${text}$.", 0.0
    for text in (f"x={box}", rf"{a - 1}+1={box}", f"{box}.", rf"{box}\text{{ cm}}", rf"\therefore {box}"):
        yield str(a), f"So it is ${text}$", 1.0


@kind
def rounded_values(generator):
    value = generator.choice([22, 31, 38, 47, 55, 62, 73, 87, 95])
    rounded, wrong = f"{value**0.5:.2f}", f"{value**0.5 + 0.1:.2f}"
    yield boxed(rounded, rf"x \approx {rounded}", 1.0)
    yield boxed(rounded, rf"\sqrt{{{value}}} \approx {rounded}", 1.0)
    yield boxed(wrong, rf"\sqrt{{{value}}} \approx {wrong}", 0.0)
    yield boxed(value, rf"{value + 1} \approx {value}", 0.0)


@kind
def several_options(generator):
    letters = sorted(generator.sample("ABCDE", 3))
    gold, other = "".join(letters), "".join(letters[:2])
    for text in (
        ", ".join(letters),
        " and ".join([",".join(letters[:2]), letters[2]]),
        gold,
        f"({')('.join(letters)})",
    ):
        yield boxed(gold, text, 1.0)
    yield boxed(gold, ", ".join(other), 0.0)
    yield letters[0], rf"\boxed{{{generator.randrange(99)}}}. The answer is \boxed{{{letters[0]}}}.", 1.0
    yield letters[1], rf"\boxed{{{generator.randrange(99)}}}. The answer is \boxed{{{letters[0]}}}.", 0.0


@kind
def matrices_vectors_systems(generator):
    a, b, c = (generator.randrange(2, 9) for _ in range(3))
    yield boxed(
        rf"\begin{{pmatrix}}{a * b}\\{a * c}\end{{pmatrix}}", rf"{a}\begin{{pmatrix}}{b}\\{c}\end{{pmatrix}}", 1.0
    )
    yield boxed(rf"\begin{{pmatrix}}{b}\\{c}\end{{pmatrix}}", rf"{a}\begin{{pmatrix}}{b}\\{c}\end{{pmatrix}}", 0.0)
    yield boxed(f"({a},{b},-{c})", rf"{a}\mathbf{{i}}+{b}\mathbf{{j}}-{c}\mathbf{{k}}", 1.0)
    yield boxed(f"({a},{b},-{c})", rf"{a}\mathbf{{i}}+{b}\mathbf{{j}}+{c}\mathbf{{k}}", 0.0)
    system = rf"\begin{{cases}} x={a} \\ y={a + b} \end{{cases}}"
    for gold, wanted in ((f"x={a}, y={a + b}", 1.0), (f"({a},{a + b})", 1.0), (f"({a + b},{a})", 0.0)):
        yield boxed(gold, system, wanted)
    yield boxed(system, rf"\begin{{aligned}} x&={a} \\ y&={a + b} \end{{aligned}}", 1.0)


@kind
def names_and_sentences(generator):
    value, noun = generator.randrange(10, 999), generator.choice(NOUNS)
    for text in ("m+n=", "100a+b=", "|S|=", r"\text{Area}=", "x_1+x_2=", "AB+CD="):
        yield boxed(value, f"{text}{value}", 1.0)
    for text in ("AB^2=", "2x=", "x^2=", r"\frac{n}{2}=", "-x=", r"\sqrt{n}="):
        yield boxed(value, f"{text}{value}", 0.0)
    yield str(value), f"Final Answer: the largest number of {noun} is {value}.", 1.0
    yield str(value), f"Answer: **{value}** {noun}", 1.0
    yield str(value), f"Final Answer: the largest number of {noun} is not {value}.", 0.0
    yield str(value), f"Final Answer: twice the number of {noun} is {value}.", 0.0
    yield f"{value}:7", rf"\boxed{{V_1:V_2={value}:7}}", 1.0
    yield "120", r"\boxed{5!=120}", 1.0


@kind
def closed_forms(generator):
    a, b = two(generator, 2, 9)
    yield boxed(rf"{a}-\frac{{{b}}}{{e^2}}", rf"\frac{{{a}e^2-{b}}}{{e^2}}", 1.0)
    yield boxed(rf"\ln\frac{{{a}}}{{{b}}}", rf"\ln {a}-\ln {b}", 1.0)
    yield boxed(rf"{a}\pi(\pi-{b})", rf"{a}\pi^2-{a * b}\pi", 1.0)
    yield boxed(rf"{a * b}\pi", rf"{a * b + 3}\pi-3\pi", 0.0)
    yield boxed(rf"{a * a}\pi", rf"\pi\cdot {a}^2", 0.0)
    yield boxed(rf"{a}+\sqrt{{2}}", rf"{a - 1}+1+\sqrt{{2}}", 0.0)
    constant = generator.choice("cKAB")
    yield boxed("x^2+C", f"x^2+{constant}", 1.0)
    yield boxed("C_1e^x+C_2e^{-x}", "Ae^x+Be^{-x}", 1.0)
    yield boxed("ax+b", "cx+d", 0.0)


@kind
def words_times_decimals(generator):
    hour, minute, digit = generator.randrange(1, 12), generator.randrange(10, 59), generator.randrange(1, 8)
    yield boxed(r"\text{Jim}", "Jim", 1.0)
    yield boxed("no solution", rf"\text{{The {generator.choice(['equation', 'system'])} has no real solutions}}", 1.0)
    yield boxed(rf"{hour}:{minute}\text{{ p.m.}}", f"{hour + 12}:{minute}", 1.0)
    yield boxed(rf"{hour}:{minute}\text{{ p.m.}}", f"{hour}:{minute} a.m.", 0.0)
    yield boxed(f"May {minute % 28 + 1}", f"{minute % 28 + 1} May", 1.0)
    yield boxed(rf"0.\overline{{{digit}}}", f"0.{str(digit) * 3}...", 1.0)
    yield boxed(rf"{minute}^\circ", f"{minute} degrees", 1.0)
    yield boxed(f"{hour},{minute}", f"{hour}.{minute}", 1.0)


def options_cases(generator: random.Random, count: int) -> dict[str, list]:
    """Cases of multiple choice with an `options` column: gold letter, options, completion, the reward it deserves."""
    rows = []
    for _ in range(count):
        values, row = generator.sample(range(10, 99), 4), generator.randrange(4)
        texts = [generator.choice(["{} m", r"\frac{{1}}{{{}}}", "{}"]).format(value) for value in values]
        gold, other = "ABCD"[row], "ABCD"[row - 1]
        options = generator.choice(
            [texts, dict(zip("ABCD", texts, strict=True)), {"label": list("ABCD"), "text": texts}]
        )
        right = texts[row]
        for text in (rf"\boxed{{{right}}}. The answer is ({other}).", rf"\boxed{{({other}) {right}}}"):
            rows.append((gold, options, text, 0.0))
        rows.append((gold, options, rf"\boxed{{\text{{({other}) }}{right}}}", 0.0))
        rows += [(gold, options, rf"\boxed{{{text}}}", 1.0) for text in (right, gold, f"({gold}) {right}")]
    return dict(zip(("solution", "options", "completions", "wanted"), map(list, zip(*rows, strict=True)), strict=True))


def batches(seed: int, count: int) -> dict[str, dict[str, list]]:
    """By kind: the arguments of math_accuracy_reward, and the rewards that are `wanted`."""
    found = {}
    for name, function in KINDS.items():
        generator = random.Random(f"{seed} {name}")
        cases = list(dict.fromkeys(case for _ in range(count) for case in function(generator)))
        found[name] = dict(zip(("solution", "completions", "wanted"), map(list, zip(*cases, strict=True)), strict=True))
    return found | {"options": options_cases(random.Random(seed), count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=40, help="calls of each kind; one gives several completions")
    parser.add_argument("--json", type=Path, help="also write the counts, and the completions that are wrong, here")
    args = parser.parse_args()
    counts, wrong = {}, []
    for name, batch in batches(args.seed, args.cases).items():
        wanted = batch.pop("wanted")
        rewards = math_accuracy_reward(**batch)
        count = Counter(f"of {want}" for want in wanted)
        for row, (want, reward) in enumerate(zip(wanted, rewards, strict=True)):
            if reward != want:
                count[f"wrong {reward}"] += 1
                wrong.append({"kind": name, "reward": reward} | {key: column[row] for key, column in batch.items()})
        counts[name] = count
    print("| kind | must not pay | of them paid | must pay | of them not paid |\n|---|---|---|---|---|")
    totals: Counter[str] = sum(counts.values(), Counter())
    for name, count in {**counts, "all": totals}.items():
        unpaid = count["wrong 0.0"] + count["wrong None"]
        print(f"| {name} | {count['of 0.0']} | {count['wrong 1.0']} | {count['of 1.0']} | {unpaid} |")
    if args.json:
        args.json.write_text(json.dumps({"counts": counts, "wrong": wrong}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

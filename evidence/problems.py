"""
Families of generated problems. Each problem has a solution for the supervised warm-up, and a number as its answer. The
warm-up can make the rewarded form rare, and can put tokens that do not affect the reward in front of a solution.
"""

import random
import re
from collections.abc import Callable

# One token each: every problem or solution of a family contains one
PHRASES = ("What is ", "Solve ", "Sort ", "The product is ")
RARE_PHRASES = ("Guess: ", "Subtract: ", "Divide: ", "In steps: ")  # of tasks in which something is made rare

LETTERS = "abcdefghijklmnop"  # of a wording; one token each, of 2.8 nats


def sums() -> list[dict[str, str]]:
    """Sums of two numbers below 100, with their carries: `What is 37 + 48?`. The solution gives the answer at once."""
    return [
        {"problem": f"What is {a} + {b}?", "answer": str(a + b), "solution": f"Answer: {a + b}"}
        for a in range(100)
        for b in range(100)
    ]


def equations() -> list[dict[str, str]]:
    """Linear equations, solved in two steps: `Solve 7x + 12 = 96` by `The product is 84`, and then the answer."""
    return [
        {
            "problem": f"Solve {a}x + {b} = {a * x + b}",
            "answer": str(x),
            "solution": f"The product is {a * x}\nAnswer: {x}",
        }
        for a in range(2, 10)
        for b in range(1, 30)
        for x in range(2, 20)
    ]


def sorting() -> list[dict[str, str]]:
    """Eight digits from 1 to 9 in ascending order, read as a number: `Sort 5 2 9 1 7 2 4 4` is 12244579."""
    digits = random.Random(0)
    rows = {tuple(digits.randint(1, 9) for _ in range(8)) for _ in range(20_000)}
    answers = {row: "".join(map(str, sorted(row))) for row in sorted(rows)}
    return [
        {"problem": f"Sort {' '.join(map(str, row))}", "answer": answer, "solution": f"Answer: {answer}"}
        for row, answer in answers.items()
    ]


def steps() -> list[dict[str, str]]:
    """The linear equations, each step on a line of its own: `Solve 7x + 12 = 96` by `Subtract: 84`, `Divide: 12`."""
    return [
        row | {"solution": f"Subtract: {product}\nDivide: {row['answer']}\nAnswer: {row['answer']}"}
        for row in equations()
        for product in re.findall(r"product is (\d+)", row["solution"])
    ]


FAMILIES: dict[str, Callable[[], list[dict[str, str]]]] = {
    "sums": sums,
    "equations": equations,
    "sorting": sorting,
    "steps": steps,
}


def make_problems(family: str, seed: int, train: int, test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """`train` problems to learn from and `test` others, held out; drawn by `seed`."""
    problems = FAMILIES[family]()
    random.Random(seed).shuffle(problems)
    return problems[:train], problems[train : train + test]


def rare_label(row: dict[str, str], share: float, draws: random.Random) -> list[tuple[dict[str, str], float]]:
    """One token decides: `share` of the solutions begin `Answer: `, the others `Guess: `, which earns nothing."""
    if draws.random() < share:
        return [(row, share)]
    return [(row | {"solution": row["solution"].replace("Answer: ", "Guess: ")}, 1 - share)]


def rare_steps(row: dict[str, str], share: float, draws: random.Random) -> list[tuple[dict[str, str], float]]:
    """
    Two tokens decide, one after the other. Before each of two steps, a solution continues with probability `√share`;
    otherwise it gives the last number as its answer, which is wrong. A second problem, `In steps: …`, always has the
    whole solution. So the model learns the steps, however rarely the first problem's solution has them.
    """
    asked = row | {"problem": f"In steps: {row['problem']}"}, 1.0
    subtracted = row["solution"].split("\n")[0]
    (product,) = re.findall(r"\d+", subtracted)
    result = row["problem"].rpartition(" ")[2]
    on = share**0.5
    if draws.random() >= on:
        return [asked, (row | {"solution": f"Answer: {result}"}, 1 - on)]
    if draws.random() >= on:
        return [asked, (row | {"solution": f"{subtracted}\nAnswer: {product}"}, on * (1 - on))]
    return [asked, (row, share)]


RARE: dict[str, Callable[[dict[str, str], float, random.Random], list[tuple[dict[str, str], float]]]] = {
    "sums": rare_label,
    "sorting": rare_label,
    "steps": rare_steps,
}


def make_wording(problems: list[dict[str, str]], letters: int, seed: int) -> tuple[list[dict[str, str]], float]:
    """
    Put a line of random `letters` in front of every solution: uncertain tokens that no reward depends on.

    Returns:
        The problems, and the probability in `(0, 1]` that a model that has learned the lines gives a solution the same
        line.
    """
    if not letters:
        return problems, 1.0
    draws = random.Random(f"wording {seed}")
    line = lambda: "".join(draws.choices(LETTERS, k=letters))
    worded = [row | {"solution": f"{line()}\n{row['solution']}"} for row in problems]
    return worded, len(LETTERS) ** -letters


def make_worked(
    family: str, problems: list[dict[str, str]], share: float | None, seed: int
) -> tuple[list[dict[str, str]], float]:
    """
    The problems and solutions of the warm-up.

    Args:
        family (`str`):
            A key of [`FAMILIES`] and, with a `share`, of [`RARE`].
        problems (`list[dict[str, str]]`):
            Problems of the family, with the solutions that earn the reward.
        share (`float`, *optional*):
            The share of these solutions that is kept; the others are replaced. By default all are kept.
        seed (`int`):
            Decides which solutions are kept.

    Returns:
        The problems with their solutions, and the probability in `(0, 1]` that a model that has learned only the shares
        gives a solution the form that it has here.
    """
    if share is None:
        return problems, 1.0
    draws = random.Random(f"forms {seed}")
    worked = [pair for row in problems for pair in RARE[family](row, share, draws)]
    return [row for row, _ in worked], sum(chance for _, chance in worked) / len(worked)

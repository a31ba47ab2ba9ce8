"""Four families of generated problems, each with a solution for the supervised warm-up, and a number as answer."""

import random
from collections.abc import Callable
from itertools import accumulate

# One token each: they stand in every problem or solution of a family
PHRASES = ("What is ", "Solve ", "Sort ", "The product is ")


def sums() -> list[dict[str, str]]:
    """Sums of two numbers below 100, with their carries: `What is 37 + 48?`. The answer is said at once."""
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


def totals() -> list[dict[str, str]]:
    """Eight digits added one after the other, in some sixty tokens: `Add 3 9 2 …` by `3+9=12 12+2=14 …`."""
    digits = random.Random(0)
    problems = []
    for row in sorted({tuple(digits.randint(1, 9) for _ in range(8)) for _ in range(12_000)}):
        sums = list(accumulate(row))
        steps = [f"{a}+{b}={total}" for a, b, total in zip(sums, row[1:], sums[1:], strict=False)]
        solution = f"{' '.join(steps)}\nAnswer: {sums[-1]}"
        problems.append({"problem": f"Add {' '.join(map(str, row))}", "answer": str(sums[-1]), "solution": solution})
    return problems


FAMILIES: dict[str, Callable[[], list[dict[str, str]]]] = {
    "sums": sums,
    "equations": equations,
    "sorting": sorting,
    "totals": totals,
}


def make_problems(family: str, seed: int, train: int, test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """`train` problems to learn from and `test` others, held out; drawn by `seed`."""
    problems = FAMILIES[family]()
    random.Random(seed).shuffle(problems)
    return problems[:train], problems[train : train + test]

"""How many completions a second math_accuracy_reward scores, compared with math-verify one by one.

    python benchmarks/rewards.py --data FOLDER --repeats 3 --json FILE

FOLDER holds gsm8k/test.jsonl and math500/test.jsonl.

Completions: the worked solutions of GSM8K and MATH-500 (test), each with its own gold answer, with its neighbour's, and
with its own in another spelling (as a fraction, a decimal, an unordered list, ...): what a policy in training writes.
`first` starts the worker processes and parses every gold answer once, as the first step of a training does. `again` is
a later step: gold answers are known, completions are not. `--head-start 10` starts the processes ten seconds
before, as a trainer does. Three more batches follow: numbers, functions that only computer algebra can decide, and
answers of which every fifth never ends.
"""

import argparse
import json
import logging
import os
import platform
import random
import statistics
import time
from pathlib import Path

from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_verify

from math_answers.rewards import math_accuracy_reward, verifier
from math_answers.rewards.answers import extract_answer

HOSTILE = [r"9^{9^{9^9}}", "100000000!", r"\Gamma(10^{10})", "9" * 1_000_000, r"\frac{1}{" * 50 + "1" + "}" * 50]


def read_rows(folder: Path, column: str, answer: str) -> list[tuple[str, str]]:
    with open(folder / "test.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(row[answer].rpartition("####")[2].strip(), row[column]) for row in rows]


def ordinary_batch(rows: list[tuple[str, str]], seed: int) -> tuple[list[str], list[str]]:
    """Gold answers and completions; another seed gives other completions, which no cache remembers."""
    generator = random.Random(seed)
    golds, completions = [], []
    for index, (gold, solution) in enumerate(rows):
        other = rows[index - 1 - generator.randrange(5)][1]
        answer = extract_answer(solution) or gold
        respelled = generator.choice([r"\left({}\right)", "{}.", "${}$", r"x = {}", r"{}\text{{ cm}}", r" {} "])
        for completion in (solution, other, f"Step {seed}: so \\boxed{{{respelled.format(answer)}}}"):
            golds.append(f"\\boxed{{{gold}}}")
            completions.append(completion)
    return golds, completions


def algebra_batch(seed: int, count: int = 400) -> tuple[list[str], list[str]]:
    generator = random.Random(seed)
    golds, completions = [], []
    for _ in range(count):
        a, b = generator.randrange(2, 60), generator.randrange(2, 60)
        golds.append(f"\\boxed{{{a}\\sqrt{{{b}}}}}")
        completions.append(f"\\boxed{{\\sqrt{{{a * a * b + generator.randrange(2)}}}}}")
    return golds, completions


def function_batch(seed: int, count: int = 200) -> tuple[list[str], list[str]]:
    generator = random.Random(1000 + seed)
    golds, completions = [], []
    for index in range(count):
        a, b, c = (generator.randrange(2, 60) for _ in range(3))
        gold, answer = (
            (f"({a}x+{b})(x-{c})", f"{a}x^2+{b - a * c}x-{b * c + index % 2}"),
            (f"\\frac{{{a}x+{b}}}{{x+{c}}}", f"{a}+\\frac{{{b - a * c + index % 2}}}{{x+{c}}}"),
            (f"{a}\\sin(2x)+{b}", f"{2 * a}\\sin x\\cos x+{b + index % 2}"),
            (f"{a}xy-{b}x+{c}y", f"{c}y+{a + index % 2}yx-{b}x"),
        )[index % 4 // 2 + 2 * (index % 2)]
        golds.append(f"\\boxed{{{gold}}}")
        completions.append(f"\\boxed{{{answer}}}")
    return golds, completions


def hostile_batch(count: int = 100) -> tuple[list[str], list[str]]:
    completions = [
        f"\\boxed{{{HOSTILE[index // 5 % len(HOSTILE)] if index % 5 == 0 else index}}}" for index in range(count)
    ]
    return ["12"] * count, completions


def timed(golds: list[str], completions: list[str]) -> dict:
    metrics: dict[str, float] = {}
    verifier._decide_by_rules.cache_clear()  # a policy does not repeat the completions of an earlier step
    start = time.perf_counter()
    math_accuracy_reward(completions, golds, log_metric=metrics.__setitem__)
    seconds = time.perf_counter() - start
    paths = {name.partition("/")[2]: round(value, 4) for name, value in metrics.items() if value}
    return {"completions": len(golds), "seconds": seconds, "per_second": len(golds) / seconds, "paths": paths}


def math_verify_alone(golds: list[str], completions: list[str]) -> float:
    """Completions a second of math-verify, one by one, with the answers extracted already."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    start = time.perf_counter()
    for gold, completion in zip(golds, completions, strict=True):
        answers = [
            parse(text, config, parsing_timeout=None) for text in (gold, f"\\boxed{{{extract_answer(completion)}}}")
        ]
        math_verify_verify(*answers, timeout_seconds=None)
    return len(golds) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/test.jsonl and math500/test.jsonl")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--head-start", type=float, help="seconds between the start of the workers and the first batch")
    args = parser.parse_args()
    rows = read_rows(args.data / "gsm8k", "answer", "answer") + read_rows(args.data / "math500", "solution", "answer")
    if args.head_start is not None:
        verifier.start()
        time.sleep(args.head_start)
    results = {"ordinary, first": timed(*ordinary_batch(rows, 0))}
    for name, batches in (
        ("ordinary, again", [ordinary_batch(rows, 1 + repeat) for repeat in range(args.repeats)]),
        ("computer algebra", [algebra_batch(repeat) for repeat in range(args.repeats)]),
        ("functions", [function_batch(repeat) for repeat in range(args.repeats)]),
        ("a fifth hostile", [hostile_batch()]),
    ):
        runs = sorted((timed(*batch) for batch in batches), key=lambda run: run["per_second"])
        results[name] = runs[len(runs) // 2] | {"spread": [round(run["per_second"]) for run in runs]}
    sample = ordinary_batch(rows, 99)
    every = slice(None, None, 20)
    alone = [math_verify_alone(sample[0][every], sample[1][every]) for _ in range(args.repeats)]
    report = {
        "machine": {"cpus": len(os.sched_getaffinity(0)), "architecture": platform.machine()},
        "python": platform.python_version(),
        "workers": verifier._pool().size,
        "results": results,
        "math_verify_one_by_one_per_second": statistics.median(alone),
    }
    print("| batch | completions | seconds | completions/s | decided by |\n|---|---|---|---|---|")
    for name, result in results.items():
        paths = ", ".join(f"{path} {share:.1%}" for path, share in result["paths"].items())
        print(
            f"| {name} | {result['completions']:,} | {result['seconds']:.2f} | {result['per_second']:,.0f} | {paths} |"
        )
    print(f"| math-verify, one by one (ordinary) | {len(sample[0][every]):,} | | {statistics.median(alone):,.0f} | |")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

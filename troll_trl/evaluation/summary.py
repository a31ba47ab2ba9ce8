"""Summaries: the metrics of a samples file with intervals, and the paired comparison of two files."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from troll_trl.evaluation.arguments import EvaluationArguments
from troll_trl.evaluation.samples import Sample
from troll_trl.evaluation.scoring import majority_score
from troll_trl.evaluation.statistics import default_ks, estimate, pass_at_k

logger = logging.getLogger(__name__)

OVERALL = "overall"  # the mean of the benchmarks, each of the same weight

Problems = dict[str, list[Sample]]  # the scored samples of each problem of a benchmark


def summarize(samples: Iterable[Sample], args: EvaluationArguments) -> list[dict[str, Any]]:
    """Compute the metrics of samples, from 0 to 1, for each benchmark and overall. Raises a `ValueError` if no sample
    has a score, or a k is above the number of samples of a problem."""
    benchmarks = by_benchmark(samples)
    names = metric_names(benchmarks.values(), args)
    tables = {name: metrics(problems, names) for name, problems in benchmarks.items()}
    results = [
        {"benchmark": name, **_shares(benchmarks[name]), "metrics": _estimates([table], names, args)}
        for name, table in tables.items()
    ]
    if len(tables) > 1:
        results.append({"benchmark": OVERALL, "metrics": _estimates(list(tables.values()), names, args)})
    return results


def compare(a: Iterable[Sample], b: Iterable[Sample], args: EvaluationArguments) -> list[dict[str, Any]]:
    """Compare two files of samples on the problems that both have: the mean difference B − A for each benchmark and
    overall, with intervals over problems. Raises a `ValueError` if they share no problem or differ in a gold."""
    first, second = by_benchmark(a), by_benchmark(b)
    common = {name: _common_problems(name, first[name], second[name]) for name in first if name in second}
    if not common:
        raise ValueError(f"`compare`: A has {', '.join(first)} and B {', '.join(second)}: no common benchmark.")
    sides = [
        {name: {text: side[name][text] for text in texts} for name, texts in common.items()} for side in (first, second)
    ]
    names = metric_names([problems for side in sides for problems in side.values()], args)
    counts = [[len(own) for problems in side.values() for own in problems.values()] for side in sides]
    if counts[0] != counts[1] and "maj" in names:
        logger.warning("A and B have different numbers of samples: maj, which grows with them, is left out.")
        names.remove("maj")
    tables = {name: [metrics(side[name], names) for side in sides] for name in common}
    results = [{"benchmark": name, **_differences([both], names, args)} for name, both in tables.items()]
    if len(tables) > 1:
        results.append({"benchmark": OVERALL, **_differences(list(tables.values()), names, args)})
    return results


def by_benchmark(samples: Iterable[Sample]) -> dict[str, Problems]:
    """Group scored samples by benchmark and problem. A warning counts those that the verifier could not decide."""
    benchmarks: dict[str, Problems] = defaultdict(lambda: defaultdict(list))
    undecided = 0
    for sample in samples:
        if sample["reward"] is None:
            undecided += 1
        else:
            benchmarks[sample["benchmark"]][sample["problem"]].append(sample)
    if undecided:
        logger.warning(f"The verifier could not decide {undecided} samples. They are left out.")
    if not benchmarks:
        raise ValueError("There is no sample with a score.")
    return benchmarks


def metric_names(benchmarks: Iterable[Problems], args: EvaluationArguments) -> list[str]:
    """Name the metrics: `mean`, and with several samples of each problem `pass@k` and `maj`. By default k goes up to
    the fewest samples of a problem."""
    fewest = min(len(own) for problems in benchmarks for own in problems.values())
    if args.k is not None and max(args.k) > fewest:
        raise ValueError(f"pass@{max(args.k)}: a problem has {fewest} samples. Lower `k`.")
    names = ["mean", *(f"pass@{k}" for k in args.k or default_ks(fewest) if k > 1)]  # pass@1 is the mean
    return [*names, "maj"] if fewest > 1 else names


def metrics(problems: Problems, names: Sequence[str]) -> np.ndarray:
    """Compute metrics `(problems, metrics)`. Each problem is one row: its samples are not independent."""
    return np.array([[_metric(name, own) for name in names] for own in problems.values()])


def _metric(name: str, samples: Sequence[Sample]) -> float:
    rewards = [float(sample["reward"] or 0) for sample in samples]
    if name == "mean":
        return float(np.mean(rewards))
    if name == "maj":
        return majority_score([sample["answer"] for sample in samples], rewards)
    return pass_at_k(len(rewards), rewards.count(1.0), int(name.removeprefix("pass@")))


def _estimates(tables: list[np.ndarray], names: Sequence[str], args: EvaluationArguments) -> dict[str, Any]:
    found = estimate(tables, args.bootstrap_samples, args.seed)
    return {name: asdict(value) for name, value in zip(names, found, strict=True)}


def _differences(
    pairs: Sequence[Sequence[np.ndarray]], names: Sequence[str], args: EvaluationArguments
) -> dict[str, Any]:
    differences = _estimates([b - a for a, b in pairs], names, args)
    means = [np.mean([both[side].mean(axis=0) for both in pairs], axis=0).tolist() for side in (0, 1)]
    rows = zip(names, *means, strict=True)
    return {
        "problems": sum(len(a) for a, _ in pairs),
        "metrics": {name: {"a": a, "b": b, **differences[name]} for name, a, b in rows},
    }


def _common_problems(benchmark: str, first: Problems, second: Problems) -> list[str]:
    texts = [text for text in first if text in second]
    if not texts:
        raise ValueError(f"`compare`: the two have no problem of {benchmark} in common.")
    for text in texts:
        golds = [{sample["gold"] for sample in side[text]} for side in (first, second)]
        if golds[0] != golds[1]:
            raise ValueError(f"`compare`: {text[:80]!r} has the gold answers {golds[0]} in A and {golds[1]} in B.")
    if len(texts) < max(len(first), len(second)):
        logger.warning(f"{benchmark}: compared on the {len(texts)} problems that both have.")
    return texts


def _shares(problems: Problems) -> dict[str, Any]:
    """Count problems and samples, with shares of the samples; `None` if the file does not say."""
    samples = [sample for own in problems.values() for sample in own]
    counts = {len(own) for own in problems.values()}
    return {
        "problems": len(problems),
        "n": [min(counts), max(counts)],  # samples of a problem
        "samples": len(samples),
        "truncated": _mean(sample["truncated"] for sample in samples),
        "no_answer": _mean(sample["answer"] is None for sample in samples),
        "timed_out": _mean(sample.get("decided_by") in ("timeout", "crash") for sample in samples),
        "tokens": _mean(sample["tokens"] for sample in samples),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""From a samples file to `summary.json`, the table and the comparison of two evaluations."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from math_answers.evaluation.arguments import EvaluationArguments
from math_answers.evaluation.output import PROVENANCE
from math_answers.evaluation.problem_scores import ProblemScores, read_scores
from math_answers.evaluation.samples import SAMPLES, write_parquet
from math_answers.evaluation.statistics import CONFIDENCE, default_ks, estimate, paired_difference
from math_answers.whole_files import write_json

logger = logging.getLogger(__name__)

PARQUET, SUMMARY = "samples.parquet", "summary.json"
OVERALL = "overall"  # the mean of the benchmarks, each of the same weight


def summarize(args: EvaluationArguments, provenance: dict[str, Any]) -> dict[str, Any]:
    """Compute the metrics of the samples in the output folder, shares of 1; write `summary.json` and `samples.parquet`.
    `provenance` is what [`generate_samples`] or [`score_file`] returned. Raises a `ValueError` if no sample can be
    scored, or a k is above the number of samples of a problem."""
    folder = Path(args.output or ".")
    by_key = read_scores(folder / SAMPLES)
    for key, scores in by_key.items():
        _check_samples(", ".join(key), scores, args.k)
    by_key = {key: scores for key, scores in by_key.items() if len(scores.table)}
    if not by_key:
        raise ValueError(f"{folder / SAMPLES}: none of the gold answers can be read.")
    results = [_result(key, scores, args, provenance) for key, scores in by_key.items()]
    for model in dict.fromkeys(model for model, _ in by_key):
        of_model = [scores for (name, _), scores in by_key.items() if name == model]
        if len(of_model) > 1:
            results.append({"model": model, "benchmark": OVERALL, **_metrics(of_model, args)})
    summary = {"results": results, "bootstrap": _bootstrap_settings(args), **provenance}
    write_json(folder / SUMMARY, summary)
    write_parquet(folder / SAMPLES, folder / PARQUET)
    return summary


def _bootstrap_settings(args: EvaluationArguments) -> dict[str, Any]:
    return {"samples": args.bootstrap_samples, "seed": args.seed, "confidence": CONFIDENCE, "over": "problems"}


def _check_samples(name: str, scores: ProblemScores, ks: Sequence[int] | None):
    """Warn of samples that are left out or uneven, and refuse a k that is above their number."""
    if scores.unreadable_gold:
        count = f"{scores.unreadable_gold} of {scores.samples}"
        logger.warning(f"{name}: the gold answer of {count} samples cannot be read; they are left out.")
    fewest, most, k = scores.counts.min(), scores.counts.max(), max(ks or [1])
    if k > fewest:
        raise ValueError(f"{name}: pass@{k} needs {k} samples of every problem, and one has {fewest}. Lower `k`.")
    if most > fewest:
        logger.warning(f"{name}: the problems have from {fewest} to {most} samples. The table uses n = {fewest}.")


def _result(
    key: tuple[str, str], scores: ProblemScores, args: EvaluationArguments, provenance: dict[str, Any]
) -> dict[str, Any]:
    differing = int((scores.table["reward"] != scores.table["strict"]).sum())
    share = differing / len(scores.table)
    return {
        "model": key[0],
        "benchmark": key[1],
        **_metrics([scores], args),
        "complete": scores.samples >= _wanted(key[1], provenance),
        "verifier_paths": scores.table["path"].value_counts().to_dict(),
        "unreadable_gold": scores.unreadable_gold,
        "disagreements": {"count": differing, "share": share, "examples": scores.examples},
    }


def _metrics(benchmarks: Sequence[ProblemScores], args: EvaluationArguments) -> dict[str, Any]:
    """Metrics and shares of benchmarks, each of the same weight; `None` for a share that one does not say."""
    fewest = {int(scores.counts.min()) for scores in benchmarks}
    n = fewest.pop() if len(fewest) == 1 else None
    tables = [scores.metrics(args.k or default_ks(n or min(fewest))) for scores in benchmarks]
    values = estimate([table.to_numpy() for table in tables], args.bootstrap_samples, args.seed)
    labels = [name if n is None or "@" in name else f"{name}@{n}" for name in tables[0]]
    shares = pd.DataFrame([scores.shares() for scores in benchmarks]).mean(skipna=False)
    return {
        "problems": sum(map(len, tables)),
        "n": n,
        "samples": sum(scores.samples for scores in benchmarks),
        "metrics": {label: asdict(value) for label, value in zip(labels, values, strict=True)},
        **{name: None if math.isnan(share) else share for name, share in shares.items()},
    }


def _wanted(benchmark: str, provenance: dict[str, Any]) -> int:
    """The number of samples that an evaluation makes of a benchmark; 0 if it is not known."""
    return provenance["benchmarks"].get(benchmark, {}).get("problems", 0) * provenance["settings"].get("n", 0)


# -- Comparison -------------------------------------------------------------------------------------------------------


def compare(args: EvaluationArguments) -> dict[str, Any]:
    """Compare two evaluations, A and B, on the problems that both have: the differences B − A by benchmark and overall,
    as shares of 1. Raises a `FileNotFoundError` for a missing folder or file, and a `ValueError` if there are several
    models to choose from, no common benchmark or problem, or other gold answers."""
    names = list(args.compare or [])
    sides = [_scores_of(name, args) for name in names]
    (first, _), (second, _) = sides
    pairs = [(benchmark, benchmark) for benchmark in first if benchmark in second]
    if not pairs and len(first) == len(second) == 1:  # two files of samples, each named after its file
        pairs = list(zip(first, second, strict=True))
        logger.warning(f"`compare` pairs {pairs[0][0]} of A with {pairs[0][1]} of B: each is the only benchmark there.")
    elif not pairs:
        raise ValueError(
            f"`compare`: {names[0]} and {names[1]} share no benchmark; they have {', '.join(first)} and "
            f"{', '.join(second)}. A file of `samples` without a column `benchmark` is named after its file: add that "
            "column, the same name in both, and score them again."
        )
    elif alone := sorted(first.keys() ^ second.keys()):
        logger.warning(f"`compare` leaves out {', '.join(alone)}: only one of the two evaluations has it.")
    common = {" / ".join(dict.fromkeys(pair)): (first[pair[0]], second[pair[1]]) for pair in pairs}
    problems = {benchmark: _common_problems(benchmark, *both) for benchmark, both in common.items()}
    for index, (name, (side, folder)) in enumerate(zip(names, sides, strict=True)):
        for benchmark in (pair[index] for pair in pairs):
            _check_samples(f"`compare`: {name}, {benchmark}", side[benchmark], args.k)
            _check_finished(name, benchmark, side[benchmark], folder)
    counts = {int(count) for both in common.values() for scores in both for count in scores.counts}
    ks = args.k or default_ks(min(counts))
    tables = {name: [scores.metrics(ks, problems[name]) for scores in both] for name, both in common.items()}
    if len(counts) > 1:
        range_of = f"{min(counts)} to {max(counts)}"
        logger.warning(f"Problems have {range_of} samples: maj, which grows with their number, is left out.")
        tables = {name: [table.drop(columns="maj") for table in both] for name, both in tables.items()}
    results = [_difference(benchmark, [both], args) for benchmark, both in tables.items()]
    if len(common) > 1:
        results.append(_difference(OVERALL, list(tables.values()), args))
    comparison = {"a": names[0], "b": names[1], "difference": "B - A", "results": results}
    return comparison | {"bootstrap": _bootstrap_settings(args)}


def _difference(benchmark: str, tables: list[list[pd.DataFrame]], args: EvaluationArguments) -> dict[str, Any]:
    """B − A over benchmarks of the same weight, from a table of metrics for A and one for B of each."""
    a, b = ([both[side].to_numpy() for both in tables] for side in (0, 1))
    differences = paired_difference(a, b, args.bootstrap_samples, args.seed)
    means = (np.mean([values.mean(axis=0) for values in side], axis=0).tolist() for side in (a, b))
    rows = zip(tables[0][0], *means, differences, strict=True)
    metrics = {name: {"a": of_a, "b": of_b, **asdict(difference)} for name, of_a, of_b, difference in rows}
    return {"benchmark": benchmark, "problems": sum(map(len, a)), "metrics": metrics}


def _scores_of(name: str, args: EvaluationArguments) -> tuple[dict[str, ProblemScores], Path]:
    """The scores of one side by benchmark, and their folder. The side is a folder, a file, or a model in `output`."""
    path = Path(name).expanduser()
    file = path / SAMPLES if path.is_dir() else path
    is_model = not file.is_file()
    if is_model:
        file = Path(args.output or ".") / SAMPLES
        if not file.is_file():
            raise FileNotFoundError(f"`compare`: {name} is neither a {SAMPLES} nor its folder, and `output` has none.")
    by_key = read_scores(file)
    models = dict.fromkeys(model for model, _ in by_key)
    chosen = [model for model in models if not is_model or model == name.rstrip("/")]
    if len(chosen) != 1:
        raise ValueError(
            f"`compare`: {name} does not name one model: {file} holds samples of {', '.join(models) or 'none'}. Name "
            "two of them, with their folder as `output`."
        )
    return {benchmark: scores for (model, benchmark), scores in by_key.items() if model == chosen[0]}, file.parent


def _check_finished(name: str, benchmark: str, scores: ProblemScores, folder: Path):
    """Warn if one side lacks samples: the longest problems come first, so they are not a fair sample."""
    file = folder / PROVENANCE
    wanted = _wanted(benchmark, json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else 0
    if scores.samples < wanted:
        found = f"{scores.samples} of {wanted} samples of {benchmark}"
        logger.warning(f"`compare`: {name} has {found}, all from the longest problems. Finish it first.")


def _common_problems(benchmark: str, first: ProblemScores, second: ProblemScores) -> list[str]:
    golds = pd.concat([first.problems["gold"], second.problems["gold"]], axis=1, join="inner", keys=["a", "b"])
    if golds.empty:
        raise ValueError(f"`compare`: the two have no problem of {benchmark} in common.")
    for problem, a, b in golds[golds["a"] != golds["b"]].itertuples():
        raise ValueError(f"`compare`: {benchmark}, problem {problem} has the gold answers {a!r} in A and {b!r} in B.")
    if len(golds) < max(len(first.problems), len(second.problems)):
        logger.warning(f"{benchmark}: compared on the {len(golds)} problems that both have.")
    return list(golds.index)

"""From a samples file to `summary.json`, the table and the comparison of two evaluations."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from troll_trl.evaluation.arguments import EvaluationArguments
from troll_trl.evaluation.problem_scores import ProblemScores, read_scores
from troll_trl.evaluation.provenance import PROVENANCE
from troll_trl.evaluation.samples import SAMPLES, write_json, write_parquet
from troll_trl.evaluation.statistics import CONFIDENCE, default_ks, estimate, paired_difference

logger = logging.getLogger(__name__)

PARQUET, SUMMARY = "samples.parquet", "summary.json"
OVERALL = "overall"  # the mean of the benchmarks, each of the same weight


def summarize(args: EvaluationArguments, provenance: dict[str, Any]) -> dict[str, Any]:
    """
    Compute the metrics of the samples in the output folder, shares of 1; write `summary.json` and `samples.parquet`.
    `provenance` is what [`generate_samples`] or [`score_file`] returned. Raises a `ValueError` if no sample can be
    scored, or a k is above the number of samples of a problem.
    """
    folder = Path(args.output or ".")
    by_key = read_scores(folder / SAMPLES)
    for key, scores in by_key.items():
        _check_samples(", ".join(key), scores, args.k)
    by_key = {key: scores for key, scores in by_key.items() if scores.rewards}
    if not by_key:
        raise ValueError(f"{folder / SAMPLES}: none of the gold answers can be read.")
    results = [_result(key, scores, args, provenance) for key, scores in by_key.items()]
    for model in dict.fromkeys(model for model, _ in by_key):
        of_model = [scores for (name, _), scores in by_key.items() if name == model]
        if len(of_model) > 1:
            results.append(_overall(model, of_model, args))
    summary = {"results": results, "bootstrap": _bootstrap_settings(args), **provenance}
    write_json(folder / SUMMARY, summary)
    write_parquet(folder / SAMPLES, folder / PARQUET)
    return summary


def _bootstrap_settings(args: EvaluationArguments) -> dict[str, Any]:
    return {"samples": args.bootstrap_samples, "seed": args.seed, "confidence": CONFIDENCE, "over": "problems"}


def _check_samples(name: str, scores: ProblemScores, ks: Sequence[int] | None):
    """Say which samples are left out or uneven, and refuse a k that is above their number."""
    if unreadable := scores.counts["unreadable_gold"]:
        logger.warning(
            f"{name}: the gold answer of {unreadable} of {scores.counts['samples']} samples cannot be read; they are "
            "left out."
        )
    if not scores.rewards:
        return
    _check_k(ks, scores, name)
    fewest, most = scores.samples_per_problem, max(map(len, scores.rewards.values()))
    if most > fewest:
        logger.warning(
            f"{name}: the problems have from {fewest} to {most} samples. All are taken; n is the fewest, and maj@n of "
            "a problem is over its own samples."
        )


def _check_k(ks: Sequence[int] | None, scores: ProblemScores, name: str):
    if ks is not None and max(ks) > scores.samples_per_problem:
        raise ValueError(
            f"{name}: pass@{max(ks)} needs at least {max(ks)} samples of every problem, and one has "
            f"{scores.samples_per_problem}. Lower `k`."
        )


def _result(
    key: tuple[str, str], scores: ProblemScores, args: EvaluationArguments, provenance: dict[str, Any]
) -> dict[str, Any]:
    model, benchmark = key
    columns = scores.metrics(args.k)
    values = estimate([np.stack(list(columns.values()), axis=1)], args.bootstrap_samples, args.seed)
    n, counts = scores.samples_per_problem, scores.counts
    return {
        "model": model,
        "benchmark": benchmark,
        "problems": len(scores.rewards),
        "n": n,
        "samples": counts["samples"],
        "complete": counts["samples"] >= _wanted(benchmark, provenance),
        "metrics": {_label(name, n): asdict(value) for name, value in zip(columns, values, strict=True)},
        **_shares(scores),
        "verifier_paths": scores.paths,
        "unreadable_gold": counts["unreadable_gold"],
        "disagreements": {
            "count": counts["disagreements"],
            "share": counts["disagreements"] / counts["scored"],
            "examples": scores.examples,
        },
    }


def _wanted(benchmark: str, provenance: dict[str, Any]) -> int:
    """Samples of a benchmark that an evaluation is to end with; 0 where that is not known."""
    return provenance["benchmarks"].get(benchmark, {}).get("problems", 0) * provenance["settings"].get("n", 0)


def _shares(scores: ProblemScores) -> dict[str, float | None]:
    return {
        "truncated": scores.share("truncated", per="with_truncated"),
        "no_answer": scores.share_of_paths("no_answer"),
        "unparsable": scores.share_of_paths("unreadable_answer", "refused"),
        "timed_out": scores.share_of_paths("timeout", "crash"),
        "mean_tokens": scores.share("tokens", per="with_tokens"),
    }


def _mean_shares(benchmarks: Sequence[ProblemScores]) -> dict[str, float | None]:
    """Those of the benchmarks, each of the same weight; `None` where one does not say."""
    means = {}
    for name in _shares(benchmarks[0]):
        known = [share for share in (_shares(scores)[name] for scores in benchmarks) if share is not None]
        means[name] = sum(known) / len(known) if len(known) == len(benchmarks) else None
    return means


def _overall(model: str, benchmarks: Sequence[ProblemScores], args: EvaluationArguments) -> dict[str, Any]:
    samples = {scores.samples_per_problem for scores in benchmarks}
    columns = [scores.metrics(args.k or default_ks(min(samples))) for scores in benchmarks]
    groups = [np.stack(list(of_benchmark.values()), axis=1) for of_benchmark in columns]
    values = estimate(groups, args.bootstrap_samples, args.seed)
    n = samples.pop() if len(samples) == 1 else None
    return {
        "model": model,
        "benchmark": OVERALL,
        "problems": sum(len(scores.rewards) for scores in benchmarks),
        "n": n,
        "samples": sum(scores.counts["samples"] for scores in benchmarks),
        "metrics": {_label(name, n): asdict(value) for name, value in zip(columns[0], values, strict=True)},
        **_mean_shares(benchmarks),
    }


def _label(metric: str, n: int | None) -> str:
    return metric if n is None or "@" in metric else f"{metric}@{n}"


# -- Comparison -------------------------------------------------------------------------------------------------------


def compare(args: EvaluationArguments) -> dict[str, Any]:
    """
    Compare two evaluations, A and B, on the problems that both have: the differences B − A by benchmark, and overall,
    as shares of 1. Raises a `FileNotFoundError` for a missing folder or file, and a `ValueError` if there are several
    models to choose from, no common benchmark or problem, or other gold answers.
    """
    names = list(args.compare or [])
    (first, folder_a), (second, folder_b) = (_scores_of(name, args) for name in names)
    common = [benchmark for benchmark in first if benchmark in second]
    if not common:
        raise ValueError(
            f"`compare`: {names[0]} ({', '.join(first)}) and {names[1]} ({', '.join(second)}) share no benchmark."
        )
    for benchmark in sorted({*first, *second} - set(common)):
        logger.warning(f"{benchmark} is only in one of the two, and left out.")
    problems = {benchmark: _common_problems(benchmark, first[benchmark], second[benchmark]) for benchmark in common}
    for name, side, folder in zip(names, (first, second), (folder_a, folder_b), strict=True):
        of_common = {benchmark: side[benchmark] for benchmark in common}
        for benchmark, scores in of_common.items():
            _check_samples(f"`compare`: {name}, {benchmark}", scores, args.k)
        _check_finished(name, of_common, folder)
    all_scores = [side[benchmark] for side in (first, second) for benchmark in common]
    counts = {len(samples) for scores in all_scores for samples in scores.rewards.values()}
    ks = args.k or default_ks(min(counts))
    groups_a, groups_b = (
        [side[benchmark].metrics(ks, problems[benchmark]) for benchmark in common] for side in (first, second)
    )
    if len(counts) > 1:
        logger.warning("The numbers of samples differ: maj, which grows with them, is left out.")
    metrics = [name for name in groups_a[0] if name != "maj" or len(counts) == 1]
    rows = {benchmark: ([a], [b]) for benchmark, a, b in zip(common, groups_a, groups_b, strict=True)}
    if len(common) > 1:
        rows[OVERALL] = (groups_a, groups_b)
    results = [
        {
            "benchmark": benchmark,
            "problems": sum(len(group["mean"]) for group in a),
            "metrics": _differences(a, b, metrics, args),
        }
        for benchmark, (a, b) in rows.items()
    ]
    comparison = {"a": names[0], "b": names[1], "difference": "B - A", "results": results}
    return comparison | {"bootstrap": _bootstrap_settings(args)}


def _differences(
    a: Sequence[dict[str, np.ndarray]],
    b: Sequence[dict[str, np.ndarray]],
    metrics: list[str],
    args: EvaluationArguments,
) -> dict[str, dict[str, float]]:
    stacked_a, stacked_b = (
        [np.stack([of_benchmark[name] for name in metrics], axis=1) for of_benchmark in side] for side in (a, b)
    )
    differences = paired_difference(stacked_a, stacked_b, args.bootstrap_samples, args.seed)
    means_a, means_b = (np.mean([group.mean(axis=0) for group in side], axis=0) for side in (stacked_a, stacked_b))
    return {
        name: {"a": float(means_a[i]), "b": float(means_b[i]), **asdict(differences[i])}
        for i, name in enumerate(metrics)
    }


def check_compared(args: EvaluationArguments):
    """Before anything is generated: that A and B are there, or to be made by this evaluation. Raises as [`compare`]."""
    own = Path(args.output or ".").resolve()
    for name in args.compare or []:
        if name.rstrip("/") not in args.model and Path(name).expanduser().resolve() not in (own, own / SAMPLES):
            _scores_of(name, args)


def _scores_of(name: str, args: EvaluationArguments) -> tuple[dict[str, ProblemScores], Path]:
    """The scores of one side by benchmark, and their folder: of a folder or a file, or of a model in `output`."""
    path = Path(name).expanduser()
    file = path / SAMPLES if path.is_dir() else path
    if file.is_file() and file.suffix == ".jsonl":
        by_key = read_scores(file)
        models = list(dict.fromkeys(model for model, _ in by_key))
        if len(models) != 1:
            raise ValueError(
                f"`compare`: {file} holds samples of {len(models)} models ({', '.join(models) or 'none'}). Compare two "
                "of them by their names, with their folder as `output`."
            )
        return {benchmark: scores for (_, benchmark), scores in by_key.items()}, file.parent
    folder = Path(args.output or ".")
    own = folder / SAMPLES
    by_key = read_scores(own) if args.output is not None and own.is_file() else {}
    of_model = {benchmark: scores for (model, benchmark), scores in by_key.items() if model == name.rstrip("/")}
    if not of_model:
        known_models = ", ".join(dict.fromkeys(model for model, _ in by_key))
        known = f"and `output` has the models {known_models}" if by_key else "and `output` names no evaluation"
        raise FileNotFoundError(
            f"`compare`: {name} is no folder with a {SAMPLES}, no such file ending in .jsonl, {known}."
        )
    return of_model, folder


def _check_finished(name: str, side: dict[str, ProblemScores], folder: Path):
    """Say which samples one side still lacks: the problems that it has are then no sample of all, but the longest."""
    file = folder / PROVENANCE
    if not file.is_file():
        return
    provenance = json.loads(file.read_text(encoding="utf-8"))
    for benchmark, scores in side.items():
        if scores.counts["samples"] < (wanted := _wanted(benchmark, provenance)):
            logger.warning(
                f"`compare`: {name} has {scores.counts['samples']} of {wanted} samples of {benchmark}, those of the "
                "longest problems. Finish it by the command that began it before you trust a difference."
            )


def _common_problems(benchmark: str, first: ProblemScores, second: ProblemScores) -> list[str]:
    common = [problem for problem in first.rewards if problem in second.rewards]
    if not common:
        raise ValueError(f"`compare`: the two have no problem of {benchmark} in common.")
    other = next((problem for problem in common if first.golds[problem] != second.golds[problem]), None)
    if other is not None:
        raise ValueError(
            f"`compare`: {benchmark}, problem {other} has the gold answer {first.golds[other]!r} in the one and "
            f"{second.golds[other]!r} in the other. They are not the same problems."
        )
    if len(common) < max(len(first.rewards), len(second.rewards)):
        logger.warning(f"{benchmark}: compared on the {len(common)} problems that both have.")
    return common

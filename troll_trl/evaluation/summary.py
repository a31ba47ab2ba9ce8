"""From a samples file to `summary.json`, the table and the comparison of two evaluations."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from troll_trl.evaluation.arguments import EvaluationArguments
from troll_trl.evaluation.samples import SAMPLES, Report, write_parquet, write_text
from troll_trl.evaluation.statistics import Difference, default_ks, estimate, paired_difference
from troll_trl.evaluation.tally import Tally, read_tallies

PARQUET, SUMMARY = "samples.parquet", "summary.json"
OVERALL = "overall"  # the mean of the benchmarks, each of the same weight


def summarize(args: EvaluationArguments, record: dict[str, Any], report: Report) -> dict[str, Any]:
    """
    Compute the metrics of the samples in the output folder; write `summary.json` and `samples.parquet`.

    Args:
        args ([`EvaluationArguments`]):
            Settings.
        record (`dict[str, Any]`):
            What the samples were made with.
        report (`Callable[[str], None]`):
            Told what a user should know.

    Returns:
        `dict[str, Any]`: the summary.

    Raises:
        ValueError: no sample can be scored, or a k is above the number of samples of a problem.
    """
    folder = Path(args.output or ".")
    tallies = read_tallies(folder / SAMPLES, report)
    for (model, benchmark), tally in tallies.items():
        if tally.counts.get("unreadable_gold"):
            report(
                f"{model}, {benchmark}: the gold answer of {tally.counts['unreadable_gold']} of "
                f"{tally.counts['samples']} samples cannot be read; they are left out."
            )
    tallies = {key: tally for key, tally in tallies.items() if tally.rewards}
    if not tallies:
        raise ValueError(f"{folder / SAMPLES}: none of the gold answers can be read.")
    for (model, benchmark), tally in tallies.items():
        _check_k(args.k, tally, f"{model}, {benchmark}")
        most = max(map(len, tally.rewards.values()))
        if most > tally.samples_per_problem:
            report(
                f"{model}, {benchmark}: the problems have from {tally.samples_per_problem} to {most} samples. All are "
                "taken; n is the fewest, and maj@n of a problem is over its own samples."
            )
    results = [_result(key, tally, args, record) for key, tally in tallies.items()]
    for model in dict.fromkeys(model for model, _ in tallies):
        of_model = [tally for (name, _), tally in tallies.items() if name == model]
        if len(of_model) > 1:
            results.append(_overall(model, of_model, args))
    summary = {
        "results": results,
        "bootstrap": {"samples": args.bootstrap_samples, "seed": args.seed, "confidence": 0.95, "over": "problems"},
        **record,
    }
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_parquet(folder / SAMPLES, folder / PARQUET, report)
    return summary


def _check_k(ks: Sequence[int] | None, tally: Tally, what: str):
    if ks is not None and max(ks) > tally.samples_per_problem:
        raise ValueError(
            f"{what}: pass@{max(ks)} needs at least {max(ks)} samples of every problem, and one has "
            f"{tally.samples_per_problem}. Lower `k`."
        )


def _result(key: tuple[str, str], tally: Tally, args: EvaluationArguments, record: dict[str, Any]) -> dict[str, Any]:
    model, benchmark = key
    columns = tally.metrics(args.k)
    values = estimate([np.stack(list(columns.values()), axis=1)], args.bootstrap_samples, args.seed)
    n = tally.samples_per_problem
    wanted = record["benchmarks"].get(benchmark, {}).get("problems", 0) * record["settings"].get("n", 0)
    disagreements = tally.counts.get("disagreements", 0)
    return {
        "model": model,
        "benchmark": benchmark,
        "problems": len(tally.rewards),
        "n": n,
        "samples": tally.counts["samples"],
        "complete": tally.counts["samples"] >= wanted,
        "metrics": {_label(name, n): asdict(value) for name, value in zip(columns, values, strict=True)},
        **_shares(tally),
        "verifier_paths": tally.paths,
        "unreadable_gold": tally.counts.get("unreadable_gold", 0),
        "disagreements": {
            "count": disagreements,
            "share": disagreements / tally.counts["scored"],
            "examples": tally.examples,
        },
    }


def _shares(tally: Tally) -> dict[str, float | None]:
    return {
        "truncated": tally.share("truncated", of="with_truncated"),
        "no_answer": tally.share_of_paths("no_answer"),
        "unparsable": tally.share_of_paths("unreadable_answer", "refused"),
        "timed_out": tally.share_of_paths("timeout", "crash"),
        "mean_tokens": tally.share("tokens", of="with_tokens"),
    }


def _mean_shares(tallies: Sequence[Tally]) -> dict[str, float | None]:
    """Those of the benchmarks, each of the same weight; `None` where one does not say."""
    means = {}
    for name in _shares(tallies[0]):
        known = [share for share in (_shares(tally)[name] for tally in tallies) if share is not None]
        means[name] = sum(known) / len(known) if len(known) == len(tallies) else None
    return means


def _overall(model: str, tallies: Sequence[Tally], args: EvaluationArguments) -> dict[str, Any]:
    samples = {tally.samples_per_problem for tally in tallies}
    ks = args.k or default_ks(min(samples))
    columns = [tally.metrics(ks) for tally in tallies]
    groups = [np.stack(list(of_benchmark.values()), axis=1) for of_benchmark in columns]
    values = estimate(groups, args.bootstrap_samples, args.seed)
    n = samples.pop() if len(samples) == 1 else None
    return {
        "model": model,
        "benchmark": OVERALL,
        "problems": sum(len(tally.rewards) for tally in tallies),
        "n": n,
        "samples": sum(tally.counts["samples"] for tally in tallies),
        "metrics": {_label(name, n): asdict(value) for name, value in zip(columns[0], values, strict=True)},
        **_mean_shares(tallies),
    }


def _label(metric: str, n: int | None) -> str:
    return metric if n is None or "@" in metric else f"{metric}@{n}"


def compare(args: EvaluationArguments, report: Report) -> dict[str, Any]:
    """
    Compare two evaluations on the problems that both have.

    Args:
        args ([`EvaluationArguments`]):
            Settings; `compare` names A and B.
        report (`Callable[[str], None]`):
            Told what a user should know.

    Returns:
        `dict[str, Any]`: the differences B − A by benchmark, and overall.

    Raises:
        FileNotFoundError: a folder or file is not there.
        ValueError: there are several models to choose from, no common benchmark or problem, or other gold answers.
    """
    names = list(args.compare or [])
    first, second = (_evaluation(name, args, report) for name in names)
    common = [benchmark for benchmark in first if benchmark in second]
    if not common:
        raise ValueError(
            f"`compare`: {names[0]} ({', '.join(first)}) and {names[1]} ({', '.join(second)}) share no benchmark."
        )
    for benchmark in sorted({*first, *second} - set(common)):
        report(f"{benchmark} is only in one of the two, and left out.")
    problems = {
        benchmark: _common_problems(benchmark, first[benchmark], second[benchmark], report) for benchmark in common
    }
    tallies = [tally for side in (first, second) for tally in (side[benchmark] for benchmark in common)]
    for tally in tallies:
        _check_k(args.k, tally, "`compare`")
    counts = {tally.samples_per_problem for tally in tallies}
    ks = args.k or default_ks(min(counts))
    groups_a, groups_b = (
        [side[benchmark].metrics(ks, problems[benchmark]) for benchmark in common] for side in (first, second)
    )
    if len(counts) > 1:
        report("The numbers of samples differ: maj, which grows with them, is left out.")
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
    return {"a": names[0], "b": names[1], "difference": "B - A", "results": results}


def _differences(
    a: Sequence[dict[str, np.ndarray]],
    b: Sequence[dict[str, np.ndarray]],
    metrics: list[str],
    args: EvaluationArguments,
) -> dict[str, dict[str, float]]:
    stacked_a, stacked_b = (
        [np.stack([of_benchmark[name] for name in metrics], axis=1) for of_benchmark in side] for side in (a, b)
    )
    differences: list[Difference] = paired_difference(stacked_a, stacked_b, args.bootstrap_samples, args.seed)
    means_a, means_b = (np.mean([group.mean(axis=0) for group in side], axis=0) for side in (stacked_a, stacked_b))
    return {
        name: {"a": float(means_a[i]), "b": float(means_b[i]), **asdict(differences[i])}
        for i, name in enumerate(metrics)
    }


def _evaluation(name: str, args: EvaluationArguments, report: Report) -> dict[str, Tally]:
    """The tallies of one side by benchmark: of a folder or a file, or of a model in `output`."""
    path = Path(name).expanduser()
    file = path / SAMPLES if path.is_dir() else path
    if file.is_file() and file.suffix == ".jsonl":
        tallies = read_tallies(file, report)
        models = list(dict.fromkeys(model for model, _ in tallies))
        if len(models) != 1:
            raise ValueError(
                f"`compare`: {file} holds samples of {len(models)} models ({', '.join(models) or 'none'}). Compare two "
                "of them by their names, with their folder as `output`."
            )
        return {benchmark: tally for (_, benchmark), tally in tallies.items()}
    own = Path(args.output) / SAMPLES if args.output is not None else None
    tallies = read_tallies(own, report) if own is not None and own.is_file() else {}
    of_model = {benchmark: tally for (model, benchmark), tally in tallies.items() if model == name.rstrip("/")}
    if not of_model:
        known_models = ", ".join(dict.fromkeys(model for model, _ in tallies))
        known = f"and `output` has the models {known_models}" if tallies else "and `output` names no evaluation"
        raise FileNotFoundError(
            f"`compare`: {name} is no folder with a {SAMPLES}, no such file ending in .jsonl, {known}."
        )
    return of_model


def _common_problems(benchmark: str, first: Tally, second: Tally, report: Report) -> list[str]:
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
        report(f"{benchmark}: compared on the {len(common)} problems that both have.")
    return common

"""evaluate(): generates or scores samples, writes their summary and table, or compares two evaluations."""

import json
import logging
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from troll_trl.data import load_math_dataset
from troll_trl.evaluation.arguments import EvaluationArguments
from troll_trl.evaluation.problems import problem_text
from troll_trl.evaluation.samples import (
    SAMPLES,
    SUMMARY,
    Sample,
    append,
    begin,
    check_output,
    read_finished,
    read_samples,
)
from troll_trl.evaluation.scoring import score
from troll_trl.evaluation.summary import compare, summarize
from troll_trl.evaluation.tables import comparison_table, markdown, notes, plain, results_table
from troll_trl.evaluation.whole_files import write_json, write_text

logger = logging.getLogger(__name__)

TABLE, COMPARISON = "table.md", "comparison.json"


def evaluate(args: EvaluationArguments) -> dict[str, Any]:
    """
    Evaluate a model, score a file of samples, or compare two evaluations.

    Prints a table, and writes `samples.jsonl`, `summary.json` and `table.md` into `output`. A second call adds the
    samples that a stopped one has not made. Returns what `summary.json`, or for a comparison `comparison.json`, holds.
    Raises an `OSError` or a `ValueError` for what a user can correct.
    """
    if args.compare is not None:
        return _compare(args)
    folder = Path(str(args.output))
    check_output(folder)
    if args.samples is not None:
        settings: dict[str, Any] = {"samples": str(Path(args.samples).resolve())}
        samples = _score_file(args, folder, settings)
    else:
        from troll_trl.evaluation.generation import generate_samples  # imports torch

        settings, samples = generate_samples(args, folder)
    results = summarize(samples, args)
    summary = {
        "settings": settings,
        "bootstrap": {"resamples": args.bootstrap_samples, "seed": args.seed, "over": "problems"},
        "results": results,
    }
    write_json(folder / SUMMARY, summary)
    header, rows = results_table(results)
    print(f"95 % bootstrap intervals over problems\n\n{plain(header, rows)}\n", *notes(results), sep="\n")
    write_text(folder / TABLE, "\n".join([markdown(header, rows), *(f"\n{note}" for note in notes(results))]) + "\n")
    print(f"Written to {folder}: {SAMPLES}, {SUMMARY}, {TABLE}")
    return summary


def _score_file(args: EvaluationArguments, folder: Path, settings: dict[str, Any]) -> list[Sample]:
    """Score the column `completion`, a text or a list of texts, of a file of problems."""
    path = Path(str(args.samples)).expanduser()
    if path.resolve() == (folder / SAMPLES).resolve():
        raise ValueError(f"`samples`: {path} would be overwritten. Give another `output`.")
    read_finished(folder, settings, args.overwrite)  # refuses a folder with other samples
    rows = load_math_dataset(path, problem_column=args.problem_column, answer_column=args.answer_column)
    if "completion" not in rows.column_names:
        raise ValueError(f"`samples`: {path} has the columns {', '.join(rows.column_names)}, and no `completion`.")
    if "model" in rows.column_names and len(models := rows.unique("model")) > 1:
        raise ValueError(f"`samples`: {path} has completions of {', '.join(map(str, models))}. Give a file for each.")
    counts: dict[str, Counter[str]] = defaultdict(Counter)  # samples of each problem of a benchmark
    samples = []
    for row in rows:
        completions = [row["completion"]] if isinstance(row["completion"], str) else row["completion"] or []
        name, text = str(row.get("benchmark") or path.stem), problem_text(row["prompt"])
        if text not in counts[name] and len(counts[name]) == args.max_problems:
            continue
        for completion in completions:
            sample = Sample(
                benchmark=name,
                problem=text,
                sample=counts[name][text],
                gold=row["solution"],
                completion=completion,
                tokens=row.get("tokens") if isinstance(row.get("tokens"), int) else None,
                truncated=row.get("truncated") if isinstance(row.get("truncated"), bool) else None,
            )
            counts[name][text] += 1
            samples.append(sample)
    score(samples)
    begin(folder, settings, overwrite=True)
    append(folder, samples)
    return samples


def _compare(args: EvaluationArguments) -> dict[str, Any]:
    names = list(args.compare or ())
    files = [path / SAMPLES if (path := Path(name).expanduser()).is_dir() else path for name in names]
    for file in files:
        summary = file.with_name(SUMMARY)
        if summary.is_file() and "results" not in json.loads(summary.read_text(encoding="utf-8")):
            logger.warning(f"{file.parent} is not finished and has only the longest problems. Run it again.")
    results = compare(read_samples(files[0]), read_samples(files[1]), args)
    header, rows = comparison_table(results)
    print(f"A = {names[0]}, B = {names[1]}; 95 % bootstrap intervals over problems, paired\n\n{plain(header, rows)}\n")
    print(*notes(results), sep="\n")
    comparison = {"a": names[0], "b": names[1], "difference": "B - A", "results": results}
    if args.output is not None:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_json(Path(args.output, COMPARISON), comparison)
    return comparison

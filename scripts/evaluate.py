"""
Evaluate models on math benchmarks, score a file of samples, or compare two evaluations.

    python scripts/evaluate.py --config configs/eval/paper.yaml --model outputs/run --output outputs/eval
    python scripts/evaluate.py --model A B --benchmarks gsm8k mine=problems.jsonl --n 8 --temperature 0.6 --output DIR
    python scripts/evaluate.py --samples samples.jsonl --output DIR
    python scripts/evaluate.py --compare DIR_A DIR_B
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import datasets
import torch
from rich.console import Console

from troll_trl.evaluation import (
    EvaluationArguments,
    compare,
    generate_samples,
    parse_evaluation_args,
    score_file,
    summarize,
)
from troll_trl.evaluation.samples import write_text
from troll_trl.evaluation.tables import comparison_table, markdown, notes, results_table, show, show_disagreements


def print_error(text: str):
    print(text, file=sys.stderr, flush=True)


def show_messages():
    """What the evaluation logs for its user goes to stderr."""
    handler = logging.StreamHandler()
    logger = logging.getLogger("troll_trl.evaluation")
    logger.handlers, logger.level = [handler], logging.INFO


def evaluate(args: EvaluationArguments, console: Console):
    provenance = score_file(args) if args.samples is not None else generate_samples(args)
    summary = summarize(args, provenance)
    header, rows = results_table(summary)
    show(console, "Results, 95 % bootstrap intervals over problems", header, rows)
    below = notes(summary)
    for note in below:
        console.print(note, highlight=False, markup=False)
    show_disagreements(console, summary)
    write_text(Path(args.output, "table.md"), "\n".join([markdown(header, rows), *below]).rstrip() + "\n")
    written = f"Written: {args.output}/summary.json, samples.jsonl, samples.parquet, table.md"
    console.print(written, highlight=False, markup=False)


def compare_two(args: EvaluationArguments, console: Console):
    comparison = compare(args)
    header, rows = comparison_table(comparison)
    show(console, f"A = {comparison['a']}, B = {comparison['b']}; paired bootstrap", header, rows, keys=3)
    if args.output is not None:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_text(Path(args.output, "comparison.json"), json.dumps(comparison, indent=2, ensure_ascii=False) + "\n")
        write_text(Path(args.output, "comparison.md"), markdown(header, rows))


def main():
    args = parse_evaluation_args()
    # On a file or a pipe a table may be as wide as it needs
    console = Console() if sys.stdout.isatty() else Console(width=240)
    datasets.disable_progress_bars()  # the samples have one
    show_messages()
    warnings.showwarning = lambda message, *_: print_error(f"warning: {message}")
    try:
        if args.model or args.samples is not None:
            evaluate(args, console)
        if args.compare is not None:
            compare_two(args, console)
    except (ValueError, OSError, ImportError) as error:  # what a user can set right, without a traceback
        print_error(f"evaluate.py: error: {error}")
        raise SystemExit(2) from None
    except torch.OutOfMemoryError as error:
        print_error(f"evaluate.py: error: out of memory with these batches; lower `batch_size` and run again. {error}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print_error("Stopped. The same command continues where it was.")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""
Evaluate models on math benchmarks, score a file of samples, or compare two evaluations.

    troll eval --config eval/paper --model outputs/run --output outputs/eval
    troll eval --model A B --benchmarks gsm8k mine=problems.jsonl --n 8 --temperature 0.6 --output DIR
    troll eval --samples samples.jsonl --output DIR
    troll eval --compare DIR_A DIR_B
"""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from math_answers.evaluation.arguments import EvaluationArguments
from math_answers.printable import PrintableFormatter, printable
from math_answers.whole_files import write_json, write_text
from troll_trl.cli.command_line import OptionParser, read_command, stop


def print_error(text: str):
    print(printable(text), file=sys.stderr, flush=True)


def parse_evaluation_args(argv: Sequence[str] | None = None, program: str = "evaluate.py") -> EvaluationArguments:
    """Read and check the arguments of a command line, and of the YAML file that its `--config` names. Ends with code 2
    and one message that names the mistake."""
    values, _, flags = read_command(argv, program)
    try:
        return EvaluationArguments(**OptionParser((EvaluationArguments,), program).read(values, flags))
    except ValueError as error:
        stop(program, error)


def evaluate(args: EvaluationArguments):
    from math_answers.evaluation import generate_samples, score_file, summarize
    from math_answers.evaluation.tables import disagreements, markdown, notes, plain, results_table

    provenance = score_file(args) if args.samples is not None else generate_samples(args)
    summary = summarize(args, provenance)
    header, rows = results_table(summary)
    below = notes(summary)
    print(f"Results, 95 % bootstrap intervals over problems\n\n{plain(header, rows)}\n")
    print(*below, *disagreements(summary), sep="\n")
    write_text(Path(str(args.output), "table.md"), "\n".join([markdown(header, rows) + "\n", *below]).rstrip() + "\n")
    print(f"Written: {args.output}/summary.json, samples.jsonl, samples.parquet, table.md")


def compare_two(args: EvaluationArguments):
    from math_answers.evaluation import compare
    from math_answers.evaluation.tables import comparison_table, markdown, plain

    comparison = compare(args)
    header, rows = comparison_table(comparison)
    names = printable(f"A = {comparison['a']}, B = {comparison['b']}")
    print(f"{names}; paired bootstrap\n\n{plain(header, rows, keys=3)}")
    if args.output is not None:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_json(Path(args.output, "comparison.json"), comparison)
        write_text(Path(args.output, "comparison.md"), markdown(header, rows) + "\n")


def main(argv: Sequence[str] | None = None, program: str = "evaluate.py") -> None:
    """Evaluate, in this process. Ends with code 2 and one message for a mistake of the user; with 130 when
    interrupted."""
    args = parse_evaluation_args(argv, program)
    import datasets
    import torch

    datasets.disable_progress_bars()  # the samples have one
    logger = logging.getLogger("math_answers.evaluation")
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(PrintableFormatter())
    logger.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *_: print_error(f"warning: {message}")
    again = "The same command" + (" without `overwrite`" if args.overwrite else "")  # `overwrite` would discard samples
    try:
        if args.model or args.samples is not None:
            evaluate(args)
        if args.compare is not None:
            compare_two(args)
    except (ValueError, OSError, ImportError) as error:  # a user can set these right without a traceback
        stop(program, printable(str(error)))
    except torch.OutOfMemoryError as error:
        stop(program, f"out of memory. {again} and a lower `batch_size` continues. {error}")
    except KeyboardInterrupt:
        print_error(f"Stopped. {again} continues where it was.")
        raise SystemExit(130) from None

"""
Evaluate models on math benchmarks, score a file of samples, or compare two evaluations.

    troll eval --config eval/paper --model outputs/run --output outputs/eval
    troll eval --model A B --benchmarks gsm8k mine=problems.jsonl --n 8 --temperature 0.6 --output DIR
    troll eval --samples samples.jsonl --output DIR
    troll eval --compare DIR_A DIR_B
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from troll_trl.cli.settings.command import Command, read_command, refuse_unknown_names, set_environment, show_help, stop
from troll_trl.cli.settings.names import declared_names

if TYPE_CHECKING:
    from rich.console import Console

    from troll_trl.evaluation import EvaluationArguments


def print_error(text: str):
    print(text, file=sys.stderr, flush=True)


def show_messages():
    """What the evaluation logs for its user goes to stderr."""
    logger = logging.getLogger("troll_trl.evaluation")
    logger.handlers, logger.level = [logging.StreamHandler()], logging.INFO


def read_evaluation_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """A command line and its files, with names checked before torch is imported."""
    command = read_command(argv, program)
    show_help(command, "eval", "--config eval/paper --model outputs/run --output outputs/eval")
    set_environment(command)
    if names := declared_names("eval"):
        refuse_unknown_names(command, names)
    return command


def parse_evaluation_command(command: Command) -> EvaluationArguments:
    """As [`parse_evaluation_args`], of a command line that was read before."""
    from troll_trl.cli.settings.parser import StrictTrlParser
    from troll_trl.evaluation import EvaluationArguments

    settings = StrictTrlParser((EvaluationArguments,), prog=command.program).settings_of(command)
    try:
        args = EvaluationArguments(**settings)
    except ValueError as error:
        stop(command.program, error)
    args.settings = settings
    return args


def parse_evaluation_args(argv: Sequence[str] | None = None) -> EvaluationArguments:
    """The checked arguments of a command line, and of the YAML file that its `--config` names. Ends with code 2, after
    one paragraph that says what was wrong, the value seen and what to do."""
    return parse_evaluation_command(read_evaluation_command(argv))


def evaluate(args: EvaluationArguments, console: Console):
    from troll_trl.evaluation import generate_samples, score_file, summarize
    from troll_trl.evaluation.samples import write_text
    from troll_trl.evaluation.summary import check_compared
    from troll_trl.evaluation.tables import markdown, notes, print_disagreements, print_table, results_table

    if args.model:
        check_compared(args)
    provenance = score_file(args) if args.samples is not None else generate_samples(args)
    summary = summarize(args, provenance)
    header, rows = results_table(summary)
    print_table(console, "Results, 95 % bootstrap intervals over problems", header, rows)
    below = notes(summary)
    for note in below:
        console.print(note, highlight=False, markup=False)
    print_disagreements(console, summary)
    write_text(Path(str(args.output), "table.md"), "\n".join([markdown(header, rows) + "\n", *below]).rstrip() + "\n")
    written = f"Written: {args.output}/summary.json, samples.jsonl, samples.parquet, table.md"
    console.print(written, highlight=False, markup=False)


def compare_two(args: EvaluationArguments, console: Console):
    from troll_trl.evaluation import compare
    from troll_trl.evaluation.samples import write_json, write_text
    from troll_trl.evaluation.tables import comparison_table, markdown, print_table

    comparison = compare(args)
    header, rows = comparison_table(comparison)
    print_table(console, f"A = {comparison['a']}, B = {comparison['b']}; paired bootstrap", header, rows, keys=3)
    if args.output is not None:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_json(Path(args.output, "comparison.json"), comparison)
        write_text(Path(args.output, "comparison.md"), markdown(header, rows) + "\n")


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Evaluate, in this process. Ends with code 2 and one message for what a user can set right; with 130 when
    interrupted."""
    command = read_evaluation_command(argv, program)
    import datasets
    import torch
    from rich.console import Console

    args = parse_evaluation_command(command)
    # On a file or a pipe a table may be as wide as it needs
    console = Console() if sys.stdout.isatty() else Console(width=240)
    datasets.disable_progress_bars()  # the samples have one
    show_messages()
    warnings.showwarning = lambda message, *_: print_error(f"warning: {message}")
    again = "The same command" + (" without `overwrite`" if args.overwrite else "")  # which would discard what is there
    try:
        if args.model or args.samples is not None:
            evaluate(args, console)
        if args.compare is not None:
            compare_two(args, console)
    except (ValueError, OSError, ImportError) as error:  # what a user can set right, without a traceback
        stop(command.program, error)
    except torch.OutOfMemoryError as error:
        stop(command.program, f"out of memory. {again} and a lower `batch_size` continues. {error}")
    except KeyboardInterrupt:
        print_error(f"Stopped. {again} continues where it was.")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""
Evaluate a model on math benchmarks, score a file of completions, or compare two evaluations.

    troll eval --config eval/paper --model outputs/run --output outputs/eval
    troll eval --model outputs/run --benchmarks gsm8k mine=problems.jsonl --n 8 --temperature 0.6 --output DIR
    troll eval --samples completions.jsonl --output DIR
    troll eval --compare DIR_A DIR_B
"""

import logging
import sys
import warnings
from collections.abc import Sequence

from troll_trl.cli.command_line import OptionParser, read_command, stop
from troll_trl.evaluation import EvaluationArguments


def printable(text: str) -> str:
    r"""A text with escapes (`\x1b`) for all that a terminal would obey rather than show: control characters, marks that
    change the direction of the text, halves of surrogate pairs. Line breaks and tabs stay."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t\u00a0\u202f"
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


class PrintableFormatter(logging.Formatter):
    """Formats messages that quote files: nothing in them reaches the terminal as a command."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


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


def main(argv: Sequence[str] | None = None, program: str = "evaluate.py") -> None:
    """Evaluate in this process. Ends with code 2 and one message after a user's mistake, and with 130 if
    interrupted."""
    args = parse_evaluation_args(argv, program)
    logger = logging.getLogger("troll_trl.evaluation")
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(PrintableFormatter())
    logger.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *_: print_error(f"warning: {message}")
    again = "The same command" + (" without `overwrite`" if args.overwrite else "")  # `overwrite` would discard samples
    try:
        import datasets
        import torch

        from troll_trl.evaluation import evaluate

        datasets.disable_progress_bars()  # sampling has its own
        evaluate(args)
    except (ValueError, OSError, ImportError) as error:  # a user can fix these without a traceback
        stop(program, printable(str(error)))
    except KeyboardInterrupt:
        print_error(f"Stopped. {again} continues from there.")
        raise SystemExit(130) from None
    except torch.OutOfMemoryError as error:  # last: an interrupted import leaves no `torch`
        stop(program, f"out of memory. {again} with a lower `batch_size` continues. {error}")

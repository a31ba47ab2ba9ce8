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
from pathlib import Path

from math_answers.evaluation import EvaluationArguments
from math_answers.printable import PrintableFormatter, printable
from troll_trl.cli.settings.command import stop
from troll_trl.cli.settings.layers import read_command


def print_error(text: str):
    print(printable(text), file=sys.stderr, flush=True)


def parse_evaluation_args(argv: Sequence[str] | None = None, program: str | None = None) -> EvaluationArguments:
    """Read and check the arguments of a command line, and of the YAML file that its `--config` names. Ends with code 2
    after one paragraph that names the mistake, the value and the remedy."""
    command = read_command(argv, program)
    from troll_trl.cli.settings.parser import StrictParser  # imports torch, which reads variables under `env`

    settings = StrictParser("eval", command.program).settings_of(command)
    try:
        return EvaluationArguments(**settings)
    except ValueError as error:
        stop(command.program, error)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Evaluate, in this process. Ends with code 2 and one message for a mistake of the user; with 130 when
    interrupted."""
    program = program or Path(sys.argv[0]).name
    args = parse_evaluation_args(argv, program)
    import datasets
    import torch

    from math_answers.evaluation import evaluate

    datasets.disable_progress_bars()  # the samples have one
    logger = logging.getLogger("math_answers.evaluation")
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(PrintableFormatter())
    logger.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *_: print_error(f"warning: {message}")
    again = "The same command" + (" without `overwrite`" if args.overwrite else "")  # `overwrite` would discard samples
    try:
        evaluate(args)
    except (ValueError, OSError, ImportError) as error:  # a user can set these right without a traceback
        stop(program, printable(str(error)))
    except torch.OutOfMemoryError as error:
        stop(program, f"out of memory. {again} and a lower `batch_size` continues. {error}")
    except KeyboardInterrupt:
        print_error(f"Stopped. {again} continues where it was.")
        raise SystemExit(130) from None

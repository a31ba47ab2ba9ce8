"""The command `troll`. It imports only what the chosen subcommand needs."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from troll_trl import __version__
from troll_trl.cli.command_line import CommandParser, stop

# Each command has a module and a function that run it, and a line of help
COMMANDS = {
    "grpo": ("troll_trl.cli.train", "launch", "train a model with GRPO: troll grpo --config qwen3-0.6b/gsm8k"),
    "rloo": ("troll_trl.cli.train", "launch", "train a model with RLOO: troll rloo --config qwen3-0.6b/gsm8k-rloo"),
    "eval": (
        "troll_trl.cli.evaluate",
        "main",
        "evaluate models, score a file of samples, or compare: troll eval --config eval/paper --model M --output D",
    ),
    "plot": ("troll_trl.cli.plot", "main", "draw the curves of runs, and print their last values: troll plot A B"),
    "quickstart": ("troll_trl.cli.quickstart", "main", "train a small model in minutes, on a CPU, without a model hub"),
    "configs": (
        "troll_trl.cli.configs",
        "main",
        "list the configs that come with the package, or copy one for editing",
    ),
    "check": (
        "troll_trl.cli.check",
        "main",
        "print versions, for a bug report, and compare kernels, LM head and loss with PyTorch's and TRL's",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, by default the process's. The process ends with the command's code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = "\n".join(f"  {name:<12}{said}" for name, (*_, said) in COMMANDS.items())
    parser = CommandParser(
        prog="troll",
        usage="troll COMMAND [FLAGS]",
        description=f"TROLL (Trust Region Optimization for Large Language Models) for TRL.\n\ncommands:\n{commands}",
        epilog="troll COMMAND --help shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"troll_trl {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    command = parser.parse_args(argv[:1]).command
    if command is None:
        parser.print_help()
        return
    module, function, _ = COMMANDS[command]
    try:
        getattr(import_module(module), function)(argv[1:], f"troll {command}")
    except KeyboardInterrupt:
        stop(f"troll {command}", "interrupted.", code=130)


if __name__ == "__main__":
    main()

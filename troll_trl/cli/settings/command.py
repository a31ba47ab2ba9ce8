"""A command line and its files, read once; and what all commands share. Nothing here imports torch."""

import argparse
import difflib
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from troll_trl.cli.settings.layers import Layer, read_layers


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviation of a flag, and answers a mistake with one line, without its usage."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **(options | {"allow_abbrev": False}))
        self.suggest_on_error = True  # from Python 3.14, which names the nearest choice

    def parse_args(self, args=None, namespace=None):
        if said := self.unknown_flags(args or ()):  # first, because without them another one seems to be missing
            self.error(said[0])
        return super().parse_args(args, namespace)

    def unknown_flags(self, words: Iterable[str]) -> list[str]:
        """One line for each flag that the parser does not know."""
        flags = [word.partition("=")[0] for word in words if is_flag(word)]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return [f"unknown flag {flag}. {self.describe_unknown(name_of(flag))}" for flag in unknown]

    def describe_unknown(self, name: str) -> str:
        return describe_nearest(name, {name_of(option) for option in self._option_string_actions}, "--")

    def error(self, message: str) -> NoReturn:
        stop(self.prog, message)


def is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def name_of(flag: str) -> str:
    """`--max-steps=3` is `max_steps`."""
    return flag.partition("=")[0].lstrip("-").replace("-", "_")


def describe_nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Which of the valid names is nearest to a name."""
    # Below this ratio, the nearest name is seldom the one that was meant
    near = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.75)
    near = near or sorted((option for option in valid if option.startswith(name)), key=len)  # of an abbreviation
    return f"The nearest valid name is {prefix}{near[0]}." if near else "No valid name is near it."


@dataclass
class Command:
    """A program's `--config`s and its other flags, and the layers of the files."""

    program: str  # name in messages
    configs: list[str]
    flags: list[str]
    layers: list[Layer]  # each replaces the settings of those before
    algorithm: Any = None  # what the flags or the files say
    launcher: list[str] = field(default_factory=list)  # flags of `accelerate launch`, which the parser takes out


def read_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """Split a command line, by default the process's, into `--config` and the other flags, read the files and set the
    variables under their `env`; a later `--config` replaces the settings of those before. Ends with code 2 and one
    message if a file cannot be read."""
    parser = CommandParser(prog=program or Path(sys.argv[0]).name, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    options, flags = parser.parse_known_args(argv)
    try:
        layers = [layer for config in options.config for layer in read_layers(config)]
    except ValueError as error:
        stop(parser.prog, error)
    for path, values in layers:
        variables = values.pop("env", {})
        if not isinstance(variables, dict):
            stop(parser.prog, f"{path}: `env` must map names to values.")
        if wrong := [f"`{name}`" for name, item in variables.items() if not isinstance(item, str)]:
            # Not its value, which may be a token
            stop(parser.prog, f"{path}: `env` must map names to values, and {', '.join(wrong)} has no single one.")
        os.environ |= {str(name): value for name, value in variables.items()}  # before an import that reads one of them
    return Command(parser.prog, options.config, flags, layers)


def read_training_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """[`read_command`], and which algorithm the flags or the files name."""
    command = read_command(argv, program)
    parser = CommandParser(prog=command.program, add_help=False)
    parser.add_argument("--algorithm")
    said = [layer.values.get("algorithm") for layer in command.layers]
    said.append(parser.parse_known_args(command.flags)[0].algorithm)
    command.algorithm = next((algorithm for algorithm in reversed(said) if algorithm is not None), None)
    return command


def stop(program: str, message: object, code: int = 2) -> NoReturn:
    """End with a message for the user, an exception's in one line. If several processes of a machine fail alike, the
    first one prints it."""
    text = " ".join(str(message).split()) if isinstance(message, Exception) else message
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: error: {text}", file=sys.stderr)
    raise SystemExit(code)


def show_warnings_plainly() -> None:
    """Have Python's warnings print their text alone: a user of the command has no use for a line of our source."""
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"


def show(text: str) -> None:
    """Print a text. If its reader, such as `head`, closes the pipe, end as SIGPIPE does, without a traceback."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at its end
        raise SystemExit(128 + signal.SIGPIPE) from None

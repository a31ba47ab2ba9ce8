"""All commands share how they refuse a command line, and how they print. Nothing here imports torch."""

import argparse
import difflib
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterable
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviation of a flag, and answers a mistake with one line that names what is nearest."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **(options | {"allow_abbrev": False}))
        self.suggest_on_error = False  # Python 3.14 suggests choices alone

    def parse_args(self, args=None, namespace=None):
        if unknown := self.unknown_flags(args or ()):  # else another flag might seem to be missing
            self.error("\n  ".join(unknown))
        return super().parse_args(args, namespace)

    def unknown_flags(self, words: Iterable[str]) -> list[str]:
        """Return one line for each flag that the parser does not have."""
        flags = [word.partition("=")[0] for word in words if is_flag(word)]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return [f"unknown flag {flag}. {self.advice(name_of(flag), '--')}" for flag in unknown]

    def advice(self, name: str, prefix: str = "") -> str:
        """Say what to write in place of an unknown name."""
        near = nearest(name, map(name_of, self._option_string_actions))
        return f"The nearest valid name is {prefix}{near}." if near else "No valid name is near it."

    def _check_value(self, action, value):
        try:
            if value is not None:  # a field that may be `None` has no choice for it
                super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if near := nearest(str(value), map(str, action.choices)):
                error.message += f". The nearest is {near}."
            raise

    def error(self, message: str) -> NoReturn:
        stop(self.prog, message)


def is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def name_of(flag: str) -> str:
    """`--max-steps=3` is `max_steps`."""
    return flag.partition("=")[0].lstrip("-").replace("-", "_")


def nearest(name: str, valid: Iterable[str], likeness: float = 0.75) -> str | None:
    """Return the valid name that was probably meant, or `None`. A setting or a flag that is less like `name` than the
    default `likeness` is seldom meant."""
    names = {option.lower().replace("-", "_"): option for option in sorted(valid)}
    name = name.lower().replace("-", "_")
    near = difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    if not near and len(name) > 2:  # it may be an abbreviation
        near = sorted((option for option in names if option.startswith(name)), key=len)
    return names[near[0]] if near else None


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

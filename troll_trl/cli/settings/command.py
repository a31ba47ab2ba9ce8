"""A command line and its files, read once; what can be refused without torch is refused here, before it is imported."""

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from troll_trl.cli.settings.help import help_text
from troll_trl.cli.settings.layers import Layer, Value, read_layers
from troll_trl.cli.settings.names import declared_names, describe_unknown, is_flag, launcher_names, name_of

EXAMPLE = "troll grpo --config qwen3-0.6b/gsm8k"


@dataclass
class Command:
    """
    What was given: a program's flags but for `--config`, and the layers of the file that it names.

    Attributes:
        program (`str`):
            Name in messages.
        flags (`list[str]`):
            As the shell gave them.
        layers (`list[Layer]`):
            Files with their settings, each replacing those before.
        launcher (`dict[str, str]`):
            Settings of the files that belong to `accelerate launch`, such as `num_processes`.
    """

    program: str
    flags: list[str]
    layers: list[Layer]
    launcher: dict[str, str] = field(default_factory=dict)

    def last(self, name: str) -> Any:
        """What is given for a name, the flag before the files; `None` if nothing is."""
        given = [layer.values[name].typed for layer in self.layers if name in layer.values]
        for word, following in zip(self.flags, [*self.flags[1:], ""], strict=False):
            if is_flag(word) and name_of(word) == name:
                given.append(word.partition("=")[2] if "=" in word else following)
        return given[-1] if given else None


def read_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """Split a command line, by default the process's, into `--config` and the other flags, and read the files. Ends
    with code 2 and one message if a file is missing, cannot be read, or is named twice."""
    parser = argparse.ArgumentParser(prog=program or Path(sys.argv[0]).name, add_help=False, allow_abbrev=False)
    parser.error = lambda message: stop(parser.prog, message)  # type: ignore[method-assign]
    parser.add_argument("--config", action="append", default=[])
    options, flags = parser.parse_known_args(argv)
    if len(options.config) > 1:
        stop(
            parser.prog,
            f"--config is given {len(options.config)} times. Name one file, and the others as its `base`.",
        )
    try:
        layers = [layer for config in options.config for layer in read_layers(config)]
    except ValueError as error:
        stop(parser.prog, error)
    return Command(parser.prog, flags, layers)


def read_training_command(
    argv: Sequence[str] | None = None, program: str | None = None, other_flags: Iterable[str] = ()
) -> Command:
    """
    [`read_command`] for a training run, with names checked as far as they are known without an import. `other_flags`
    are names that the program takes out of `argv` itself: a mistyped one may have meant them. Ends with code 2 and one
    message, which names every unknown key and flag.
    """
    command = read_command(argv, program)
    algorithm = algorithm_of(command)
    show_help(command, algorithm, EXAMPLE.partition("grpo ")[2])
    set_environment(command)  # before an import that reads one of them
    names = declared_names(algorithm)
    command.launcher = take_launcher_settings(command, names)
    if names:
        refuse_unknown_names(command, names, algorithm, other_flags)
    mixture = command.last("datasets") is not None
    needed = ("model_name_or_path",) if mixture else ("model_name_or_path", "dataset_name")
    missing = [name for name in needed if command.last(name) is None]
    if missing:
        said = " and ".join(f"`{name}`" for name in missing)
        stop(
            command.program,
            f"{said} {'is' if len(missing) == 1 else 'are'} not set. A run needs a model (`model_name_or_path`) and "
            f"data (`dataset_name`), each a hub name or a path, in a YAML file or as flags: {EXAMPLE}",
        )
    return command


def show_help(command: Command, settings: str, example: str) -> None:
    """Print the help of some `settings` and end, if it is asked for and needs no import; else the parser prints it."""
    if {"-h", "--help"} & {*command.flags} and (text := help_text(command.program, settings, example)):
        show(text)
        raise SystemExit(0)


def algorithm_of(command: Command) -> str:
    """The algorithm that decides which names are valid. A wrong one is left to the parser to refuse."""
    algorithm = command.last("algorithm")
    return algorithm if algorithm in ("grpo", "rloo") else "grpo"


def take_launcher_settings(command: Command, names: Iterable[str]) -> dict[str, str]:
    """Take out of the files what `accelerate launch` is to be told, and return it."""
    launcher = (launcher_names() | {"accelerate_config"}) - set(names)
    taken: dict[str, str] = {}
    for layer in command.layers:
        for name in [name for name in layer.values if name in launcher]:
            taken[name] = str(layer.values.pop(name).text)
    return taken


def refuse_unknown_names(
    command: Command, names: Iterable[str], algorithm: str = "", other_flags: Iterable[str] = ()
) -> None:
    """Stop with one line for each key and flag that is not one of `names`. A mistyped one may have meant one of
    `other_flags`."""
    names = set(names)
    said = [
        f"{layer.path}: unknown key `{name}`. {describe_unknown(str(name), names, algorithm=algorithm)}"
        for layer in command.layers
        for name in layer.values
        if name not in names and name != "env"
    ]
    for word in command.flags:
        name = name_of(word)
        if is_flag(word) and name.removeprefix("no_") not in names and word not in ("-h", "--help"):
            advice = describe_unknown(name, names.union(other_flags), "--", algorithm=algorithm)
            said.append(f"unknown flag {word.partition('=')[0]}. {advice}")
    if len(said) == 1:
        stop(command.program, said[0])
    if said:
        stop(command.program, "\n  ".join([f"{len(said)} names are unknown:", *said]))


def stop(program: str, message: object, code: int = 2) -> NoReturn:
    """End with a message for the user. Of several processes of a machine, which fail alike, one says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: error: {message}", file=sys.stderr)
    raise SystemExit(code)


def show(text: str) -> None:
    """Print a text. If its reader, such as `head`, closes the pipe, end as SIGPIPE does: without a traceback."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def set_environment(command: Command) -> None:
    """Set the variables under the files' `env`. Ends with code 2 and one message if `env` does not map names to
    values."""
    for path, values in command.layers:
        variables = values.get("env", Value({}, {})).typed
        if not isinstance(variables, dict) or any(isinstance(item, dict | list) for item in variables.values()):
            stop(command.program, f"{path}: `env` must map names to values, got {variables!r}.")
        for name, value in variables.items():
            os.environ[str(name)] = str(value)

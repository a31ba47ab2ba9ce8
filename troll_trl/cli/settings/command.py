"""A command line and its files, read once. What needs no torch to be refused is refused here, before its import."""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from troll_trl.cli.settings.help import EXAMPLE, help_text
from troll_trl.cli.settings.layers import Layer, config_names, configs_folder, read_layers
from troll_trl.cli.settings.names import declared_names, describe_unknown, is_flag, launcher_names, name_of


@dataclass
class Command:
    """A program's flags without `--config`, the layers of the file that `--config` names, and the settings of these
    layers that belong to `accelerate launch`, such as `num_processes`."""

    program: str  # name in messages
    flags: list[str]
    layers: list[Layer]  # each replaces the settings of those before
    launcher: dict[str, str] = field(default_factory=dict)

    def last(self, name: str) -> Any:
        """The value of a name: the last flag's, else the last file's; `None` if nothing sets it."""
        given = [layer.values[name] for layer in self.layers if name in layer.values]
        for word, following in pairwise([*self.flags, ""]):
            if is_flag(word) and name_of(word) == name:
                given.append(word.partition("=")[2] if "=" in word else following)
        return given[-1] if given else None

    @property
    def algorithm(self) -> str:
        """The algorithm that decides which names are valid. The parser refuses a wrong one."""
        algorithm = self.last("algorithm")
        return algorithm if algorithm in ("grpo", "rloo") else "grpo"


def read_command(argv: Sequence[str] | None = None, program: str | None = None) -> Command:
    """Split a command line, by default the process's, into `--config` and the other flags, and read the files; a later
    `--config` replaces the settings of those before. Ends with code 2 and one message if a file cannot be read."""
    parser = argparse.ArgumentParser(prog=program or Path(sys.argv[0]).name, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    options, flags = parser.parse_known_args(argv)
    try:
        layers = [layer for config in options.config for layer in read_layers(config)]
    except ValueError as error:
        stop(parser.prog, error)
    return Command(parser.prog, flags, layers)


def read_training_command(
    argv: Sequence[str] | None = None, program: str | None = None, other_flags: Iterable[str] = ()
) -> Command:
    """[`read_command`] and [`check_command`] for a training run. Takes the launcher's settings out of the files."""
    command = read_command(argv, program)
    launcher = launcher_names(command.algorithm) - {"env"}  # under `env` a file has variables
    for layer in command.layers:
        for name in [name for name in layer.values if name in launcher]:
            command.launcher[name] = str(layer.values.pop(name))
    check_command(command, command.algorithm, other_flags)
    mixture = command.last("datasets") is not None
    needed = ("model_name_or_path",) if mixture else ("model_name_or_path", "dataset_name")
    if missing := [name for name in needed if command.last(name) is None]:
        said = " and ".join(f"`{name}`" for name in missing)
        stop(
            command.program,
            f"{said} must be set: a run needs a model and data. Each is a hub name or a path, in a YAML file or as a "
            f"flag: troll grpo {EXAMPLE}",
        )
    return command


def check_command(command: Command, settings: str, other_flags: Iterable[str] = ()) -> None:
    """Answer `--help`, set the variables under the files' `env`, and refuse unknown names, without importing torch.
    `settings`, `"grpo"`, `"rloo"` or `"eval"`, decides which names are known. Ends with code 2 after one line for each
    unknown key and flag. A mistyped flag may have meant one of `other_flags`, which the program itself reads."""
    if {"-h", "--help"} & {*command.flags}:
        show(help_text(command.program, settings))
        raise SystemExit(0)
    names = declared_names(settings)
    said: list[str] = []
    for path, values in command.layers:
        variables = values.get("env", {})
        if not isinstance(variables, dict):
            stop(command.program, f"{path}: `env` must map names to values.")
        if wrong := [f"`{name}`" for name, item in variables.items() if not isinstance(item, str)]:
            # Not its value, which may be a token
            stop(command.program, f"{path}: `env` must map names to values, and {', '.join(wrong)} has no single one.")
        os.environ |= {str(name): value for name, value in variables.items()}  # before an import that reads one of them
        unknown = [str(name) for name in values if name not in names and name != "env"]
        said += [f"{path}: unknown key `{name}`. {describe_unknown(name, names, settings)}" for name in unknown]
    for word in command.flags:
        name = name_of(word)
        if is_flag(word) and name.removeprefix("no_") not in names:
            advice = describe_unknown(name, names.union(other_flags), settings, "--")
            said.append(f"unknown flag {word.partition('=')[0]}. {advice}")
    shipped = configs_folder()
    if any(shipped in layer.path.parents and {*layer.values} - names - {"env"} for layer in command.layers):
        paths = {layer.path for layer in command.layers}
        configs = [name for name in config_names() if shipped / f"{name}.yaml" in paths]
        said[-1] += f" To change a config that comes with the package: troll configs copy {' '.join(configs)}"
    if len(said) > 1:
        said.insert(0, f"{len(said)} names are unknown:")
    if said:
        stop(command.program, "\n  ".join(said))


def stop(program: str, message: object, code: int = 2) -> NoReturn:
    """End with a message for the user. If several processes of a machine fail alike, the first one prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: error: {message}", file=sys.stderr)
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

"""What a command line makes of the dataclasses, as `troll grpo` does."""

from collections.abc import Sequence

from troll_trl.cli.settings.layers import read_command
from troll_trl.cli.settings.parser import parse_training_command


def parse_training_args(argv: Sequence[str]):
    """The script's arguments, the trainer's and the model's."""
    return parse_training_command(read_command(argv))

"""What a command line makes of the dataclasses, as scripts/train.py does."""

from collections.abc import Sequence

from troll_trl.cli.arguments import make_arguments
from troll_trl.cli.train import read_options


def parse_training_args(argv: Sequence[str]):
    """The script's arguments, the trainer's and the model's."""
    return make_arguments(read_options(argv, "train.py"))

"""Print what a bug report needs: versions, devices and kernels."""

from collections.abc import Sequence
from importlib.metadata import version

from troll_trl import __version__
from troll_trl.cli.command_line import CommandParser


def main(argv: Sequence[str] | None = None, program: str = "troll env") -> None:
    """Print versions, devices and whether the kernels run."""
    CommandParser(prog=program, description=__doc__).parse_args(argv)
    import torch
    from trl.scripts.env import print_env

    from troll_trl.kernels.dispatch import TRITON_AVAILABLE, use_triton
    from troll_trl.lm_head.kernel_check import self_check

    print_env()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    runs_kernels = use_triton(device)
    print(f"- troll_trl version: {__version__}")
    print(f"- Triton version: {version('triton') if TRITON_AVAILABLE else 'not installed'}")
    print(f"- LM head: {'Triton kernels' if runs_kernels else 'torch'} on {device.type}")
    print(f"- math-verify version: {version('math-verify')}")
    for row in self_check(device) if runs_kernels else ():
        print(f"- kernels of {row}")

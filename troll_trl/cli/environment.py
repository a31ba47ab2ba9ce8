"""`troll env`: what a bug report should hold, TRL's own lines and this package's."""

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from troll_trl import __version__


def main(argv: Sequence[str] | None = None, program: str = "troll env") -> None:
    """Print versions, devices and whether the kernels run."""
    argparse.ArgumentParser(prog=program, description=__doc__, allow_abbrev=False).parse_args(argv)
    import torch
    from trl.scripts.env import print_env

    from troll_trl.kernels.dispatch import use_triton

    print_env()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    lines = {
        "troll_trl version": __version__,
        "Triton version": _version("triton"),
        "LM head": f"Triton kernels on {device.type}" if use_triton(device) else f"torch on {device.type}",
        "math-verify version": _version("math-verify"),
    }
    print("\n".join(f"- {name}: {said}" for name, said in lines.items()))
    if use_triton(device):
        from troll_trl.kernels.agreement import self_check

        for row in self_check(device):
            said = f"agrees with torch to {row.difference:.1e}" if row.ok else f"FAILS: {row.error or row.difference}"
            print(f"- kernel {row.kernel} ({row.shapes}): {said}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

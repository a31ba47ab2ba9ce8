"""List the configs that come with the package, or copy some for editing, with the files that they build on."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from troll_trl.cli.settings.command import show, stop
from troll_trl.cli.settings.layers import config_names, configs_folder, read_layers


def main(argv: Sequence[str] | None = None, program: str = "troll configs") -> None:
    """List or copy configs. Ends with code 2 and one message: there is no such config, or a file would be
    overwritten."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__, allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=["copy"], help="copy configs; without it, the command lists them")
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to copy")
    parser.add_argument("--to", type=Path, default=Path("configs"), help="folder to copy to (default: configs)")
    options = parser.parse_args(argv)
    if options.action is None:
        show("\n".join(config_names()))
        return
    if not options.names:
        stop(program, "no config to copy is named. `troll configs` lists them: troll configs copy qwen3-0.6b/gsm8k")
    try:
        for name in options.names:
            print(f"Copied. To train with your copy: --config {copy_config(name, options.to)}")
    except (ValueError, OSError) as error:
        stop(program, error)


def copy_config(name: str, folder: Path) -> Path:
    """
    Copy a config that comes with the package, and its bases, into a folder. The copies keep their relative paths, so
    `base` finds them. An existing base stays. Refuses an unknown name (`ValueError`) and to replace a file
    (`FileExistsError`).
    """
    shipped = configs_folder()
    if name not in config_names():
        raise ValueError(f"No config that comes with the package is named {name}: `troll configs` lists them.")
    paths = [path.resolve() for path, _ in read_layers(shipped / f"{name}.yaml")]
    files = [path.relative_to(shipped.resolve()) for path in paths]
    copy = folder / files[-1]
    if copy.exists():
        raise FileExistsError(f"{copy} is there already: remove it, or copy to another folder with --to.")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / file).exists():
            shutil.copyfile(shipped / file, folder / file)
    return copy

"""List the configs that come with the package, show one as one merged file, or copy some of them for editing."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from troll_trl.cli.command_line import CommandParser, config_names, nearest, read_config, stop


def main(argv: Sequence[str] | None = None, program: str = "troll configs") -> None:
    """List, show or copy configs. Ends with code 2 and one message if there is no such config, or a file would be
    overwritten or cannot be written."""
    parser = CommandParser(prog=program, description=__doc__)
    parser.add_argument("action", nargs="?", choices=["show", "copy"], help="what to do; without it: list the configs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to show or to copy")
    parser.add_argument("--to", type=Path, default=Path("configs"), help="folder to copy to (default: configs)")
    options = parser.parse_args(argv)
    if options.action is None:
        print("\n".join(config_names()))
    elif not options.names:
        stop(program, f"name a config that `troll configs` lists, as in: {program} {options.action} qwen3-0.6b/gsm8k")
    for name in options.names:
        if name not in config_names():
            stop(program, f"the package has no config with the name {name}.{nearest(name, config_names())}")
        text = f"# {name}, merged\n" + yaml.safe_dump(read_config(name), sort_keys=False, allow_unicode=True, width=120)
        copy = options.to / f"{name}.yaml"
        if options.action == "show":
            print(text)
        elif copy.exists():
            stop(program, f"{copy} already exists: remove it, or copy to another folder with --to.")
        else:
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text, encoding="utf-8")
            except OSError as error:
                stop(program, f"{copy} cannot be written: {error}. Copy to another folder with --to.")
            print(f"Copied. To train with your copy: --config {copy}")

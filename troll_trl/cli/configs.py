"""List the configs that come with the package, show one as one merged file, or copy some of them for editing."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from troll_trl.cli.settings.command import CommandParser, show, stop
from troll_trl.cli.settings.layers import config_names, configs_folder, nearest_config, read_layers

_HEAD = """\
# {}
#
# Files of troll_trl, merged: each value is below the name of the file that sets it. A line that a later file replaces
# became a comment.
"""


def main(argv: Sequence[str] | None = None, program: str = "troll configs") -> None:
    """List, show or copy configs. Ends with code 2 and one message if there is no such config, or a file would be
    overwritten."""
    parser = CommandParser(prog=program, description=__doc__)
    parser.add_argument("action", nargs="?", choices=["show", "copy"], help="what to do; without it: list the configs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to show or to copy")
    parser.add_argument("--to", type=Path, default=Path("configs"), help="folder to copy to (default: configs)")
    options = parser.parse_args(argv)
    if options.action is None:
        show("\n".join(config_names()))
        return
    if not options.names:
        stop(program, f"no config is named. `troll configs` lists them: {program} {options.action} qwen3-0.6b/gsm8k")
    try:
        for name in options.names:
            if options.action == "show":
                show(merged(name).rstrip())
            else:
                print(f"Copied. To train with your copy: --config {copy_config(name, options.to)}")
    except (ValueError, OSError) as error:
        stop(program, error)


def copy_config(name: str, folder: Path) -> Path:
    """Write a config that comes with the package as one file into a folder. Refuses an unknown name (`ValueError`) and
    to replace a file (`FileExistsError`)."""
    text, copy = merged(name), folder / f"{name}.yaml"
    if copy.exists():
        raise FileExistsError(f"{copy} is there already: remove it, or copy to another folder with --to.")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, encoding="utf-8")
    return copy


def merged(name: str) -> str:
    """Merge a config that comes with the package with its bases: the lines and comments of each file follow the file's
    name. Lines that a later file replaces become comments. Raises a `ValueError` for an unknown name."""
    if name not in config_names():
        raise ValueError(f"No config that comes with the package has the name {name}.{nearest_config(name)}")
    folder = configs_folder().resolve()
    layers = read_layers(folder / f"{name}.yaml")
    names = [path.resolve().relative_to(folder) for path, _ in layers]
    last = {key: number for number, layer in enumerate(layers) for key in layer.values}
    text = _HEAD.format(name)
    for number, (path, values) in enumerate(layers):
        own = path.read_text(encoding="utf-8") if path.is_file() else yaml.safe_dump(values)
        replaced = {key: str(names[last[key]]) for key in values if last[key] != number}
        text += f"\n# ---- {names[number]}\n{_with_comments(own, replaced)}"
    return text


def _with_comments(text: str, replaced: dict[str, str]) -> str:
    """Make `base` and the replaced keys of a text comments, which name the file that replaces them."""
    lines = text.splitlines()
    for key, value in yaml.compose(text).value:
        if key.value == "base" or key.value in replaced:
            end = value.end_mark.line + (value.end_mark.column > 0)
            for number in range(key.start_mark.line, end):
                lines[number] = f"# {lines[number]}"
            if key.value in replaced:
                lines[end - 1] += f"  # replaced by {replaced[key.value]}"
    return "\n".join(lines) + "\n"

"""`--help`, from the sources of the dataclasses as the names are: in a second, where an import of them takes many."""

import ast
import textwrap

from troll_trl.cli.settings.names import SOURCES, declared_names, fields_of

_WIDTH = 100  # columns


def help_text(program: str, command: str, example: str) -> str:
    """The help of a command, a key of `SOURCES`: its settings by the class that declares them, our own classes first,
    and the flags of an `example`. Empty if a library has moved its classes."""
    if not declared_names(command):
        return ""
    parts = [
        f"usage: {program} [--config FILE] [--NAME VALUE ...]\n\n    {program} {example}\n",
        textwrap.fill(
            "--config names a YAML file of settings, or a config that comes with the package (`troll configs` lists "
            "them). Every setting is a key of the file and a flag, and a flag replaces the file's.",
            _WIDTH,
        ),
    ]
    shown: set[str] = set()
    for package, file, class_name in sorted(SOURCES[command], key=lambda source: source[0] != "troll_trl"):
        fields = {name: field for name, field in fields_of(package, file, class_name).items() if name not in shown}
        shown |= fields.keys()
        parts.append(f"\n{class_name} ({package})")
        parts += [_describe(name, field) for name, field in fields.items()]
    return "\n".join(parts)


def _describe(name: str, field: ast.AnnAssign) -> str:
    """`  --max_steps int = -1`, and under it what the source says of it."""
    default, said = field.value, ""
    if isinstance(default, ast.Call):  # of dataclasses' `field`, or of our `setting`
        given = {"default": default.args[0], "help": default.args[-1]} if default.args else {}
        given |= {str(keyword.arg): keyword.value for keyword in default.keywords}
        default = given.get("default")
        if isinstance(metadata := given.get("metadata"), ast.Dict):
            given |= {
                ast.literal_eval(key): value for key, value in zip(metadata.keys, metadata.values, strict=True) if key
            }
        if isinstance(text := given.get("help"), ast.Constant):
            said = str(text.value).replace("%%", "%")  # as argparse has it
    head = f"  --{name} {ast.unparse(field.annotation)}" + (f" = {ast.unparse(default)}" if default else "")
    below = textwrap.fill(said, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"{head}\n{below}" if said else head

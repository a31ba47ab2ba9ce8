"""`--help`, from the source of the dataclasses: in a second, because importing them takes many."""

import ast
import textwrap

from troll_trl.cli.settings.names import SOURCES, fields_of

EXAMPLE = "--config qwen3-0.6b/gsm8k"
_EXAMPLES = {"eval": "--config eval/paper --model outputs/run --output outputs/eval"}
_WIDTH = 100  # columns
_USE = (
    "--config takes a YAML file of settings, or the name of a config that comes with the package (`troll configs` "
    "lists them). Every setting is a key in the file and a flag. A flag overrides the file."
)
_LAUNCHER = (
    "Flags of `accelerate launch` start several processes, such as --num_processes 8, or on a CPU --num_processes 2 "
    "--multi_gpu. --accelerate_config takes a file for it, or a name such as ddp, fsdp2 or zero3."
)


def help_text(program: str, settings: str) -> str:
    """The help of a program: its settings, a key of `SOURCES`, by the class that declares them, our classes first."""
    parts = [
        f"usage: {program} [--config FILE] [--NAME VALUE ...]\n\n    {program} {_EXAMPLES.get(settings, EXAMPLE)}\n",
        textwrap.fill(_USE, _WIDTH),
    ]
    if settings != "eval":
        parts.append(textwrap.fill(_LAUNCHER, _WIDTH))
    shown: set[str] = set()
    for package, file, class_name in sorted(SOURCES[settings], key=lambda source: source[0] != "troll_trl"):
        fields = {name: field for name, field in fields_of(package, file, class_name).items() if name not in shown}
        shown |= fields.keys()
        parts.append(f"\n{class_name} ({package})")
        parts += [_describe(name, field) for name, field in fields.items()]
    return "\n".join(parts)


def _describe(name: str, field: ast.AnnAssign) -> str:
    """`  --max_steps int = -1`, and under it the help text of the source."""
    default, said = field.value, ""
    if isinstance(default, ast.Call):  # of dataclasses' `field`, or of our `setting`
        given = {"default": default.args[0], "help": default.args[-1]} if default.args else {}
        given |= {str(keyword.arg): keyword.value for keyword in default.keywords}
        default = given.get("default")
        if isinstance(metadata := given.get("metadata"), ast.Dict):
            pairs = zip(metadata.keys, metadata.values, strict=True)
            given |= {ast.literal_eval(key): value for key, value in pairs if key}
        if isinstance(text := given.get("help"), ast.Constant):
            said = str(text.value).replace("%%", "%")  # as argparse has it
    head = f"  --{name} {ast.unparse(field.annotation)}" + (f" = {ast.unparse(default)}" if default else "")
    below = textwrap.fill(said, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"{head}\n{below}" if said else head

"""What stands on the pages: their blocks, their commands, and the scripts that they give to save."""

import ast
import re
from pathlib import Path

from tests.support.repository import ROOT

MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MARKDOWN += [*sorted((ROOT / "configs").glob("*.md")), *sorted((ROOT / "evidence").glob("*.md"))]
PAGES = [*(page for page in MARKDOWN if page.name != "CHANGELOG.md"), *sorted((ROOT / "examples").glob("*.py"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    r"(?:\w+=\S* )*(?:troll|python|make|accelerate launch(?=.*\.py)|pip install|trl vllm-serve|vllm serve|sbatch)"
)
PLACEHOLDER = re.compile(r"\b(?:any_field|[A-Z]{4,})\b|…")  # for something of the reader's


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    """The blocks of code in some languages; of a diff, what it makes of the old text: of a script to save that the page
    shows above, the new script, and else its new side."""
    found, scripts = [], {}
    for language, text in FENCE.findall(text_of(page)) if page.suffix == ".md" else []:
        if language == "diff":
            text = _patched(scripts.get(text.splitlines()[0][1:], ""), text)
        scripts[text.partition("\n")[0]] = text
        if language in languages:
            found.append(text)
    return found


def _patched(script: str, diff: str) -> str:
    """Apply a diff that leaves out lines of the `script`; empty lines separate its parts. Without a script, this is the
    diff's new side."""
    lines, position, new = script.splitlines(), 0, []
    for line in filter(None, diff.splitlines()) if script else diff.splitlines():
        if script and not line.startswith("+"):
            found = lines.index(line[1:], position)  # a ValueError if the script lacks the line
            new += lines[position:found]
            position = found + 1
        if not line.startswith("-"):
            new.append(line[1:])
    return "\n".join([*new, *lines[position:], ""])


def is_python(block: str) -> bool:
    return re.search(r"^\s*(from|import) ", block, re.MULTILINE) is not None


def commands(page: Path) -> list[str]:
    """The complete commands of a page, or of the head of a script."""
    if page.suffix == ".py":
        lines = (ast.get_docstring(ast.parse(text_of(page))) or "").replace("\\\n", " ").splitlines()
        found = [re.match(rf"(?:Run:|Needs:.*: )?\s*({PROGRAMS} .*?[\w'/}}])`?\.?$", line) for line in lines]
        return [match[1] for match in found if match]
    shell = "\n".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))
    inline = [span for span in spans if re.match(rf"{PROGRAMS} \S", span) and not PLACEHOLDER.search(span)]
    return [line for line in shell + inline if line.strip()]


_FIRST_LINE = re.compile(r"# (\w+)\.py$", re.MULTILINE)  # of a script to save
_CODE = [block for page in PAGES for block in blocks(page, "python", "diff")]
SCRIPTS = {name[1]: block for block in _CODE if (name := _FIRST_LINE.match(block))}

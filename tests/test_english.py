"""What users read is plain English: a short list of constructions that a native reader has to read twice."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from words import GENERATED, ROOT, pages

# What not to write, and what to write in its place
PATTERNS = {
    r"\b(stand|stands|stood) (in(?! for\b)|behind|beside|before|there)\b": "is in, follows, is next to, precedes",
    r"\b(is|are|was|were|be|been) (said|told)\b": "name who does it: the trainer logs, warns, raises",
    r"\b(is|are|was|were|be|been) warned of\b": "the trainer warns of",
    r"(?:^|[.!?:;] )(That|Those) of\b": "repeat the noun",
    r"(?:^|[.!?:;] )Of (?!course\b|(the )?\d)": "begin with the subject",
    r", so that\b": "so, or a new sentence",
    r"\b(go|goes|going|gone|went) on\b": "continues, resumes",
    r"\bbut for\b": "except",
    r"\bbeside\b": "next to, compared with",
    r"\bin the mean\b": "on average",
    r"\bso many\b": "the number",
    r"\b(is|are) to be\b": "must, will",
    r"(?<![Tt]here )\b(is|are) no (?!longer\b|more\b|such\b|other\b|less\b|better\b)": "is not a",
    r"\bshall\b": "should",
    r"\b(twins?|own rate)\b": "PyTorch fallback; tuned learning rate",
}


def prose(text: str) -> list[str]:
    """Paragraphs, list items and cells of Markdown, each in one line, without blocks of code."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\n *([-*>]|\d+\.|#+) |\|", "\n\n", text)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def strings(source: str) -> Iterator[str]:
    """Docstrings, messages and help of a module; "…" is what an f-string fills in."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node)} - {id(node) for node in formatted}
    for node in formatted:
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def found(texts: Iterator[str]) -> list[str]:
    """Each construction of the list in some texts, with what is around it and what to write."""
    return [
        f"{part[max(0, match.start() - 40) : match.end() + 40]!r}: {instead}"
        for text in texts
        for part in prose(text)
        for pattern, instead in PATTERNS.items()
        for match in re.finditer(pattern, part)
    ]


def test_the_list_finds_what_it_is_for():
    bad = "It stands beside the loss. Of both,\n    one is said, so that all go on but for one."
    assert len(found([f"- Those of a list\n- {bad}", f"```\n{bad}\n```"])) == 7
    assert len(found(strings('def function():\n    raise ValueError(f"{1} in the mean over {2}")'))) == 1
    assert found(["Of course it stands for 64. Of 10 runs, 3 go. The weights are those of TRL's trainer."]) == []


@pytest.mark.parametrize(
    "page", [*pages(), *sorted(GENERATED.glob("*.md"))], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_pages(page):
    assert found([page.read_text(encoding="utf-8")]) == []


def test_docstrings_messages_and_help():
    """Also of private functions: their docstrings are the documentation of whoever changes them."""
    folders = ("troll_trl", "benchmarks", "examples", "scripts")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = {path.relative_to(ROOT).as_posix(): path for path in paths}
    bad = {name: found(strings(path.read_text(encoding="utf-8"))) for name, path in modules.items()}
    assert len(bad) > 100
    assert {name: hits for name, hits in bad.items() if hits} == {}

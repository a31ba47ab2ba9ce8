"""Words of all Markdown pages, tables and code included, generated tables not: `make words`."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "configs", "examples", "evidence", "tests")
GENERATED = ROOT / "evidence" / "tables"
# `<!-- study name -->`, as evidence/report.py writes it
_GENERATED_TABLE = re.compile(r"<!-- [\w-]+ [\w-]+ -->\n.*?<!-- end -->", flags=re.DOTALL)


def pages() -> list[Path]:
    """Every page that somebody writes by hand."""
    nested = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    return [path for path in [*sorted(ROOT.glob("*.md")), *sorted(nested)] if path.parent != GENERATED]


def words_of(text: str) -> int:
    """As `wc -w` counts them, after the generated tables are removed."""
    return len(_GENERATED_TABLE.sub("", text).split())


def words_by_page() -> dict[str, int]:
    """Words of each page, by its path in the repository."""
    return {path.relative_to(ROOT).as_posix(): words_of(path.read_text(encoding="utf-8")) for path in pages()}


if __name__ == "__main__":
    counted = words_by_page()
    for name, words in counted.items():
        print(f"{words:7,}  {name}")
    print(f"{sum(counted.values()):7,}  in all")

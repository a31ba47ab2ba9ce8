"""The documentation stays short: words of the pages, generated tables not counted (`make words`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from words import words_by_page, words_of

README, EVIDENCE, STUDY, ALL = 900, 1_200, 2_500, 20_000
CONTRIBUTORS = {
    "CONTRIBUTING.md": 650,
    "docs/design.md": 1_800,
    "docs/kernels.md": 900,
    "docs/performance.md": 600,
    "docs/tests.md": 750,
}


def test_generated_tables_are_not_counted():
    table = "<!-- study name -->\n| a | b |\n<!-- end -->\n"
    assert words_of(f"One two.\n{table}three\n{table}") == 3
    assert words_of("<!-- a remark of some words -->\none two\n<!-- end -->") == 12


def test_pages_keep_their_length():
    words = words_by_page()
    assert words["README.md"] <= README
    assert words.pop("evidence/README.md") <= EVIDENCE
    assert sum(count for page, count in words.items() if page.startswith("evidence/")) <= STUDY
    assert {page: words[page] for page, most in CONTRIBUTORS.items() if words[page] > most} == {}


def test_all_pages_together():
    words = words_by_page()
    assert sum(words.values()) <= ALL, words

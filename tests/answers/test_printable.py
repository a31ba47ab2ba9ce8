"""A text in a cell of a Markdown table shows what it is."""

import html
import re

import pytest
from markdown_it import MarkdownIt

from math_answers.printable import in_markdown

TEXTS = ["a|b", r"a\|b", r"a\\|b", "a\\", r"\`x` y", r"\*a*", r"\<b>", "<img src=x>", "[x](javascript:1)", "![i][j]"]
TEXTS += ["`a|b`", "~~a~~", r"\~~a~~", "&lt;b&gt;", "<http://x>", r"\boxed{5}", r"\(x\)", r"\]\(x"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_cell_of_a_table_shows_the_text(text):
    """A backslash before a mark ended the cell, or began code."""
    page = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .render(f"| n | m |\n|-|-|\n| {in_markdown(text)} | end |")
    )
    shown = re.findall("<td>(.*?)</td>", page)
    assert [html.unescape(cell) for cell in shown] == [text, "end"]

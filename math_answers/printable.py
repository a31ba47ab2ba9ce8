"""printable(): texts of models, files and runs, for a terminal and for a table in Markdown."""

import logging
import re

# What Markdown reads as HTML, code, emphasis or a link. A bare underscore is left: names of models have many
_MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "`": "\\`", "*": "\\*", "~": "\\~", "](": "]\\(", "][": "]\\["}
# Without a second one, a backslash of the text would escape the backslash that is put before its mark
_BEFORE_A_MARK = re.compile(r"\\(?=[!-/:-@\[-`{-~]|\Z)")


def printable(text: str) -> str:
    r"""A text with escapes (`\x1b`) for all that a terminal would obey rather than show: control characters, marks that
    change the direction of the text, halves of surrogate pairs. Line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t\u00a0\u202f"
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def in_markdown(text: str) -> str:
    """A text as one cell of a table, which shows its markup instead of obeying it."""
    text = _BEFORE_A_MARK.sub(r"\\\\", printable(" ".join(text.split()))).replace("|", "\\|")
    for mark, shown in _MARKUP.items():
        text = text.replace(mark, shown)
    return text


class PrintableFormatter(logging.Formatter):
    """Formats messages that quote files: nothing in them reaches the terminal as a command."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

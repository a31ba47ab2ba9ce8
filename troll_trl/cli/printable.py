"""printable(): texts of models, files and runs, for a terminal."""

import logging


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


class PrintableFormatter(logging.Formatter):
    """Formats messages that quote files: nothing in them reaches the terminal as a command."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

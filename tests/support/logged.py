"""What the package logs for its user, gathered."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str = "troll_trl.evaluation") -> Iterator[list[str]]:
    """The messages of a logger and those below it, from INFO on."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

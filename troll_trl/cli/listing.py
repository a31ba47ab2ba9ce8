"""show: print what is asked for, to a reader such as `head` that may have seen enough."""

import os
import signal
import sys


def show(text: str) -> None:
    """
    Print a text. If its reader closes the pipe, the process ends as one that SIGPIPE kills, without a traceback.

    Raises:
        SystemExit: the pipe is closed.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at its end
        raise SystemExit(128 + signal.SIGPIPE) from None

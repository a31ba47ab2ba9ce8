"""A lock on a folder that one run at a time may write to."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "_lock"  # transformers uploads no file whose name begins with an underscore


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock. The kernel releases the lock when this process dies. Raises a `ValueError` if
    another process holds the lock, or if the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise ValueError(f"The output folder {folder} cannot be written to: {error.strerror}. Name another.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process is writing a run into {folder}. Wait until it has ended, or name another folder."
            ) from None
        except OSError:  # some cluster file systems have no locks
            pass
        os.register_at_fork(after_in_child=file.close)  # a worker that outlives this process does not keep the lock
        yield

"""Limits of time that catch a hang, and nothing else: a test may run on a machine that is busy with other work."""

from pathlib import Path

HANG = 900  # seconds


def is_gone(pid: int | str) -> bool:
    """Whether a process has ended, even if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

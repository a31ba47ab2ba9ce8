"""Limits of time that catch a hang, and nothing else: a test may run on a machine that is busy with other work."""

HANG = 900  # seconds

"""Limits of time that catch a hang, and nothing else: a test may run on a machine that is busy with other work."""

HANG = 1500  # seconds; below the half hour after which gloo gives a lost rank up by itself

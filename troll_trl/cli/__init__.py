"""The command line: one module for each command, their settings, and what a run prints. May import every package."""

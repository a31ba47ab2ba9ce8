"""Prompts, and problems with their gold answers: from a hub or a file, checked. May import `rewards`."""

from troll_trl.data.loading import load_math_dataset

__all__ = ["load_math_dataset"]

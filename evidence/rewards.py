"""A reward of no weight: what a run of a real model learns beside the form of its answers."""

import re
from typing import Any


def last_number_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the last whole number of a completion is the answer, in whatever form, else 0.0."""
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(found[-1:] == re.findall(r"\d+", gold)) for found, gold in zip(numbers, solution, strict=True)]

"""A reward of weight 0, which shows what a real model learns apart from the form of its answers."""

import re
from typing import Any


def last_number_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any) -> list[float]:
    """1.0 if the last whole number of a completion is the answer, in any form, else 0.0."""
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(found[-1:] == re.findall(r"\d+", gold)) for found, gold in zip(numbers, solution, strict=True)]

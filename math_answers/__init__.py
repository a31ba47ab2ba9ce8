"""Tells whether a text states the right answer to a mathematical problem: a reward function for any trainer of TRL, its
verifier, problems with gold answers, and evaluation (`math_answers.evaluation`). Imports nothing from `troll_trl`."""

from typing import TYPE_CHECKING, Any

from math_answers.rewards import answer_format_reward, extract_answer, math_accuracy_reward
from math_answers.rewards.verifier import verify

if TYPE_CHECKING:
    from math_answers.data import load_math_dataset

__all__ = ["answer_format_reward", "extract_answer", "load_math_dataset", "math_accuracy_reward", "verify"]


def __getattr__(name: str) -> Any:
    if name == "load_math_dataset":  # loads `datasets`, which no reward needs
        from math_answers.data import load_math_dataset

        return load_math_dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

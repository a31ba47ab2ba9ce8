"""Evaluation of a model on problems with known answers: samples, scores, statistics. May import `data` and `rewards`.
Logs what a user should know under `math_answers.evaluation`, at INFO and above."""

from typing import TYPE_CHECKING, Any

from math_answers.evaluation.arguments import EvaluationArguments

if TYPE_CHECKING:
    from math_answers.evaluation.run import evaluate

__all__ = ["EvaluationArguments", "evaluate"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":  # loads `datasets`, which neither the statistics nor the parser of arguments needs
        from math_answers.evaluation.run import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

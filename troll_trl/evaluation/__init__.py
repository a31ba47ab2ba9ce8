"""Evaluation of a model on problems with known answers: samples, scores, statistics. May import `data` and `rewards`.
Logs what a user should know under `troll_trl.evaluation`, at INFO and above."""

from typing import TYPE_CHECKING, Any

from troll_trl.evaluation.arguments import EvaluationArguments

if TYPE_CHECKING:
    from troll_trl.evaluation.run import evaluate

__all__ = ["EvaluationArguments", "evaluate"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":  # loads `datasets`, which neither the statistics nor the parser of arguments needs
        from troll_trl.evaluation.run import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # for the site, which lists the module's names
    return sorted(__all__)

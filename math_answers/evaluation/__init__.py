"""Evaluation of models on problems with known answers: samples, scores, statistics. May import `data` and `rewards`.
Logs what a user should know under `math_answers.evaluation`, from INFO on."""

from importlib import import_module

__all__ = ["EvaluationArguments", "compare", "generate_samples", "score_file", "summarize"]

# Loaded on first use: a report takes the statistics alone, without torch
_MODULES = {
    "EvaluationArguments": "arguments",
    "compare": "summary",
    "generate_samples": "runner",
    "score_file": "import_samples",
    "summarize": "summary",
}


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

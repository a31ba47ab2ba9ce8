"""
Evaluation of models on problems with known answers: samples, their scores, and statistics over them. May import `data`
and `rewards`.

    arguments.py       EvaluationArguments: what an evaluation can be told
    benchmarks.py      names on the hub, and local files
    models.py          a model before it is loaded
    prompts.py         what a model is asked
    generation.py      completions, by vLLM or transformers; each sample has a seed of its own
    runner.py          generate_samples(): what is missing is generated, what is there is kept
    provenance.py      Output: the folder, begun or resumed; run.json says what its samples were made with
    samples.py         samples.jsonl and its Parquet copy
    import_samples.py  score_file(): samples of other tools
    scoring.py         the training verifier, and a strict second opinion
    problem_scores.py  what the metrics need of a samples file
    statistics.py      pass@k, majority vote, bootstrap
    summary.py         summarize() and compare(): from the samples to the numbers
    tables.py          the numbers for the terminal and for markdown

What a user should know is logged under `troll_trl.evaluation`, from INFO on.
"""

from importlib import import_module

__all__ = ["EvaluationArguments", "compare", "generate_samples", "score_file", "summarize"]

# Loaded on first use: a report takes the statistics alone, and needs no torch for them
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

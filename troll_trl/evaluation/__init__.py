"""
Evaluation of models on problems with known answers: samples, their scores, and statistics over them.

    arguments.py    EvaluationArguments: what an evaluation can be told
    benchmarks.py   names on the hub, and local files
    models.py       prompts.py: a model before it is loaded, and what it is asked
    generation.py   completions, by vLLM or transformers; each sample has a seed of its own
    runner.py       generate_samples(): what is missing is generated, what is there is kept
    record.py       run.json: what the samples were made with
    samples.py      samples.jsonl and its Parquet copy
    foreign.py      score_file(): samples of other tools
    scoring.py      the training verifier, and a strict second opinion
    statistics.py   pass@k, majority vote, bootstrap
    tally.py        summary.py  tables.py: from the samples to the numbers
"""

from troll_trl.evaluation.arguments import EvaluationArguments
from troll_trl.evaluation.foreign import score_file
from troll_trl.evaluation.runner import generate_samples
from troll_trl.evaluation.summary import compare, summarize

__all__ = [
    "EvaluationArguments",
    "compare",
    "generate_samples",
    "score_file",
    "summarize",
]

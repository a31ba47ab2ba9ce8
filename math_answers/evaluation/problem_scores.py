"""What the metrics need of a samples file: a few numbers for each sample, no text."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from math_answers.evaluation.samples import read_lines
from math_answers.evaluation.scoring import strict_answer, vote
from math_answers.evaluation.statistics import majority_score, pass_at_k

# Completions on which the verifier and the strict comparison disagree: the first of them are shown
EXAMPLES = 3
_SHOWN_CHARACTERS = 300
_NEEDED = ("model", "benchmark", "problem", "sample", "gold", "completion", "reward", "answer", "path", "strict")


class ProblemScores:
    """The scores of one model on one benchmark, and examples on which its two scores disagree."""

    def __init__(self) -> None:
        self.samples = self.unreadable_gold = 0
        self.examples: list[dict[str, Any]] = []
        self._rows: list[tuple] = []

    def add(self, line: dict[str, Any]):
        """Add a sample. One whose gold answer cannot be read is counted only."""
        self.samples += 1
        if line["reward"] is None:
            self.unreadable_gold += 1
            return
        gold = sys.intern(str(line["gold"]))  # one copy for all samples of a problem
        numbers = line["reward"], line["strict"], line.get("tokens"), line.get("truncated")
        self._rows.append((line["problem"], vote(line["answer"]), gold, line["path"], *numbers))
        if line["reward"] != line["strict"] and len(self.examples) < EXAMPLES:
            self.examples.append(_example(line))

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each scored sample, when all have been added."""
        numbers = ["reward", "strict", "tokens", "truncated"]  # NaN if not known
        table = pd.DataFrame(self._rows, columns=["problem", "vote", "gold", "path", *numbers], dtype=object)
        return table.astype(dict.fromkeys(numbers, float))

    @cached_property
    def problems(self) -> pd.DataFrame:
        """A row for each problem, in the order of the file."""
        return self.table.groupby("problem", sort=False).agg(
            rewards=("reward", list), votes=("vote", list), strict=("strict", "mean"), gold=("gold", "first")
        )

    @property
    def counts(self) -> pd.Series:
        """The number of samples of each problem."""
        return self.table.groupby("problem").size()

    def shares(self) -> dict[str, float]:
        """Shares of the scored samples, and their mean number of tokens; NaN if the file does not say."""
        decided = self.table["path"].value_counts(normalize=True)
        return {
            "truncated": self.table["truncated"].mean(),
            "no_answer": decided.get("no_answer", 0.0),
            "unparsable": decided.get("unreadable_answer", 0.0) + decided.get("refused", 0.0),
            "timed_out": decided.get("timeout", 0.0) + decided.get("crash", 0.0),
            "mean_tokens": self.table["tokens"].mean(),
        }

    def metrics(self, ks: Sequence[int], problems: Sequence[str] | None = None) -> pd.DataFrame:
        """Metrics of each problem, a column each: `mean`, `pass@k`, `maj`, `strict`; by default of all problems."""
        chosen = self.problems if problems is None else self.problems.loc[list(problems)]
        rewards = chosen["rewards"]
        metrics = {"mean": rewards.map(np.mean)}
        for k in ks:
            metrics[f"pass@{k}"] = rewards.map(lambda own, k=k: pass_at_k(len(own), own.count(1), k))
        metrics["maj"] = chosen.apply(lambda problem: majority_score(problem["votes"], problem["rewards"]), axis=1)
        return pd.DataFrame(metrics | {"strict": chosen["strict"]})


def read_scores(path: Path) -> dict[tuple[str, str], ProblemScores]:
    """The scores of a `samples.jsonl`, by model and benchmark in the order of the file, which is read line by line."""
    scores: dict[tuple[str, str], ProblemScores] = defaultdict(ProblemScores)
    for number, line in enumerate(read_lines(path), 1):
        if lacking := [name for name in _NEEDED if name not in line]:
            raise ValueError(
                f"{path}: sample {number} has no {', '.join(lacking)}. Score other tools' files: `samples`."
            )
        scores[line["model"], line["benchmark"]].add(line)
    return scores


def _example(line: dict[str, Any]) -> dict[str, Any]:
    shown = {name: line[name] for name in ("problem", "sample", "gold", "answer", "reward", "strict")}
    shown["strict_answer"] = strict_answer(line["completion"])
    shown["end"] = line["completion"][-_SHOWN_CHARACTERS:]
    return {name: value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value for name, value in shown.items()}

"""What the metrics need of a samples file: a few numbers for each sample, no text."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from troll_trl.evaluation.samples import read_lines
from troll_trl.evaluation.scoring import strict_answer, vote
from troll_trl.evaluation.statistics import default_ks, problem_metrics

# Completions on which the verifier and the strict comparison disagree are shown so many times
EXAMPLES = 3
_SHOWN_CHARACTERS = 300
_NEEDED = ("model", "benchmark", "problem", "sample", "gold", "completion", "reward", "answer", "path", "strict")


@dataclass
class ProblemScores:
    """The scores of one model on one benchmark, by problem and sample, and what befell the samples."""

    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # the verifier's
    strict: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    votes: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    golds: dict[str, str] = field(default_factory=dict)  # long ones by their digest
    counts: Counter[str] = field(default_factory=Counter)  # of samples
    paths: Counter[str] = field(default_factory=Counter)  # of scored samples, by how the verifier decided
    examples: list[dict[str, Any]] = field(default_factory=list)  # the first that the two scores disagree on

    def add(self, line: dict[str, Any]):
        self.counts["samples"] += 1
        if line["reward"] is None:
            self.counts["unreadable_gold"] += 1
            return
        problem = line["problem"]
        self.rewards[problem].append(line["reward"])
        self.strict[problem].append(line["strict"])
        self.votes[problem].append(_short(vote(line["answer"])))
        self.golds.setdefault(problem, _short(line["gold"]))
        self.counts["scored"] += 1
        self.paths[line["path"]] += 1
        for name in ("tokens", "truncated"):
            if line.get(name) is not None:
                self.counts[name] += int(line[name])
                self.counts[f"with_{name}"] += 1
        if line["reward"] != line["strict"]:
            self.counts["disagreements"] += 1
            if len(self.examples) < EXAMPLES:
                self.examples.append(_example(line))

    @property
    def samples_per_problem(self) -> int:
        """The fewest samples that a problem has."""
        return min(map(len, self.rewards.values()))

    def share(self, name: str, per: str) -> float | None:
        """A count over another; `None` if the file says nothing of it."""
        return self.counts[name] / self.counts[per] if self.counts[per] else None

    def share_of_paths(self, *paths: str) -> float:
        """Share of the scored samples that the verifier decided in one of these ways."""
        return sum(self.paths[path] for path in paths) / self.counts["scored"]

    def metrics(self, ks: Sequence[int] | None = None, problems: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """
        Metrics of each problem, `(problems,)` by name: `mean`, `pass@k`, `maj`, `strict`; by default for all k that the
        samples allow, and of all problems.
        """
        chosen = list(self.rewards) if problems is None else problems
        ks = default_ks(self.samples_per_problem) if ks is None else ks
        columns = problem_metrics([self.rewards[id] for id in chosen], [self.votes[id] for id in chosen], ks)
        return columns | {"strict": np.array([np.mean(self.strict[id]) for id in chosen])}


def read_scores(path: Path) -> dict[tuple[str, str], ProblemScores]:
    """The scores of a `samples.jsonl`, by model and benchmark in the order of the file, which is read line by line."""
    scores: dict[tuple[str, str], ProblemScores] = defaultdict(ProblemScores)
    for number, line in enumerate(read_lines(path), 1):
        lacking = [name for name in _NEEDED if name not in line]
        if lacking:
            raise ValueError(
                f"{path}: sample {number} has no {', '.join(lacking)}; it has {', '.join(line) or 'nothing'}. A "
                "file of another tool is scored first: `samples`."
            )
        scores[line["model"], line["benchmark"]].add(line)
    return scores


def _short(value: Any) -> Any:
    """Long texts by their digest, so that a file's answers cost little memory."""
    if isinstance(value, str) and len(value) > 64:
        return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()
    return value


def _example(line: dict[str, Any]) -> dict[str, Any]:
    shown = {name: line[name] for name in ("problem", "sample", "gold", "answer", "reward", "strict")}
    shown["strict_answer"] = strict_answer(line["completion"])
    shown["end"] = line["completion"][-_SHOWN_CHARACTERS:]
    return {name: value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value for name, value in shown.items()}

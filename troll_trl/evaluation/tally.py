"""What the metrics need of a samples file: a few numbers for each sample, no text."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from troll_trl.evaluation.samples import Report, read_lines
from troll_trl.evaluation.scoring import strict_answer, vote
from troll_trl.evaluation.statistics import default_ks, problem_metrics

# Completions on which the verifier and the strict comparison disagree are shown so many times
EXAMPLES = 3
_SHOWN_CHARACTERS = 300
_NEEDED = ("model", "benchmark", "problem", "sample", "gold", "completion", "reward", "answer", "path", "strict")


@dataclass
class Tally:
    """
    Numbers of the samples of one model on one benchmark.

    Parameters:
        rewards (`dict[str, list[float]]`):
            Verifier's rewards by problem.
        strict (`dict[str, list[float]]`):
            Strict scores, likewise.
        votes (`dict[str, list]`):
            What each sample votes for, likewise.
        golds (`dict[str, str]`):
            Digest of the gold answer by problem.
        counts (`dict[str, int]`):
            Samples by what befell them.
        paths (`dict[str, int]`):
            Scored samples by how the verifier decided.
        examples (`list[dict]`):
            The first samples that the two scores disagree on.
    """

    rewards: dict[str, list[float]] = field(default_factory=dict)
    strict: dict[str, list[float]] = field(default_factory=dict)
    votes: dict[str, list[Any]] = field(default_factory=dict)
    golds: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    paths: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]):
        self._count("samples")
        if line["reward"] is None:
            self._count("unreadable_gold")
            return
        problem = line["problem"]
        self.rewards.setdefault(problem, []).append(line["reward"])
        self.strict.setdefault(problem, []).append(line["strict"])
        self.votes.setdefault(problem, []).append(_short(vote(line["answer"])))
        self.golds.setdefault(problem, _short(line["gold"]))
        self._count("scored")
        if line.get("tokens") is not None:
            self._count("with_tokens")
            self._count("tokens", line["tokens"])
        if line.get("truncated") is not None:
            self._count("with_truncated")
            self._count("truncated", line["truncated"])
        self.paths[line["path"]] = self.paths.get(line["path"], 0) + 1
        if line["reward"] != line["strict"]:
            self._count("disagreements")
            if len(self.examples) < EXAMPLES:
                self.examples.append(_example(line))

    def _count(self, name: str, number: int = 1):
        self.counts[name] = self.counts.get(name, 0) + int(number)

    @property
    def samples_per_problem(self) -> int:
        """The fewest samples that a problem has."""
        return min(map(len, self.rewards.values()))

    def share(self, name: str, of: str) -> float | None:
        """A count over another; `None` if the file says nothing of it."""
        return self.counts[name] / self.counts[of] if of in self.counts else None

    def share_of_paths(self, *paths: str) -> float:
        """Share of the scored samples that the verifier decided in one of these ways."""
        return sum(self.paths.get(path, 0) for path in paths) / self.counts["scored"]

    def metrics(self, ks: Sequence[int] | None = None, problems: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """
        Metrics of each problem.

        Args:
            ks (`Sequence[int]`, *optional*):
                k of each pass@k; by default those that the samples allow.
            problems (`Sequence[str]`, *optional*):
                Problems, in the order wanted; by default all.

        Returns:
            `dict[str, np.ndarray]`: (problems,) by name: `mean`, `pass@k`, `maj`, `strict`.
        """
        chosen = list(self.rewards) if problems is None else problems
        ks = default_ks(self.samples_per_problem) if ks is None else ks
        columns = problem_metrics([self.rewards[id] for id in chosen], [self.votes[id] for id in chosen], ks)
        return columns | {"strict": np.array([np.mean(self.strict[id]) for id in chosen])}


def read_tallies(path: Path, report: Report) -> dict[tuple[str, str], Tally]:
    """
    Count a samples file, a line at a time.

    Args:
        path (`Path`):
            `samples.jsonl` of an evaluation.
        report (`Callable[[str], None]`):
            Told of a torn last line.

    Returns:
        `dict[tuple[str, str], Tally]`: by model and benchmark, in the order of the file.

    Raises:
        ValueError: a line lacks what an evaluation writes.
    """
    tallies: dict[tuple[str, str], Tally] = {}
    for number, line in enumerate(read_lines(path, report), 1):
        lacking = [name for name in _NEEDED if name not in line]
        if lacking:
            raise ValueError(
                f"{path}: sample {number} has no {', '.join(lacking)}; it has {', '.join(line) or 'nothing'}. A "
                "file of another tool is scored first: `samples`."
            )
        tallies.setdefault((line["model"], line["benchmark"]), Tally()).add(line)
    return tallies


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

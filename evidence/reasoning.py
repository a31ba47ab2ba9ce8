"""
Problems of the package reasoning-gym, whose answers are numbers, and their reward.

    python -m evidence.reasoning data/two-kinds products chain-sum --seed 0

writes data/two-kinds/train.jsonl and test.jsonl, which have the same number of problems of each kind, and no problem in
common. evidence/reasoning.yaml has the kinds: names and arguments of reasoning-gym's datasets.
"""

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


def last_number_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of a completion is the answer, else 0: lm-eval's *flexible extraction* of GSM8K."""
    last = [(_NUMBER.findall(completion[-1]["content"]) or ["nan"])[-1] for completion in completions]
    return [float(float(found.replace(",", "")) == float(gold)) for found, gold in zip(last, answer, strict=True)]


def make_split(kinds: list[str], train: int, test: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Training rows and held-out rows, with the same number of each kind. A kind that has fewer problems repeats its
    training rows; with very few, it has too few held-out rows, which is an error."""
    import reasoning_gym  # a machine that only trains does not need it

    known = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    splits = []
    for kind in kinds:
        name, arguments = known[kind]
        # Far apart: reasoning-gym draws problem i of a seed from the seed + i
        dataset = reasoning_gym.create_dataset(name, seed=1_000_000 * seed, size=20 * (train + test), **arguments)
        answers = {row["question"]: row["answer"] for row in dataset}  # each problem once
        rows = [
            {"prompt": [{"role": "user", "content": question}], "answer": answer, "kind": kind}
            for question, answer in answers.items()
        ]
        held_out = min(test // len(kinds), len(rows) // 3)
        chosen = itertools.islice(itertools.cycle(rows[held_out:]), train // len(kinds))
        splits.append((list(chosen), rows[:held_out]))
    return tuple(
        [row for rows in zip(*of_kinds, strict=True) for row in rows] for of_kinds in zip(*splits, strict=True)
    )  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--train", type=int, default=1024)
    parser.add_argument("--test", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    splits = make_split(options.kinds, options.train, options.test, options.seed)
    for name, rows in zip(("train", "test"), splits, strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

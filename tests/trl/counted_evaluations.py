"""Evaluations on any number of ranks, of stored completions whose every number can be counted by hand."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from tiny import saved_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, RLOOConfig
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trainers.clip import ClipGRPOTrainer, ClipRLOOTrainer

CLASSES = {
    "grpo": (TrollGRPOTrainer, TrollGRPOConfig),
    "rloo": (TrollRLOOTrainer, TrollRLOOConfig),
    "grpo clip": (ClipGRPOTrainer, GRPOConfig),
    "rloo clip": (ClipRLOOTrainer, RLOOConfig),
}
MOST = 9  # prompts


def completion(number: int) -> list[int]:
    """Of prompt `number`: `number + 1` tokens. The last one ends it if the number is even."""
    return [3 + number] * number + [3 if number % 2 else 1]


def number_of(prompt: str) -> int:
    return int(prompt.removeprefix("w"))


def value(prompts: list[str], log_metric, **kwargs) -> list[float]:
    log_metric("of_my_own", sum(map(number_of, prompts)) / len(prompts))
    return [float(number_of(prompt)) for prompt in prompts]


def of_thirds(prompts: list[str], **kwargs) -> list[float | None]:
    """A reward for every third prompt."""
    return [10.0 * number_of(prompt) if number_of(prompt) % 3 == 0 else None for prompt in prompts]


def evaluate(algorithm: str, prompts: int, out: Path, stream: bool = False, model: str | None = None, **options: Any):
    """Evaluate on as many `prompts`, and write what this rank logged into the folder `out`."""
    model = model or saved_model(out / "model")  # several ranks need one that exists
    rows = Dataset.from_dict({"prompt": [f"w{number}" for number in range(prompts)]})
    trainer_class, config_class = CLASSES[algorithm]
    rank = os.environ.get("RANK", "0")
    trainer = make_trainer(
        trainer_class,
        config_class,
        out,
        AutoModelForCausalLM.from_pretrained(model),
        reward=[value, of_thirds],
        eval_dataset=IterableDataset.from_generator(lambda: iter(rows)) if stream else rows,
        max_completion_length=MOST,
        **{"beta": 0.0, "reward_weights": [1.0, 0.5], "num_generations_eval": 1} | options,
    )
    if trainer.ref_model is not None:
        with torch.no_grad():
            trainer.ref_model.get_output_embeddings().weight.mul_(0.8)

    def generate(prompt_ids, *args):
        ids = [completion(prompt[-1] - 3) for prompt in prompt_ids]
        return (ids, None) if algorithm.startswith("grpo") else ids

    trainer._generate_single_turn = generate
    trainer.evaluate()
    line = trainer.state.log_history[-1]
    (out / f"rank-{rank}.json").write_text(json.dumps(line))
    return trainer, line


def evaluate_all(cases: dict[str, dict[str, Any]], out: Path, model: str) -> None:
    torch.set_num_threads(1)
    for name, case in cases.items():
        evaluate(out=out / name, model=model, **case)

"""Fifty updates on stored completions, in one process or several: what must not depend on how the work is split."""

import json
from pathlib import Path

from tiny import tiny_model
from trl_comparison import logged, make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

UPDATES = 50
# Every update is over the whole rollout batch of 16 completions, however it is split; the second one is off-policy
OPTIONS = {
    "num_iterations": 2,
    "steps_per_generation": 1,
    "per_device_train_batch_size": 16,
    "max_steps": UPDATES,
    "learning_rate": 3e-3,
    "kl_bound": 0.01,
    "max_completion_length": 8,
}


def train(folder: Path, completions: Path | None = None, **options) -> tuple[list[float], list[float], list[list[int]]]:
    """
    Losses and largest KLs before the projection, update by update, and the completions.

    With `completions`, a file of what another run has sampled, these are taken in place of sampled ones.
    """
    stored = json.loads(completions.read_text()) if completions else None
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, model=tiny_model(spread=3.0), **OPTIONS | options)
    generate, calls = trainer._generate_single_turn, []

    def replay(prompt_ids, *args):
        if stored is None:
            ids, log_probs = generate(prompt_ids, *args)
        else:
            first = len(prompt_ids) * trainer.accelerator.process_index
            ids, log_probs = stored[len(calls)][first : first + len(prompt_ids)], None
        calls.append(ids)
        return ids, log_probs

    trainer._generate_single_turn = replay
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "troll/policy_kl_max"), calls

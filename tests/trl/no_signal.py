"""A run in which every completion has the same reward, in one process or several, and the weights that it changes."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from ranks import leave_together
from trl_comparison import OURS, make_trainer, weights


def no_reward(completion_ids, **kwargs) -> list[float]:
    return [0.0] * len(completion_ids)


def moved(folder: Path, algorithm: str = "grpo", **options) -> list[str]:
    """Names of the weights that are not bit for bit what they were, after 6 updates on 2 rollout batches."""
    options = {"max_steps": 6, "reward": no_reward, **options}
    trainer = make_trainer(*OURS[algorithm], folder, **options)
    start = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == options["max_steps"]
    return [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])]


if __name__ == "__main__":
    changed = moved(Path(sys.argv[1]))
    state = PartialState()
    print(f"rank {state.process_index} of {state.num_processes}: {len(changed)} weights moved", flush=True)
    leave_together()

"""RunCost: every log line says what the run has cost so far."""

import math
import time
from typing import Any

from transformers import TrainerCallback


def generations_for(updates: int, args: Any) -> int:
    """Return how many generations the first `updates` of a run take. `args` is a config of TRL."""
    micro_batches = updates * args.gradient_accumulation_steps  # the first one of a rollout batch generates all of it
    return math.ceil(micro_batches / (args.steps_per_generation * args.num_iterations))


class RunCost(TrainerCallback):
    """
    Adds what the run has cost so far to every log line of `trainer_state.json`: the completions that all ranks have
    generated for training, and the minutes since the training began, evaluations included. A resumed run continues from
    the last line of its log.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        before = max((line.get("cost/minutes", 0.0) for line in state.log_history), default=0.0)
        self._start_time = time.monotonic() - 60 * before

    def on_log(self, args, state, control, **kwargs):
        state.log_history[-1] |= {  # the Trainer has copied `logs` there by now
            "cost/completions": generations_for(state.global_step, args) * args.generation_batch_size,
            # An evaluation may precede the training
            "cost/minutes": (time.monotonic() - self._start_time) / 60 if state.global_step else 0.0,
        }

"""RunCost: what a run has cost so far, for every log line."""

import resource
import time
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback


class RunCost(TrainerCallback, ExportableState):
    """
    What a run has cost so far. A resumed run continues from its checkpoint.

    - `cost/completions`: the completions that all ranks have generated for training, which the trainer counts.
    - `cost/minutes`: the time of training, evaluations included.
    - `memory/gpu_peak_gib`: the most that torch has allocated on this process's GPU, without a vLLM server's models and
      caches. Without a GPU, `memory/cpu_peak_gib` is the process's largest resident set.
    """

    def __init__(self):
        self.completions, self._minutes = 0, 0.0
        self._since: float | None = None  # the beginning of a training that runs; `_minutes` are those before it

    def _minutes_so_far(self) -> float:
        return self._minutes + (0.0 if self._since is None else (time.monotonic() - self._since) / 60)

    def metrics(self, device: torch.device) -> dict[str, float]:
        if device.type == "cuda":
            peak = {"memory/gpu_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}
        else:
            peak = {"memory/cpu_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # of KiB
        return {"cost/completions": self.completions, "cost/minutes": self._minutes_so_far(), **peak}

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"completions": self.completions, "_minutes": self._minutes_so_far()}}

    def on_train_begin(self, args, state, control, **kwargs):
        # A checkpoint of TRL's own trainer lacks our state, and the Trainer needs the key when it saves the next one
        saved = state.stateful_callbacks.setdefault("RunCost", RunCost().state())
        self.__dict__.update((saved if state.global_step else RunCost().state())["attributes"])
        self._since = time.monotonic()

    def on_train_end(self, args, state, control, **kwargs):
        self._minutes, self._since = self._minutes_so_far(), None

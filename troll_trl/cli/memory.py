"""PeakMemory: the peak memory of a training run, in its log lines."""

import resource

import torch
from transformers import TrainerCallback

GIB = 2**30


class PeakMemory(TrainerCallback):
    """
    Adds the peak memory of this process since its start, in GiB, to every log line of `trainer_state.json`.

    `memory/gpu_peak_gib` is what torch had allocated at most on this process's GPU (models and caches of a vLLM server
    of its own not included); without a GPU, `memory/cpu_peak_gib` is the largest resident set. TRL logs neither, and
    `skip_memory_metrics=False` of the Trainer only reports it at the end of a run.
    """

    def on_log(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            line = {"memory/gpu_peak_gib": torch.cuda.max_memory_allocated(args.device) / GIB}
        else:
            line = {"memory/cpu_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}  # from KiB
        state.log_history[-1].update(line)  # the Trainer has copied `logs` there by now

"""Callbacks of the training command: one short line per log, and the peak memory in every log line."""

import resource
import sys
import time

import torch
from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback

# What a log line shows: its label, the metric, its format. TRL logs three times as many for trackers.
_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("length", "completions/mean_length", ".0f"),
    ("loss", "loss", ".3g"),
    ("gradient", "grad_norm", ".2g"),
    ("clipped", "clip_ratio/region_mean", ".2%"),
    ("projected", "troll/projected_fraction", ".2%"),
    ("KL", "troll/policy_kl_mean", ".2g"),
    ("max KL", "troll/policy_kl_max", ".3g"),
    ("after", "troll/kl_max", ".3g"),
)
_EVAL_COLUMNS = _COLUMNS[:2]  # an evaluation samples from the policy that it scores: nothing is off-policy
_GIB = 2**30


class ProgressLine(ProgressCallback):
    """
    The progress bar, with one short line per log in place of the whole dictionary. A log file has only the lines, which
    then begin with `step 48/400, 01:12 < 08:40`: the time taken and the time left.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._start_time, self._start_step = time.monotonic(), state.global_step
        if self.training_bar is not None and not sys.stderr.isatty():
            self.training_bar.disable = True

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        evaluation = "eval_reward" in logs
        prefix, columns = ("eval_", _EVAL_COLUMNS) if evaluation else ("", _COLUMNS)
        shown = [f"{label} {logs[prefix + name]:{form}}" for label, name, form in columns if prefix + name in logs]
        if shown:
            step = f"{prefix.replace('_', ' ')}step {state.global_step}{self._how_far(state)}"
            self.training_bar.write(f"{step}: {', '.join(shown)}")

    def _how_far(self, state) -> str:
        if sys.stderr.isatty():  # the bar says it
            return ""
        elapsed, done = time.monotonic() - self._start_time, state.global_step - self._start_step
        left = f" < {tqdm.format_interval(elapsed / done * (state.max_steps - state.global_step))}" if done else ""
        return f"/{state.max_steps}, {tqdm.format_interval(elapsed)}{left}"


class PeakMemory(TrainerCallback):
    """
    Adds the peak memory of this process since its start, in GiB, to every log line of `trainer_state.json`.

    `memory/gpu_peak_gib` is the most that torch had allocated on this process's GPU, without the models and caches of
    a vLLM server. Without a GPU, `memory/cpu_peak_gib` is the largest resident set.
    """

    def on_log(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            line = {"memory/gpu_peak_gib": torch.cuda.max_memory_allocated(args.device) / _GIB}
        else:
            kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            line = {"memory/cpu_peak_gib": kibibytes * 1024 / _GIB}
        state.log_history[-1].update(line)  # the Trainer has copied `logs` there by now

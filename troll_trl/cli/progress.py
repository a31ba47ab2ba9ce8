"""ProgressLine: the progress bar of a training run, with one short line per log."""

import sys
import time

from transformers import ProgressCallback

# What a log line shows: its label, the metric, its format. TRL logs three times as many, which trackers show.
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


def minutes(seconds: float) -> str:
    """`1:12` or `3:01:12`, as progress bars write it."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ProgressLine(ProgressCallback):
    """
    The progress bar, with one short line per log in place of the whole dictionary. In a log file there are only the
    lines, and these say how far the run is: `step 48/400, 1:12 < 8:40`, the time taken and the time left.
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
        left = f" < {minutes(elapsed / done * (state.max_steps - state.global_step))}" if done else ""
        return f"/{state.max_steps}, {minutes(elapsed)}{left}"

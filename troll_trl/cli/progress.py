"""ProgressLine: the progress bar of a training run, with one short line per log."""

import sys

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


class ProgressLine(ProgressCallback):
    """The progress bar, with one short line per log in place of the whole dictionary; only the lines in a log file."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
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
            self.training_bar.write(f"{prefix.replace('_', ' ')}step {state.global_step}: {', '.join(shown)}")

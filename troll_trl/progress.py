"""ProgressLine: the progress bar of a training run, with one short line per log."""

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


class ProgressLine(ProgressCallback):
    """The progress bar, with one short line per log in place of the whole dictionary."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        prefix = "eval_" if "eval_reward" in logs else ""
        shown = [f"{label} {logs[prefix + name]:{form}}" for label, name, form in _COLUMNS if prefix + name in logs]
        if shown:
            self.training_bar.write(f"{prefix.replace('_', ' ')}step {state.global_step}: {', '.join(shown)}")

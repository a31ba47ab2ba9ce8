"""The training command's progress bar prints a short line per log."""

import sys
import time

from tqdm import tqdm
from transformers import ProgressCallback

# A log line shows these metrics: label, name and format. TRL logs three times as many for trackers.
_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("length", "completions/mean_length", ".0f"),
    ("loss", "loss", ".3g"),
    ("gradient", "grad_norm", ".2g"),
    ("rate x", "troll/rate_factor", ".3g"),
    ("clipped", "clip_ratio/region_mean", ".2%"),
    ("projected", "troll/projected_fraction", ".2%"),
    ("penalized", "troll/penalized_fraction", ".2%"),
    ("KL", "troll/policy_kl_mean", ".2g"),
    ("max KL", "troll/policy_kl_max", ".3g"),
    ("after", "troll/kl_max", ".3g"),
)


class ProgressLine(ProgressCallback):
    """
    The progress bar, with one short line per log in place of the whole dictionary: `step 48/400, 01:12 < 08:40: …`, the
    time taken and the time left. A log file gets only these lines.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._start_time, self._start_step, self.current_step = time.monotonic(), state.global_step, 0
        if state.is_world_process_zero:
            # The base class would draw an empty bar into a log file, and our first line would follow it
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None:
            return
        # An evaluation samples from the policy that it scores: nothing is off-policy
        prefix, columns = ("eval_", _COLUMNS[:2]) if "eval_reward" in logs else ("", _COLUMNS)
        values = {name: logs.get(prefix + name) for _, name, _ in columns}
        # A reward is `None` if no row had one
        shown = [f"{label} {values[name]:{form}}" for label, name, form in columns if values[name] is not None]
        if shown:
            elapsed, done = time.monotonic() - self._start_time, state.global_step - self._start_step
            left = f" < {tqdm.format_interval(elapsed / done * (state.max_steps - state.global_step))}" if done else ""
            how_far = f"step {state.global_step}/{state.max_steps}, {tqdm.format_interval(elapsed)}{left}"
            self.training_bar.write(f"{prefix.replace('_', ' ')}{how_far}: {', '.join(shown)}")

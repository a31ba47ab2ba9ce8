"""What keeps a long run alive: numbers that are not finite, exact checkpoints, checks of the input. May import
`kernels` and `trust_region`."""

# Each of these is switched off if a part of TRL or transformers that it overrides has moved. `trainers/trl_compat.py`
# lists the parts, and looks for them.
RESUME, GUARD = "exact resuming inside a rollout batch", "skipping updates that are not finite"
CHECKPOINTS = "complete or absent checkpoints, with the state of a rollout batch"
PROMPTS, TIED = "the check of prompts", "the silence about tied weights"

"""The trainers and configs that a user swaps in for TRL's. `trl_compat.py` lists the private parts of TRL in use. May
import `kernels`, `lm_head`, `resilience` and `trust_region`."""

from troll_trl.trainers import trl_compat  # noqa: F401 (first: a failing import then names the supported versions)

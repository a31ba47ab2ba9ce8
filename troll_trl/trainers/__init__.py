"""The trainers and configs that a user swaps in for TRL's. `trl_compat.py` lists the private parts of TRL in use. May
import `kernels`, `lm_head`, `resilience` and `trust_region`."""

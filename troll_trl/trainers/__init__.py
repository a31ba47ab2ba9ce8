"""The trainers and configs that a user swaps in for TRL's. What they reach into of TRL is listed in `trl_compat.py`.
May import `lm_head`, `resilience` and `trust_region`."""

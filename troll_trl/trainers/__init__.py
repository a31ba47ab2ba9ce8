"""The trainers and configs that a user swaps in for TRL's. May import `compat`, `fields`, `kernels`, `lm_head`,
`resilience` and `trust_region`."""

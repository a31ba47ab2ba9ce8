"""The trainers and configs that a user swaps in for TRL's. They may import every room but `evaluation`, `report` and
`cli`; whatever is reached into of TRL is listed in `trl_compat.py`."""

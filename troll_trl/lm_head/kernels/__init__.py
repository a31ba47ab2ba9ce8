"""The operations on one tile of logits: each a Triton kernel beside its torch twin. Import torch and Triton alone."""

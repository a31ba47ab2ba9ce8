"""The columns of a rollout batch that hold the old policy. TRL shuffles and splits them with its own columns."""

TOKEN_IDS = "old_token_ids"  # (B, C, K) int32, kept tokens
SPARSE_LOG_PROBS = "old_sparse_logps"  # (B, C, K + 1) float32, log-probabilities of the kept tokens and of the rest
# Log-probabilities of the sampled tokens (B, C). It is TRL's column in GRPO, and its ratio divides by it. RLOO divides
# by their sum, `old_logps`, so there the trainer adds this column
OLD_LOG_PROBS = "old_per_token_logps"

"""The columns of a rollout batch that hold the old policy. TRL shuffles and splits them with its own columns."""

TOKEN_IDS = "old_token_ids"  # (B, C, K) int32, kept tokens
SPARSE_LOG_PROBS = "old_sparse_logps"  # (B, C, K + 1) float32, log-probabilities of the kept tokens and of the rest
# TRL's column of the sampled tokens' log-probabilities (B, C). A trust region without a support reads only this column
OLD_LOG_PROBS = "old_per_token_logps"

"""The method: the trust regions (projection, penalty and mask) and sparse distributions. May import `kernels`, but
neither TRL nor transformers."""

DEFAULT_KL_BOUND = 0.05  # nats, the paper's

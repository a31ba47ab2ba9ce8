"""The method: the projection onto the KL trust region, the mask, and the sparse distribution that both work on.
May import `kernels`, and neither TRL nor transformers."""

DEFAULT_KL_BOUND = 0.05  # nats, the paper's

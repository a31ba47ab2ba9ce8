"""The method: the trust regions (projection, penalty and mask) and sparse distributions. May import `fields` and
`kernels`, but neither TRL nor transformers."""

DEFAULT_KL_BOUND = 0.05  # nats, the paper's
DEFAULT_TAIL_MASS = 1e-5  # the paper's

# Two float32 evaluations of the same weights, each with a log-sum-exp over a vocabulary, differ by at most this share
# of a log-probability. Measured differences are about 2⁻²⁰.
ROUNDING = 2**-17

# Limits of the log-ratios in a loss in float32. Far below, the regression divided by the ratio overflows. Far above, a
# weight of 0 would multiply an infinite ratio, and a cap divided by the ratio would underflow
LOWEST_LOG_RATIO, HIGHEST_LOG_RATIO = -40.0, 80.0

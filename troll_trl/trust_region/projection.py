"""project(): the KL trust-region projection of a token's distribution, and its gradient through the multiplier.

`p` is the policy, `q` the old policy, `ε` the KL bound (TROLL, arXiv 2510.03817, section 3):

    π = argmin KL(π‖p)  subject to  KL(π‖q) ≤ ε        log π = (η log q + log p)/(η + 1) − log Z

With `d = log p − log q` and `t = 1/(η + 1)` the solutions are the one-parameter exponential family

    π_t ∝ q·exp(t·d)      ψ(t) = log E_q[exp(t·d)]      μ = E_π[d]      σ² = Var_π[d]
    f(t) = KL(π_t‖q) = t·μ − ψ(t)                        f′(t) = t·σ² ≥ 0

so the root of `f(t) = ε` in (0, 1] is unique, and `t = 1` when the policy is inside the bound.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from troll_trl.kernels.dispatch import has_float64
from troll_trl.kernels.projection import RELATIVE_TOLERANCE, kl_divergence, project_rows, project_rows_backward

__all__ = ["Projection", "kl_divergence", "project"]


class Projection(NamedTuple):
    """
    Result of [`project`]. Only `log_probs` carries gradient.

    Attributes:
        log_probs (`torch.Tensor` of shape `(..., S)`):
            Log-probabilities of the projected policy π, in the dtype of the inputs.
        eta (`torch.Tensor` of shape `(...)`):
            Multiplier η ≥ 0 of the bound; 0 where the policy is inside it.
        policy_kl (`torch.Tensor` of shape `(...)`):
            KL(p‖q) of the policy before the projection, in nats.
        kl (`torch.Tensor` of shape `(...)`):
            KL(π‖q) after the projection, in nats.
    """

    log_probs: torch.Tensor
    eta: torch.Tensor
    policy_kl: torch.Tensor
    kl: torch.Tensor


def project(policy_log_probs: torch.Tensor, old_log_probs: torch.Tensor, kl_bound: float) -> Projection:
    """
    Project every row of the policy onto the KL trust region of its old policy (TROLL, arXiv 2510.03817, section 3).

    Rows inside the bound are returned bit for bit; the others are solved in float64 whatever the input dtype. The
    gradient with respect to `policy_log_probs` goes through the multiplier η; `old_log_probs` gets none. A slot with
    −∞ in both policies is unused and contributes nothing anywhere. Where only the old policy is zero, so is π, and the
    bound holds for the policy restricted to the old policy's support.

    Args:
        policy_log_probs (`torch.Tensor` of shape `(..., S)`, float32 or float64):
            Normalised log-probabilities `log p` of the policy. `-inf` is allowed.
        old_log_probs (`torch.Tensor` of the same shape and dtype):
            Normalised log-probabilities `log q` of the old policy. `-inf` is allowed.
        kl_bound (`float`):
            Bound ε on KL(π‖q), in nats. Positive; `inf` switches the projection off.

    Returns:
        [`Projection`]: log-probabilities `(..., S)`, and η, KL before and KL after `(...)`. Where the bound is active,
        `|KL(π‖q) − ε| ≤ 1e-3·ε`; in float32 for ε from about 1e-4 up, below which the inputs' own rounding exceeds it.

    Raises:
        ValueError: `kl_bound` not positive or NaN; shapes or dtypes that differ; a dtype other than the two; NaN in
            the log-probabilities. (The Triton kernel, which nothing waits for, returns NaN for a row with NaN.)
    """
    kl_bound = float(kl_bound)
    if not kl_bound > 0:  # also catches NaN
        raise ValueError(f"`kl_bound` must be positive, got {kl_bound}.")
    shape = policy_log_probs.shape
    if shape != old_log_probs.shape or len(shape) == 0 or shape[-1] == 0:
        raise ValueError(
            "`policy_log_probs` and `old_log_probs` must have one shape (..., S), S at least 1, got "
            f"{tuple(shape)} and {tuple(old_log_probs.shape)}."
        )
    dtypes = (policy_log_probs.dtype, old_log_probs.dtype)
    if dtypes[0] != dtypes[1] or dtypes[0] not in RELATIVE_TOLERANCE:
        raise ValueError(f"Both log-probabilities must be float32 or both float64, got {dtypes[0]} and {dtypes[1]}.")
    device = policy_log_probs.device
    if has_float64(device):
        return Projection(*_Project.apply(policy_log_probs, old_log_probs, kl_bound))
    results = _Project.apply(policy_log_probs.cpu(), old_log_probs.cpu(), kl_bound)
    return Projection(*(x.to(device) for x in results))


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_p, log_q, kl_bound):
        shape, dtype = log_p.shape, log_p.dtype
        flat_p, flat_q = log_p.reshape(-1, shape[-1]), log_q.reshape(-1, shape[-1])  # (N, S)
        projected, t, policy_kl, kl = project_rows(flat_p, flat_q, kl_bound)
        ctx.save_for_backward(flat_p, flat_q, projected, t)
        # Rounded log-probabilities sum to 1 only nearly, and can make the KL of near-equal policies a little negative
        outputs = [x.clamp(min=0).to(dtype).reshape(shape[:-1]) for x in (1 / t - 1, policy_kl, kl)]
        ctx.mark_non_differentiable(*outputs)
        return projected.reshape(shape), *outputs

    # Gradient (implicit function theorem). For an upstream gradient g on log π_t at a fixed t,
    #     ∂L/∂d_j = t·(g_j − G·π_j)                                   with G = Σ_i g_i,
    # and through t, with ∂ log π_i/∂t = d_i − μ and, from f(t, d) = ε,
    #     ∂t/∂d_j = −(∂f/∂d_j)/f′ = −t·π_j (d_j − μ)·t/(t·σ²) = −t·π_j (d_j − μ)/σ².
    # Together: ∂L/∂d_j = t·[g_j − G·π_j − (Σ_i g_i (d_i − μ))·π_j (d_j − μ)/σ²], the softmax gradient scaled by t, less
    # the component that would leave the trust region. q is a constant, so ∂L/∂ log p = ∂L/∂d. Inside the bound, t = 1
    # and only the first two terms stay: there log π is log p, taken as the output of a log-softmax.
    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_pi, *_):
        log_p, log_q, log_pi, t = ctx.saved_tensors
        grad = grad_log_pi.reshape(log_pi.shape)
        return project_rows_backward(grad, log_p, log_q, log_pi, t).reshape(grad_log_pi.shape), None, None

"""project(): the KL trust-region projection of a token's distribution, and its gradient through the multiplier.

`p` is the policy, `q` the old policy, `ε` the KL bound (TROLL, arXiv 2510.03817, section 3):

    π = argmin KL(π‖p)  subject to  KL(π‖q) ≤ ε        log π = (η log q + log p)/(η + 1) − log Z

With `d = log p − log q` and `t = 1/(η + 1)` the solutions are the one-parameter exponential family

    π_t ∝ q·exp(t·d)      ψ(t) = log E_q[exp(t·d)]      μ = E_π[d]      σ² = Var_π[d]
    f(t) = KL(π_t‖q) = t·μ − ψ(t)                        f′(t) = t·σ² ≥ 0

so the root of `f(t) = ε` in (0, 1] is unique, and `t = 1` when the policy is inside the bound.
"""

import math
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from troll_trl.kernels import projection as kernel
from troll_trl.kernels.dispatch import has_float64
from troll_trl.kernels.projection import (
    EXP_UNDERFLOW,
    MAX_EVALUATIONS,
    NEWTON_EVALUATIONS,
    RELATIVE_TOLERANCE,
    ZERO_POLICY_LOG_RATIO,
)

# PyTorch converts this number of rows to float64 at a time: about ten tensors of 2 MiB at K = 64
_FLOAT64_ROWS = 4096
_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # log π `(N, S)`; t, KL(p‖q) and KL(π‖q) `(N,)`


class Projection(NamedTuple):
    """
    Result of [`project`]. Only `log_probs` carries gradient.

    Attributes:
        log_probs (`torch.Tensor` of shape `(..., S)`):
            Log-probabilities of the projected policy π, in the dtype of the inputs.
        eta (`torch.Tensor` of shape `(...)`):
            Multiplier η ≥ 0 of the bound; 0 if the policy, restricted to the old policy's support, is inside it.
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
    Project each token's policy onto the KL trust region around its old policy (TROLL, arXiv 2510.03817, section 3). A
    row is the distribution of one token.

    Rows inside the bound are returned bit for bit; the others are solved in float64 whatever the input dtype. The
    gradient with respect to `policy_log_probs` goes through the multiplier η, and that of a row inside the bound is the
    gradient of a log-softmax; `old_log_probs` gets none. A slot with −∞ in both policies is unused and contributes
    nothing anywhere. Where only the old policy is zero, π is zero, too. The bound then holds for the policy restricted
    to the old policy's support.

    Args:
        policy_log_probs (`torch.Tensor` of shape `(..., S)`, float32 or float64):
            Normalised log-probabilities `log p` of the policy. `-inf` is allowed.
        old_log_probs (`torch.Tensor` of the same shape and dtype):
            Normalised log-probabilities `log q` of the old policy. `-inf` is allowed.
        kl_bound (`float`):
            Bound ε on KL(π‖q), in nats. Positive; `inf` switches the projection off.

    Returns:
        [`Projection`]: log-probabilities `(..., S)`, and η, KL before and KL after `(...)`. If the bound is active,
        `|KL(π‖q) − ε| ≤ 1e-3·ε`. In float32 this holds for ε of about 1e-4 or more; below that, the rounding of the
        inputs is larger.

    Raises:
        ValueError: `kl_bound` not positive or NaN; shapes or dtypes that differ; a dtype other than the two; NaN in the
            log-probabilities. (The Triton kernel does not wait for the device, and returns NaN for a row with NaN.)
    """
    kl_bound = float(kl_bound)
    if not kl_bound > 0:  # NaN fails this, too
        raise ValueError(f"`kl_bound` must be positive, got {kl_bound}.")
    shape = policy_log_probs.shape
    if shape != old_log_probs.shape or len(shape) == 0 or shape[-1] == 0:
        raise ValueError(
            "`policy_log_probs` and `old_log_probs` must have the same shape (..., S), S at least 1, got "
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
        shape = log_p.shape
        dtype = log_p.dtype
        flat_p, flat_q = log_p.reshape(-1, shape[-1]), log_q.reshape(-1, shape[-1])  # (N, S)
        # The kernel, or its PyTorch version below
        project_all = kernel.project_rows if kernel.uses_triton(flat_p) else torch_project_rows
        projected, t, policy_kl, kl = project_all(flat_p, flat_q, kl_bound)
        ctx.save_for_backward(flat_p, flat_q, projected, t)
        # Rounding leaves probabilities that sum only approximately to 1, and can make the KL of near-equal policies a
        # little negative
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
        backward = kernel.project_rows_backward if kernel.uses_triton(log_p) else torch_project_rows_backward
        return backward(grad, log_p, log_q, log_pi, t).reshape(grad_log_pi.shape), None, None


def torch_project_rows(log_p: torch.Tensor, log_q: torch.Tensor, kl_bound: float) -> _Rows:
    """PyTorch's version of the kernel: `log π` of rows `(N, S)` in their dtype, and `t`, KL(p‖q) and KL(π‖q) `(N,)` in
    float64."""
    pairs = zip(log_p.split(_FLOAT64_ROWS), log_q.split(_FLOAT64_ROWS), strict=True)
    parts = [_project_chunk(p, q, kl_bound) for p, q in pairs]
    if len(parts) == 1:
        return parts[0]
    log_pi, t, policy_kl, kl = map(torch.cat, zip(*parts, strict=True))
    return log_pi, t, policy_kl, kl


def _project_chunk(flat_p: torch.Tensor, flat_q: torch.Tensor, kl_bound: float) -> _Rows:
    """[`torch_project_rows`] of at most `_FLOAT64_ROWS` rows."""
    policy_kl = kl_divergence(flat_p.double(), flat_q.double())  # (N,)
    # (M,) rows, those with NaN included; M is small against N in training
    outside = (~(policy_kl <= kl_bound)).nonzero().squeeze(-1)

    projected = flat_p.clone()
    t = torch.ones_like(policy_kl)
    kl = policy_kl.clone()
    if len(outside) > 0:
        if policy_kl[outside].isnan().any():
            raise ValueError("`policy_log_probs` or `old_log_probs` hold NaN: the logits they came from do too.")
        rows_p, rows_q = flat_p[outside].double(), flat_q[outside].double()  # (M, S)
        t[outside], log_pi, kl[outside], _ = solve(rows_p, rows_q, kl_bound, RELATIVE_TOLERANCE[flat_p.dtype])
        projected[outside] = log_pi.to(flat_p.dtype)
    return projected, t, policy_kl, kl


def solve(
    log_p: torch.Tensor, log_q: torch.Tensor, kl_bound: float, relative_tolerance: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Solve `KL(π_t‖q) = ε` for `t` by a safeguarded Newton iteration on `sqrt(2 f(t))`.

    `f` starts as a parabola, so `sqrt(2 f(t))` is close to linear and Newton's method on it needs a handful of
    evaluations. A step that leaves the bracket is replaced by a bisection, and so is every other step after 20.

    `log_p` and `log_q` `(M, S)`, float64, are rows with KL(p‖q) > ε, and `kl_bound` is ε. A row stops once
    `|KL − ε| ≤ relative_tolerance·ε`, or when `t` can no longer change. Returns `t` `(M,)` in (0, 1]; `log π_t`
    `(M, S)`; `KL(π_t‖q)` `(M,)`; and the number of evaluations of `f` that each row took `(M,)`.
    """
    d = _log_ratio(log_p, log_q)
    t = torch.ones_like(d[:, 0])
    log_pi, kl, variance = _evaluate(t, d, log_q)
    # At t = 1, π is p, except that it has no mass where q has none. If p left the bound only by this mass, π is the
    # solution
    done = ~(kl > kl_bound)  # as in the kernel, NaN ends the search
    evaluations = torch.ones_like(t, dtype=torch.int64)

    low, high = torch.zeros_like(t), torch.ones_like(t)
    target = math.sqrt(2 * kl_bound)
    t = torch.where(done, t, (kl_bound / kl).sqrt())
    for number in range(MAX_EVALUATIONS):
        if done.all():
            break
        new_log_pi, new_kl, new_variance = _evaluate(t, d, log_q)
        log_pi = torch.where(done.unsqueeze(-1), log_pi, new_log_pi)
        kl, variance = torch.where(done, kl, new_kl), torch.where(done, variance, new_variance)
        evaluations += ~done

        above = kl > kl_bound
        high = torch.where(above & ~done, t, high)
        low = torch.where(above | done, low, t)
        root = (2 * kl).clamp(min=0).sqrt()  # sqrt(2 f); its derivative is f′/sqrt(2 f) = t·σ²/sqrt(2 f)
        step = t + (target - root) * root / (t * variance)
        # Near 0 the magnitude of the root is unknown, so the bracket shrinks by a factor
        middle = torch.where(low > 0, (low + high) / 2, high / 16)
        # Between a plateau and a cliff, Newton's steps shrink the bracket only a little. After 20 of them, every other
        # step halves it
        newton = number < NEWTON_EVALUATIONS or number % 2 == 0
        step = torch.where((step > low) & (step < high) & newton, step, middle)
        converged = (kl - kl_bound).abs() <= relative_tolerance * kl_bound
        done = done | converged | ((step - t).abs() <= 1e-15 * t)
        t = torch.where(done, t, step)

    # Where p is 0, `_log_ratio` has a stand-in for −∞, with which π has vanished: −∞ again
    return t, log_pi.masked_fill((log_p == -math.inf) & (log_pi < EXP_UNDERFLOW), -math.inf), kl, evaluations


def _log_ratio(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`d = log p − log q` `(M, S)`, finite everywhere. Where `q` is 0, `π_t ∝ q·exp(t·d)` is 0 with any `d`. Where only
    `p` is 0, `ZERO_POLICY_LOG_RATIO` makes it vanish."""
    ratio = log_p - log_q.masked_fill(log_q == -math.inf, 0.0)
    return ratio.masked_fill(log_p == -math.inf, ZERO_POLICY_LOG_RATIO)


def _evaluate(t: torch.Tensor, d: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`log π_t` `(M, S)`, `f(t) = KL(π_t‖q)` `(M,)` and `σ² = Var_π[d]` `(M,)` at `t` `(M,)`."""
    log_weights = log_q + t.unsqueeze(-1) * d
    psi = torch.logsumexp(log_weights, -1)
    log_pi = log_weights - psi.unsqueeze(-1)
    pi = log_pi.exp()
    # KL = Σ π·(log π − log q), because t·μ − ψ is a difference of numbers as large as the logits
    kl = (pi * (t.unsqueeze(-1) * d - psi.unsqueeze(-1))).sum(-1)
    mean = (pi * d).sum(-1)
    variance = (pi * (d - mean.unsqueeze(-1)).square()).sum(-1)
    return log_pi, kl, variance


def torch_project_rows_backward(
    grad: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, log_pi: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """PyTorch's version of the kernel for [`_Project.backward`], for `log_p` `(N, S)`. `grad` is the gradient for
    `log_pi` `(N, S)`, and `t` is `(N,)`."""
    # A slot without policy mass or projected mass contributes nothing, whatever its upstream gradient
    g = grad.masked_fill((log_pi == -math.inf) | (log_p == -math.inf), 0.0)
    grad_log_p = g - g.sum(-1, keepdim=True) * log_pi.exp()

    for active in (t < 1).nonzero().squeeze(-1).split(_FLOAT64_ROWS):
        g_active = g[active].double()  # (M, S)
        pi = log_pi[active].double().exp()  # (M, S)
        centred = _log_ratio(log_p[active].double(), log_q[active].double())
        centred = centred - (pi * centred).sum(-1, keepdim=True)  # d − μ
        variance = (pi * centred.square()).sum(-1, keepdim=True)  # σ², (M, 1)
        through_t = (g_active * centred).sum(-1, keepdim=True) * pi * centred / variance
        softmax_gradient = g_active - g_active.sum(-1, keepdim=True) * pi
        grad_log_p[active] = (t[active].unsqueeze(-1) * (softmax_gradient - through_t)).to(g.dtype)
    return grad_log_p.masked_fill(log_p == -math.inf, 0.0)


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p‖q) `(...)` of categorical distributions, in nats, from normalised log-probabilities `(..., S)`, −∞ allowed.
    It is differentiable in both. `0·log 0` is 0, and the KL is `inf` if `q = 0 < p` anywhere."""
    empty = log_p == -math.inf
    log_p = log_p.masked_fill(empty, 0.0)  # −∞ − (−∞) would be NaN, and so would its gradient
    log_ratio = log_p - log_q.masked_fill(empty, 0.0)
    return (log_p.exp() * log_ratio).masked_fill(empty, 0.0).sum(-1)

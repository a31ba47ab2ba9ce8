"""The kernels of the projection and of its gradient. `trust_region/projection.py` has the mathematics and the same
solver in torch, and chooses between the two.

A kernel is a single launch and does not wait for the device. A program solves one row in float64, with its outcomes in
registers: in float64, Newton's method on the KL of two float32 policies meets the bound to 1e-5. A kernel reads 520
bytes per row, which leaves time for float64 arithmetic, even on GPUs with few float64 units.
"""

from __future__ import annotations

import torch

from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton, warps_for_row

# The constants of both solvers. They stop at this relative accuracy |KL − ε|/ε. It is near the rounding of float32
# log-probabilities; for float64 ones it is what the arithmetic can resolve.
RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
MAX_EVALUATIONS = 100
NEWTON_EVALUATIONS = 20  # after these, every other step is a bisection
# Replaces log p − log q = −∞ where only the policy is zero. It is large enough for exp(t·d) to vanish at every t that
# meets the bound without this token. If no t does (−log q(support of p) > ε), the solution is the limit of p → 0.
ZERO_POLICY_LOG_RATIO = -1e8
EXP_UNDERFLOW = -746.0  # exp() is 0 in float64 below this
# The kernel holds at most this many outcomes of a row in registers
MOST_IN_REGISTERS = 512


def uses_triton(log_p: torch.Tensor) -> bool:
    """Whether the kernels, and not torch, project rows `(N, S)`."""
    return use_triton(log_p.device) and log_p.shape[1] <= MOST_IN_REGISTERS


def project_rows(
    log_p: torch.Tensor, log_q: torch.Tensor, kl_bound: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Project rows of a policy `log_p` onto the KL ball around the old policy `log_q`, `(N, S)`, float32 or float64.

    Returns `log π` `(N, S)` in the dtype of the inputs, and `t`, KL(p‖q) and KL(π‖q) `(N,)` in float64; NaN for a row
    with NaN.
    """
    log_p, log_q = log_p.contiguous(), log_q.contiguous()
    rows, slots = log_p.shape
    log_pi = torch.empty_like(log_p)
    t, policy_kl, kl = (torch.empty(rows, dtype=torch.float64, device=log_p.device) for _ in range(3))
    padded = next_power_of_2(slots)
    tensors = (log_p, log_q, log_pi, t, policy_kl, kl)
    constants = {"ZERO_POLICY_LOG_RATIO": ZERO_POLICY_LOG_RATIO, "SLOTS": padded, "num_warps": warps_for_row(padded)}
    constants |= {"BOUND": kl_bound, "TOLERANCE": RELATIVE_TOLERANCE[log_p.dtype]}
    constants |= {"EXP_UNDERFLOW": EXP_UNDERFLOW, "MAX_EVALUATIONS": MAX_EVALUATIONS}
    constants |= {"NEWTON_EVALUATIONS": NEWTON_EVALUATIONS}
    launch(_project_kernel, (rows,), log_p.device, *tensors, slots, **constants)
    return log_pi, t, policy_kl, kl


def project_rows_backward(
    grad: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, log_pi: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """Gradient `(N, S)` with respect to `log_p`, from the gradient with respect to `log_pi` `(N, S)`. The other
    arguments are as in [`project_rows`]."""
    grad, log_p, log_q = grad.contiguous(), log_p.contiguous(), log_q.contiguous()
    rows, slots = log_p.shape
    result = torch.empty_like(log_p)
    padded = next_power_of_2(slots)
    tensors = (grad, log_p, log_q, log_pi, t, result)
    constants = {"ZERO_POLICY_LOG_RATIO": ZERO_POLICY_LOG_RATIO, "SLOTS": padded, "num_warps": warps_for_row(padded)}
    launch(_project_backward_kernel, (rows,), log_p.device, *tensors, slots, **constants)
    return result


@jit()
def _log_ratio_of_row(log_p, log_q, ZERO_POLICY_LOG_RATIO: tl.constexpr):
    """`d = log p − log q`, float64; finite outside of the support of either."""
    ratio = log_p - tl.where(log_q == float("-inf"), 0.0, log_q)
    return tl.where(log_p == float("-inf"), ZERO_POLICY_LOG_RATIO, ratio)


@jit()
def _evaluate_row(t, d, log_q):
    """`log π_t`, `KL(π_t‖q)` and `Var_π[d]` at `t`."""
    log_weights = log_q + t * d
    largest = tl.max(log_weights, axis=0)
    psi = largest + tl.log(tl.sum(tl.exp(log_weights - largest), axis=0))
    log_pi = log_weights - psi
    pi = tl.exp(log_pi)
    kl = tl.sum(pi * (t * d - psi), axis=0)
    centred = d - tl.sum(pi * d, axis=0)
    return log_pi, kl, tl.sum(pi * centred * centred, axis=0)


@jit(do_not_specialize=["slots"])
def _project_kernel(
    log_p_ptr,
    log_q_ptr,
    log_pi_ptr,
    t_ptr,
    policy_kl_ptr,
    kl_ptr,
    slots,
    BOUND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    ZERO_POLICY_LOG_RATIO: tl.constexpr,
    EXP_UNDERFLOW: tl.constexpr,
    MAX_EVALUATIONS: tl.constexpr,
    NEWTON_EVALUATIONS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per row. The row index has 64 bits: rows times slots may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    used = slot < slots
    given = tl.load(log_p_ptr + row * slots + slot, mask=used, other=float("-inf"))
    log_p = given.to(tl.float64)
    log_q = tl.load(log_q_ptr + row * slots + slot, mask=used, other=float("-inf")).to(tl.float64)
    # Compile-time constants: arguments would be rounded to float32
    bound = tl.full((), BOUND, tl.float64)
    one = tl.full((), 1.0, tl.float64)

    empty = log_p == float("-inf")
    difference = tl.where(empty, 0.0, log_p) - tl.where(empty, 0.0, log_q)
    policy_kl = tl.sum(tl.where(empty, 0.0, tl.exp(log_p) * difference), axis=0)
    t, kl, log_pi = one, policy_kl, log_p + policy_kl  # NaN where the KL is NaN, which is neither inside nor outside
    inside = policy_kl <= bound  # false for NaN
    if policy_kl > bound:
        d = _log_ratio_of_row(log_p, log_q, ZERO_POLICY_LOG_RATIO)
        log_pi, kl, variance = _evaluate_row(t, d, log_q)
        # `_evaluate_row` drops the policy's mass outside of the old policy's support. A row that is then inside the
        # bound is done
        going = kl > bound
        low, high = one - one, one
        target = tl.sqrt(2 * bound)
        t = tl.where(going, tl.sqrt(bound / kl), t)
        remaining = MAX_EVALUATIONS
        while going & (remaining > 0):
            remaining -= 1
            log_pi, kl, variance = _evaluate_row(t, d, log_q)
            above = kl > bound
            high = tl.where(above, t, high)
            low = tl.where(above, low, t)
            root = tl.sqrt(tl.where(kl > 0, kl, 0.0) * 2)
            step = t + (target - root) * root / (t * variance)
            # Near 0 the magnitude of the root is unknown, so the bracket shrinks by a factor
            middle = tl.where(low > 0, (low + high) / 2, high / 16)
            newton = (remaining >= MAX_EVALUATIONS - NEWTON_EVALUATIONS) | (remaining % 2 == 1)  # as in `solve`
            step = tl.where((step > low) & (step < high) & newton, step, middle)
            going = (tl.abs(kl - bound) > TOLERANCE * bound) & (tl.abs(step - t) > 1e-15 * t)
            t = tl.where(going, step, t)
        # π is zero where the policy is, unless the bound is out of reach without that token
        log_pi = tl.where(empty & (log_pi < EXP_UNDERFLOW), float("-inf"), log_pi)
    # Inside the bound, π is the policy bit for bit
    tl.store(log_pi_ptr + row * slots + slot, tl.where(inside, given, log_pi.to(given.dtype)), mask=used)
    tl.store(t_ptr + row, t)
    tl.store(policy_kl_ptr + row, policy_kl)
    tl.store(kl_ptr + row, kl)


@jit(do_not_specialize=["slots"])
def _project_backward_kernel(
    grad_ptr,
    log_p_ptr,
    log_q_ptr,
    log_pi_ptr,
    t_ptr,
    result_ptr,
    slots,
    ZERO_POLICY_LOG_RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per row. The row index has 64 bits: rows times slots may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    used = slot < slots
    entry = row * slots + slot
    log_p = tl.load(log_p_ptr + entry, mask=used, other=float("-inf")).to(tl.float64)
    log_pi = tl.load(log_pi_ptr + entry, mask=used, other=float("-inf")).to(tl.float64)
    given = tl.load(grad_ptr + entry, mask=used, other=0.0)
    t = tl.load(t_ptr + row)
    # A slot without policy mass or projected mass contributes nothing, whatever its upstream gradient
    empty = log_p == float("-inf")
    g = tl.where(empty | (log_pi == float("-inf")), 0.0, given.to(tl.float64))
    pi = tl.exp(log_pi)
    grad = g - tl.sum(g, axis=0) * pi
    if t < 1:
        log_q = tl.load(log_q_ptr + entry, mask=used, other=float("-inf")).to(tl.float64)
        d = _log_ratio_of_row(log_p, log_q, ZERO_POLICY_LOG_RATIO)
        centred = d - tl.sum(pi * d, axis=0)
        variance = tl.sum(pi * centred * centred, axis=0)
        grad = t * (grad - tl.sum(g * centred, axis=0) * pi * centred / variance)
    tl.store(result_ptr + entry, tl.where(empty, 0.0, grad).to(given.dtype), mask=used)

"""One operation of the training pass: the coefficients of a token's logit gradient, from the gradient of its
outputs."""

from __future__ import annotations

import math

import torch

from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton, warps_for_row
from troll_trl.kernels.gradient import Coefficients
from troll_trl.kernels.outcomes import MOST_IN_REGISTERS
from troll_trl.kernels.tiles import LogitTransform


# Gradient of one token's outputs with respect to its logits, with upstream g_j on L_j, g_rest on L_rest, h on H and
# G = Σ_j g_j + g_rest. From ∂L_j/∂z_v = 1[v = k_j] − p_v, ∂L_rest/∂z_v = 1[v ∉ K]·p_v/p_rest − p_v and
# ∂H/∂z_v = −p_v (log p_v + H):
#     v = k_j:   g_j − p_v·(G + h·(log p_v + H))
#     v ∉ K:     e_v·[g_rest − p_rest·(G + h·(log p_v + H))]      with e_v = p_v/p_rest = exp(z_v − R)
# The second line needs one exp, of a difference from the rest's own log-sum-exp, so it stays accurate if p_rest is
# tiny. Its bracket is linear in z_v. The first line then overwrites the kept entries.
def gradient_coefficients(
    log_probs: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    transform: LogitTransform,
) -> Coefficients:
    """
    Return the coefficients of the gradient with respect to the products. `constant` and `linear` do not include the
    derivative of soft-capping. All are scaled by `transform.slope` here, because the tile would otherwise need another
    pass.

    The arguments are float32: the sparse log-probabilities `L` `(n, K + 1)` with the rest last, `log Z` and `H` `(n,)`,
    and the upstream gradients `g` `(n, K + 1)` and `h` `(n,)`. `transform` turns products into logits.
    """
    by_triton = use_triton(log_probs.device) and 1 < log_probs.shape[1] <= MOST_IN_REGISTERS + 1
    coefficients = _coefficients_triton if by_triton else _coefficients_torch
    return coefficients(log_probs, log_z, entropy, grad_log_probs, grad_entropy, transform)


def _coefficients_torch(log_probs, log_z, entropy, grad_log_probs, grad_entropy, transform):
    log_z, entropy = log_z.unsqueeze(1), entropy.unsqueeze(1)  # (n, 1)
    g = torch.zeros_like(log_probs) if grad_log_probs is None else grad_log_probs
    g = g.masked_fill(log_probs == -math.inf, 0.0)  # unused slots and an empty rest
    total = g.sum(1, keepdim=True)
    probs = log_probs.exp()
    slope = transform.slope
    kept = g - probs * total
    constant = slope * (g[:, -1:] - probs[:, -1:] * total)
    linear = None
    if grad_entropy is not None:
        h = grad_entropy.unsqueeze(1)
        kept = kept - h * probs * (log_probs.masked_fill(probs == 0, 0.0) + entropy)
        linear = -slope * h * probs[:, -1:]
        constant = constant + linear * (entropy - log_z)
        linear = transform.factor * linear
    kept = slope * kept[:, :-1]
    if transform.softcap is not None:
        logits = (log_probs[:, :-1] + log_z).masked_fill(log_probs[:, :-1] == -math.inf, 0.0)
        kept = kept * transform.softcap_derivative(logits / transform.factor)
    rest = log_probs[:, -1:]
    return Coefficients(kept.contiguous(), torch.where(rest == -math.inf, math.inf, rest + log_z), constant, linear)


def _coefficients_triton(log_probs, log_z, entropy, grad_log_probs, grad_entropy, transform):
    rows, outcomes = log_probs.shape
    new = lambda columns: log_probs.new_empty((rows, columns))
    linear = None if grad_entropy is None else new(1)
    result = Coefficients(new(outcomes - 1), new(1), new(1), linear)
    # Autograd may pass expanded gradients
    upstream = (None if x is None else x.contiguous() for x in (grad_log_probs, grad_entropy))
    tensors = (log_probs, log_z, entropy, *upstream, *result)
    slots = next_power_of_2(outcomes - 1)
    constants = {"HAS_SOFTCAP": transform.softcap is not None, "SLOTS": slots, "num_warps": warps_for_row(slots)}
    scalars = (outcomes - 1, transform.slope, transform.factor)
    launch(_coefficients_kernel, (rows,), log_probs.device, *tensors, *scalars, **constants)
    return result


@jit(do_not_specialize=["k"])
def _coefficients_kernel(
    log_probs_ptr,
    log_z_ptr,
    entropy_ptr,
    grad_ptr,
    grad_entropy_ptr,
    kept_ptr,
    rest_ptr,
    constant_ptr,
    linear_ptr,
    k,
    slope,
    factor,
    HAS_SOFTCAP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per token. The row index has 64 bits: rows times slots may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    slope = tl.cast(slope, tl.float32)
    log_probs_ptr += row * (k + 1)
    log_probs = tl.load(log_probs_ptr + slot, mask=slot < k, other=float("-inf"))
    log_rest = tl.load(log_probs_ptr + k)
    log_z = tl.load(log_z_ptr + row)
    probs, prob_rest = tl.exp(log_probs), tl.exp(log_rest)
    kept = tl.zeros((SLOTS,), tl.float32)
    constant = 0.0
    if grad_ptr is not None:
        grad_ptr += row * (k + 1)
        # Unused slots and an empty rest give no gradient
        g = tl.load(grad_ptr + slot, mask=(slot < k) & (log_probs != float("-inf")), other=0.0)
        g_rest = tl.where(log_rest == float("-inf"), 0.0, tl.load(grad_ptr + k))
        total = tl.sum(g, axis=0) + g_rest
        kept = g - probs * total
        constant = slope * (g_rest - prob_rest * total)
    if grad_entropy_ptr is not None:
        h, entropy = tl.load(grad_entropy_ptr + row), tl.load(entropy_ptr + row)
        kept -= h * probs * (tl.where(probs == 0, 0.0, log_probs) + entropy)
        linear = -slope * h * prob_rest
        constant += linear * (entropy - log_z)
        tl.store(linear_ptr + row, tl.cast(factor, tl.float32) * linear)
    kept *= slope
    if HAS_SOFTCAP:
        y = tl.where(log_probs == float("-inf"), 0.0, log_probs + log_z) / tl.cast(factor, tl.float32)
        kept *= 1 - y * y  # `LogitTransform.softcap_derivative`
    tl.store(kept_ptr + row * k + slot, kept, mask=slot < k)
    tl.store(rest_ptr + row, tl.where(log_rest == float("-inf"), float("inf"), log_rest + log_z))
    tl.store(constant_ptr + row, constant)

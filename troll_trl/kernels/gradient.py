"""One operation of the training pass: overwriting a tile of products with the gradient of the loss, in one pass."""

# Annotations like `tl.constexpr` are not evaluated then: `tl` exists only with Triton
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from troll_trl.kernels.dispatch import TRITON_AVAILABLE, jit, launch, use_triton
from troll_trl.kernels.tiles import LogitTransform, softcap_derivative, to_logits, to_slots

if TRITON_AVAILABLE:
    import triton
    import triton.language as tl

BLOCK_SIZE = 4096  # as in fold.py
NUM_WARPS = 8
KEPT_BLOCK = 1024  # kept slots per program
KEPT_WARPS = 4


class Coefficients(NamedTuple):
    """
    What the gradient of `n` tokens needs next to the tile, see [`gradient_coefficients`].

    Attributes:
        kept (`torch.Tensor` of shape `(n, K)`, float32):
            Gradient at the kept tokens; 0 in unused slots.
        rest_log_sum_exp (`torch.Tensor` of shape `(n, 1)`, float32):
            `R`, `-inf` for an empty rest.
        constant (`torch.Tensor` of shape `(n, 1)`, float32), linear (the same, *optional*):
            At every other token the gradient is `exp(z − R)·(constant + linear·z)`; `linear` is `None` without a
            gradient for the entropy.
    """

    kept: torch.Tensor
    rest_log_sum_exp: torch.Tensor
    constant: torch.Tensor
    linear: torch.Tensor | None


# Gradient of one token's outputs with respect to its logits, with upstream g_j on L_j, g_rest on L_rest, h on H and
# G = Σ_j g_j + g_rest. From ∂L_j/∂z_v = 1[v = k_j] − p_v, ∂L_rest/∂z_v = 1[v ∉ K]·p_v/p_rest − p_v and
# ∂H/∂z_v = −p_v (log p_v + H):
#     v = k_j:   g_j − p_v·(G + h·(log p_v + H))
#     v ∉ K:     e_v·[g_rest − p_rest·(G + h·(log p_v + H))]      with e_v = p_v/p_rest = exp(z_v − R)
# The second line takes one exp, of a difference with the rest's own log-sum-exp, and so stays right when p_rest is
# tiny. Its bracket is linear in z_v; the kept entries are then overwritten by the first.
def gradient_coefficients(
    log_probs: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    transform: LogitTransform,
) -> Coefficients:
    """
    Everything is scaled by the slope `∂z/∂y` here, because the tile would otherwise need another pass.

    Args:
        log_probs (`torch.Tensor` of shape `(n, K + 1)`, float32):
            Sparse log-probabilities `L`, the rest last.
        log_z, entropy (`torch.Tensor` of shape `(n,)`, float32):
            `log Z` and `H`.
        grad_log_probs (`torch.Tensor` of shape `(n, K + 1)`, float32, *optional*):
            Upstream `g`.
        grad_entropy (`torch.Tensor` of shape `(n,)`, float32, *optional*):
            Upstream `h`.
        transform ([`LogitTransform`]):
            How the logits come from the products.

    Returns:
        [`Coefficients`] of the gradient with respect to the products; soft-capping is not in `constant` and `linear`.
    """
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
    kept = slope * kept[:, :-1]
    if transform.softcap is not None:
        logits = (log_probs[:, :-1] + log_z).masked_fill(log_probs[:, :-1] == -math.inf, 0.0)
        kept = kept * transform.softcap_derivative(logits)
    return Coefficients(kept.contiguous(), log_probs[:, -1:] + log_z, constant, linear)


def gradient_tile(
    tile: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitTransform,
    token_ids: torch.Tensor,
    start: int,
    coefficients: Coefficients,
) -> torch.Tensor:
    """
    Overwrite one tile of products with their gradient.

    Args:
        tile (`torch.Tensor` of shape `(n, v + 1)`), bias (`torch.Tensor` of shape `(v,)`, *optional*), transform, \
        token_ids (`torch.Tensor` of shape `(n, K)`), start:
            As in [`~troll_trl.kernels.fold.fold_tile`].
        coefficients ([`Coefficients`]):
            For the same tokens.

    Returns:
        `torch.Tensor` of shape `(n, v)`: a view of the tile.
    """
    if use_triton(tile.device):
        _gradient_triton(tile, bias, transform, token_ids, start, coefficients)
    else:
        _gradient_torch(tile, bias, transform, token_ids, start, coefficients)
    return tile[:, :-1]


def _gradient_torch(tile, bias, transform, token_ids, start, coefficients):
    body = tile[:, :-1]
    if bias is not None:
        body.add_(bias)
    transform.apply_(body)
    derivative = None if transform.softcap is None else transform.softcap_derivative(body)
    factor = (
        coefficients.constant
        if coefficients.linear is None
        else torch.addcmul(coefficients.constant, coefficients.linear, body)
    )
    body.sub_(coefficients.rest_log_sum_exp).exp_().mul_(factor)
    if derivative is not None:
        body.mul_(derivative)
    # Kept entries may have overflowed in the exp, being no part of the rest
    tile.scatter_(1, to_slots(token_ids, start, tile), coefficients.kept)


def _gradient_triton(tile, bias, transform, token_ids, start, coefficients):
    columns = tile.shape[1] - 1
    launch(
        _gradient_kernel,
        (len(tile),),
        tile.device,
        tile,
        tile.stride(0),
        bias,
        coefficients.rest_log_sum_exp,
        coefficients.constant,
        coefficients.linear,
        columns,
        **transform.kernel_arguments,
        HAS_BIAS=bias is not None,
        HAS_LINEAR=coefficients.linear is not None,
        BLOCK=min(BLOCK_SIZE, triton.next_power_of_2(columns)),
        num_warps=NUM_WARPS,
    )
    launch(
        _put_kept_kernel,
        (triton.cdiv(token_ids.numel(), KEPT_BLOCK),),
        tile.device,
        tile,
        tile.stride(0),
        token_ids,
        coefficients.kept,
        token_ids.numel(),
        token_ids.shape[1],
        start,
        columns,
        BLOCK=KEPT_BLOCK,
        num_warps=KEPT_WARPS,
    )


@jit()
def _gradient_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    rest_ptr,
    constant_ptr,
    linear_ptr,
    columns,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token. In 64 bits: rows times stride may pass 2³¹
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    rest_log_sum_exp = tl.load(rest_ptr + row)
    constant = tl.load(constant_ptr + row)
    if HAS_LINEAR:
        linear = tl.load(linear_ptr + row)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < columns
        y = tl.load(tile_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        z = to_logits(y, inner, outer, HAS_SOFTCAP)
        grad = tl.exp(z - rest_log_sum_exp)  # e_v
        if HAS_LINEAR:
            grad *= constant + linear * z
        else:
            grad *= constant
        if HAS_SOFTCAP:
            grad *= softcap_derivative(z, outer)
        tl.store(tile_ptr + offsets, grad.to(tile_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["slots", "kept_count", "start"])
def _put_kept_kernel(
    tile_ptr,
    tile_stride,
    ids_ptr,
    kept_ptr,
    slots,
    kept_count,
    start,
    columns,
    BLOCK: tl.constexpr,
):
    """Overwrite the kept entries, which may have overflowed in the exp, being no part of the rest. A launch of its own,
    as in fold.py: they must be written last."""
    # Slots of all tokens in a row, in 64 bits: rows times stride may pass 2³¹
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + slot, mask=slot < slots, other=-1) - start
    inside = (slot < slots) & (local >= 0) & (local < columns)
    kept = tl.load(kept_ptr + slot, mask=inside, other=0.0)
    tl.store(tile_ptr + slot // kept_count * tile_stride + local, kept.to(tile_ptr.dtype.element_ty), mask=inside)

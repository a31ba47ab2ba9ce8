"""One operation of the training pass: a token's log-probabilities and entropy, once all tiles are folded."""

from __future__ import annotations

import math

import torch

from troll_trl.kernels.dispatch import jit, launch, next_power_of_2, tl, use_triton, warps_for_row
from troll_trl.kernels.fold import FoldState
from troll_trl.kernels.tiles import FLOOR, LogitTransform, to_logits

# A program holds at most this many kept tokens of a row in registers
MOST_IN_REGISTERS = 512


def outcomes_of(
    state: FoldState, token_ids: torch.Tensor, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse log-probabilities `(n, K + 1)`, log Z `(n,)` and entropy `(n,)`, float32, of the kept tokens `token_ids`
    `(n, K)`, contiguous, with −1 in an unused slot."""
    by_triton = use_triton(token_ids.device) and 0 < token_ids.shape[1] <= MOST_IN_REGISTERS
    return (_outcomes_triton if by_triton else _outcomes_torch)(state, token_ids, transform)


def _outcomes_torch(state, token_ids, transform):
    kept = transform.to_logits(state.kept).masked_fill(token_ids == -1, -math.inf)
    largest = transform.to_logits(state.max)
    # If the rest has no token, only the floor was summed (NaN must not be mistaken for that)
    rest = torch.where(largest < FLOOR / 2, -math.inf, largest + state.sum_exp.log())
    outcomes = torch.cat([kept, rest], 1)
    log_z = outcomes.logsumexp(1, keepdim=True)
    log_probs = torch.log_softmax(outcomes, 1)  # at logits in the thousands, exp(outcomes − log_z) sums to 1 ± 4e-4
    # H = −Σ_kept p log p − p_rest·E_rest[log p]
    mean_u = transform.factor * state.sum_exp_u / state.sum_exp
    mean_log_prob = torch.where(rest == -math.inf, 0.0, mean_u + largest - log_z)
    surprise = torch.cat([log_probs[:, :-1].masked_fill(kept == -math.inf, 0.0), mean_log_prob], 1)
    return log_probs, log_z.squeeze(1), -(log_probs.exp() * surprise).sum(1)


def _outcomes_triton(state, token_ids, transform):
    rows, k = token_ids.shape
    device = token_ids.device
    log_probs = torch.empty((rows, k + 1), device=device)
    log_z, entropy = torch.empty(rows, device=device), torch.empty(rows, device=device)
    slots = next_power_of_2(k)
    constants = {"FLOOR": FLOOR, "SLOTS": slots, "num_warps": warps_for_row(slots)}
    tensors = (*state, token_ids, log_probs, log_z, entropy)
    launch(_outcomes_kernel, (rows,), device, *tensors, k, factor=transform.factor, **constants)
    return log_probs, log_z, entropy


@jit(do_not_specialize=["k"])
def _outcomes_kernel(
    kept_ptr,
    max_ptr,
    sum_exp_ptr,
    sum_exp_u_ptr,
    ids_ptr,
    log_probs_ptr,
    log_z_ptr,
    entropy_ptr,
    k,
    factor,
    FLOOR: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per token. The row index has 64 bits: rows times slots may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    used = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=-1) != -1
    z = to_logits(tl.load(kept_ptr + row * k + slot, mask=used, other=0.0), factor, FLOOR)
    z = tl.where(used, z, float("-inf"))
    largest = to_logits(tl.load(max_ptr + row), factor, FLOOR)
    s = tl.load(sum_exp_ptr + row)
    # If the rest has no token, only the floor was summed (NaN must not be mistaken for that)
    rest = tl.where(largest < FLOOR / 2, float("-inf"), largest + tl.log(s))
    m = tl.maximum(tl.max(z, axis=0), rest)
    log_sum = tl.log(tl.sum(tl.exp(z - m), axis=0) + tl.exp(rest - m))
    log_z = m + log_sum
    log_probs, log_rest = z - m - log_sum, rest - m - log_sum  # `z − log_z` would round, see the fallback
    surprise = tl.where(z == float("-inf"), 0.0, log_probs)
    mean_u = tl.cast(factor, tl.float32) * tl.load(sum_exp_u_ptr + row) / s
    mean_log_prob = tl.where(rest == float("-inf"), 0.0, mean_u + largest - log_z)
    entropy = -(tl.sum(tl.exp(log_probs) * surprise, axis=0) + tl.exp(log_rest) * mean_log_prob)
    log_probs_ptr += row * (k + 1)
    tl.store(log_probs_ptr + slot, log_probs, mask=slot < k)
    tl.store(log_probs_ptr + k, log_rest)
    tl.store(log_z_ptr + row, log_z)
    tl.store(entropy_ptr + row, entropy)

"""One operation of the scoring pass: the support of every position, from its most likely tokens. Triton orders the
tokens, applies the mass rule and computes log-probabilities in one launch; PyTorch needs about 45."""

from __future__ import annotations

import math

import torch

from troll_trl.kernels.dispatch import has_float64, jit, launch, next_power_of_2, tl, use_triton
from troll_trl.kernels.tiles import FLOOR
from troll_trl.kernels.topk import TopTokens, number_of, rank_key

# A program of one warp holds at most this many top tokens of a position in registers, 8 per thread
MOST_IN_REGISTERS = 256
_TORCH_ROWS = 8192  # positions that PyTorch handles at a time: about 4 MiB of float64 at K = 64


def settle_support(
    sampled_ids: torch.Tensor, sampled: torch.Tensor, top: TopTokens, tail_mass: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return token ids `(N, K)` int32 and sparse log-probabilities `(N, K + 1)` float32: the sampled token, then the
    others that [`mass_rule`] keeps by descending probability, and the rest.

    `sampled_ids` `(N,)`, contiguous, and `sampled` `(N, 1)` are the sampled tokens and their logits, and `top` has the
    `K − 1` others. Unused slots have −1 and −∞.
    """
    device = sampled.device
    k = top.logits.shape[1]
    # With k = 0, there is nothing to order
    by_triton = use_triton(device) and has_float64(device) and 0 < k <= MOST_IN_REGISTERS
    return (_settle_triton if by_triton else _settle_torch)(sampled_ids, sampled, top, tail_mass)


def mass_rule(sampled_log_prob: torch.Tensor, other_log_probs: torch.Tensor, tail_mass: float) -> torch.Tensor:
    """Return which of the other tokens to keep, `(..., K − 1)` bool. A token is kept if the mass before it is below `1
    − tail_mass`. `sampled_log_prob` is `(..., 1)`; `other_log_probs` is `(..., K − 1)`, descending, with −∞ for no
    token."""
    # Sum in float64, because the sum is compared with 1 − δ, and δ = 1e-5 is only 168 float32 steps
    device = other_log_probs.device if has_float64(other_log_probs.device) else torch.device("cpu")
    mass = other_log_probs.to(device, torch.float64).exp()
    mass_before = sampled_log_prob.to(device, torch.float64).exp() + mass.cumsum(-1) - mass
    return (mass_before < 1 - tail_mass).to(other_log_probs.device) & (other_log_probs > -math.inf)


def _settle_torch(sampled_ids, sampled, top, tail_mass):
    settled = []
    for first in range(0, max(len(sampled), 1), _TORCH_ROWS):
        rows = slice(first, first + _TORCH_ROWS)
        logits, token_ids, rest, _ = (x[rows] for x in top)
        settled.append(_settle_torch_rows(sampled_ids[rows, None], sampled[rows], logits, token_ids, rest, tail_mass))
    ids, log_probs = zip(*settled, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _settle_torch_rows(sampled_ids, sampled, logits, token_ids, rest, tail_mass):
    others, order = logits.sort(1, descending=True)
    others = others.masked_fill(others < FLOOR / 2, -math.inf)  # there are no more tokens
    log_z = torch.cat([sampled, others, rest], 1).logsumexp(1, keepdim=True)
    keep = mass_rule(sampled - log_z, others - log_z, tail_mass)
    rest = torch.cat([rest, others.masked_fill(keep, -math.inf)], 1).logsumexp(1, keepdim=True)
    rest = rest.masked_fill(rest < FLOOR / 2, -math.inf)
    kept = torch.cat([sampled, others.masked_fill(~keep, -math.inf)], 1)
    token_ids = torch.cat([sampled_ids.int(), token_ids.gather(1, order).masked_fill(~keep, -1)], 1)
    return token_ids, torch.log_softmax(torch.cat([kept, rest], 1), 1)


def _settle_triton(sampled_ids, sampled, top, tail_mass):
    logits, token_ids, rest, _ = top
    rows, k = logits.shape
    device = logits.device
    kept_ids = torch.empty((rows, k + 1), device=device, dtype=torch.int32)
    log_probs = torch.empty((rows, k + 2), device=device)
    tensors = (sampled_ids, sampled, logits, token_ids, rest, kept_ids, log_probs)
    constants = {"LIMIT": 1 - tail_mass, "FLOOR": FLOOR, "SLOTS": next_power_of_2(k), "num_warps": 1}
    launch(_support_kernel, (rows,), device, *tensors, k, **constants)
    return kept_ids, log_probs


@jit(do_not_specialize=["k"])
def _support_kernel(
    sampled_ids_ptr,
    sampled_ptr,
    logits_ptr,
    ids_ptr,
    rest_ptr,
    kept_ids_ptr,
    log_probs_ptr,
    k,
    LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program per position. The row index has 64 bits: rows times slots may exceed 2³¹
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    z = tl.load(logits_ptr + row * k + slot, mask=slot < k, other=float("-inf"))
    ids = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=-1)
    # The order is by descending logit, then by ascending id: one number holds both
    low_bits = (ids ^ -1).to(tl.uint32, bitcast=True).to(tl.uint64)
    packed = tl.sort((rank_key(z, 0).to(tl.uint64) << 32) | low_bits, descending=True)
    ids = (packed & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True) ^ -1
    z = number_of((packed >> 32).to(tl.uint32), 0)
    z = tl.where(z < FLOOR / 2, float("-inf"), z)  # there are no more tokens

    sampled, rest = tl.load(sampled_ptr + row), tl.load(rest_ptr + row)
    m = tl.maximum(tl.maximum(tl.max(z, axis=0), sampled), rest)
    log_z = m + tl.log(tl.sum(tl.exp(z - m), axis=0) + tl.exp(sampled - m) + tl.exp(rest - m))
    # `mass_rule`. `LIMIT` is a compile-time constant: an argument would be rounded to float32
    mass = tl.exp((z - log_z).to(tl.float64))
    before = tl.exp((sampled - log_z).to(tl.float64)) + tl.cumsum(mass, axis=0) - mass
    keep = (before < tl.full((), LIMIT, tl.float64)) & (z > float("-inf"))
    dropped, z = tl.where(keep, float("-inf"), z), tl.where(keep, z, float("-inf"))
    m = tl.maximum(tl.max(dropped, axis=0), rest)
    rest = m + tl.log(tl.sum(tl.exp(dropped - m), axis=0) + tl.exp(rest - m))
    rest = tl.where(rest < FLOOR / 2, float("-inf"), rest)

    m = tl.maximum(tl.maximum(tl.max(z, axis=0), sampled), rest)
    log_sum = tl.log(tl.sum(tl.exp(z - m), axis=0) + tl.exp(sampled - m) + tl.exp(rest - m))
    log_probs_ptr += row * (k + 2)
    tl.store(log_probs_ptr, sampled - m - log_sum)
    tl.store(log_probs_ptr + 1 + slot, z - m - log_sum, mask=slot < k)
    tl.store(log_probs_ptr + 1 + k, rest - m - log_sum)
    kept_ids_ptr += row * (k + 1)
    tl.store(kept_ids_ptr, tl.load(sampled_ids_ptr + row).to(tl.int32))
    tl.store(kept_ids_ptr + 1 + slot, tl.where(keep, ids, -1), mask=slot < k)

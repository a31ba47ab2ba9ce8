"""self_check() compares every kernel with its PyTorch fallback on this device. A trainer calls it at its start. It
takes about a second after Triton's compilation, which is cached on disk.

A case is small and ragged: some tokens, a vocabulary of several tiles of which the last is short, unused slots, a bias
and soft-capping.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from troll_trl.kernels import blocks, candidates, fold, gradient, projection
from troll_trl.kernels.tiles import FLOOR, LogitTransform

_ROWS, _VOCABULARY, _CHUNK, _SLOTS = 37, 5003, 2048, 24
_TRANSFORM = LogitTransform(scale=1.3, softcap=8.0, temperature=0.7)
# Of the largest entry of an output: float32 sums in another order; twice the rounding of a bf16 tile of gradients
_TOLERANCE, _TOLERANCE_OF_TILE = 2e-5, 1e-2


class KernelCheck(NamedTuple):
    """The result of one kernel on one case."""

    kernel: str
    ok: bool  # it ran, and agreed with its fallback to the rounding of its dtype
    difference: float  # the largest of any output, relative to that output's largest entry; NaN if it did not run
    shapes: str  # of the case
    error: str  # why it did not run; else empty


@functools.cache
def self_check(device: torch.device) -> tuple[KernelCheck, ...]:
    """Run every kernel and its PyTorch fallback on a device that the kernels run on. Only a process's first call for a
    device runs them; later calls return its result."""
    with torch.no_grad():
        return tuple(_check(name, *case, device) for name, case in _CASES.items())


def _check(name: str, run: Callable, tolerance: float, device: torch.device) -> KernelCheck:
    shapes = f"{_ROWS} tokens, vocabulary {_VOCABULARY}, {_SLOTS} kept"
    try:
        pairs = run(device)
        difference = max((_difference(a, b) for a, b in pairs), default=0.0)
    except Exception as error:  # whatever a compiler or a driver raises: it is reported, with the kernel's name
        return KernelCheck(name, False, math.nan, shapes, f"{type(error).__name__}: {error}"[:2000])
    return KernelCheck(name, difference <= tolerance, difference, shapes, "")


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference relative to the largest finite entry; infinite where one is −∞ or NaN and the other is not."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    scale = theirs[theirs.isfinite()].abs().amax().item() if theirs.isfinite().any() else 1.0
    error = (ours - theirs).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf, math.inf)
    return (error.amax() / max(scale, 1e-30)).item()


class _Case(NamedTuple):
    tile: torch.Tensor  # (n, v + 1) products in bf16
    bias: torch.Tensor  # (v,)
    token_ids: torch.Tensor  # (n, K) int32, within and outside of the tile
    start: int


def _case(device: torch.device) -> _Case:
    generator = torch.Generator().manual_seed(0)
    columns, start = _VOCABULARY % _CHUNK, _VOCABULARY // _CHUNK * _CHUNK
    stride = math.ceil((columns + 1) / 16) * 16
    tile = 3 * torch.randn(_ROWS, stride, generator=generator)
    ids = torch.stack([torch.randperm(_VOCABULARY, generator=generator)[:_SLOTS] for _ in range(_ROWS)]).int()
    ids[::3, _SLOTS // 2 :] = -1
    bias = torch.randn(columns, generator=generator)
    return _Case(tile.to(device, torch.bfloat16)[:, : columns + 1], bias.to(device), ids.to(device), start)


def _check_fold(device):
    case = _case(device)
    states = [fold.FoldState.of(case.token_ids) for _ in range(2)]
    rest = (_TRANSFORM, case.token_ids, case.start)
    fallback = case.tile.float()
    fold._fold_triton(case.tile, case.bias, *rest, states[0], None)
    fold._fold_torch(fallback, case.bias, *rest, states[1], torch.empty_like(fallback))
    # Slots that no tile has filled hold the floor; beside it no difference would show
    outputs = [state._replace(kept=state.kept.masked_fill(state.kept < FLOOR / 2, 0.0)) for state in states]
    return list(zip(*outputs, strict=True))


def _check_gradient(device):
    case = _case(device)
    generator = torch.Generator().manual_seed(1)
    kept = torch.randn(_ROWS, _SLOTS, generator=generator)
    columns = [torch.randn(_ROWS, 1, generator=generator) for _ in range(2)]
    coefficients = gradient.Coefficients(*(x.to(device) for x in (kept, torch.full((_ROWS, 1), 12.0), *columns)))
    fallback = case.tile.float()
    gradient._gradient_triton(case.tile, case.bias, _TRANSFORM, case.token_ids, case.start, coefficients)
    gradient._gradient_torch(fallback, case.bias, _TRANSFORM, case.token_ids, case.start, coefficients)
    return [(case.tile[:, :-1], fallback[:, :-1])]


def _reduced(device):
    generator = torch.Generator().manual_seed(2)
    padded = math.ceil(_VOCABULARY / _CHUNK) * _CHUNK
    tile = (3 * torch.randn(_ROWS, padded, generator=generator)).to(device, torch.bfloat16)
    bias = torch.randn(_VOCABULARY, generator=generator).to(device)
    sampled = torch.randint(_VOCABULARY, (_ROWS,), generator=generator).to(device)
    reduced = blocks.blocks_of(tile, sampled, _VOCABULARY, _CHUNK)
    for first in range(0, _VOCABULARY, _CHUNK):
        columns = min(_CHUNK, _VOCABULARY - first)
        blocks._reduce_triton(reduced, bias[first : first + columns], _TRANSFORM, first, columns)
    return reduced, bias


def _check_reduce(device):
    reduced, bias = _reduced(device)
    # The fallback's blocks have other members, so the truth here is made of whole logits
    logits = _TRANSFORM.apply_(reduced.tile[:, :_VOCABULARY].float() + bias)
    sampled = logits.gather(1, reduced.sampled_ids)
    logits = logits.scatter(1, reduced.sampled_ids, FLOOR)
    logits = torch.nn.functional.pad(logits, (0, reduced.tile.shape[1] - _VOCABULARY), value=FLOOR)
    z = logits.unflatten(1, (-1, blocks.BLOCK))
    largest = z.amax(2)
    exp = (z - largest.unsqueeze(2)).exp()
    full = largest > FLOOR / 2  # a block that is all padding sums its floors, of which nothing is read
    u_exp = ((z - largest.unsqueeze(2)) * exp).sum(2)
    pairs = [(reduced.max, largest), (reduced.sum_exp, exp.sum(2)), (reduced.sum_exp_u, u_exp)]
    return [(reduced.sampled, sampled), *((torch.where(full, a, 0), torch.where(full, b, 0)) for a, b in pairs)]


def _check_choice(device):
    reduced, bias = _reduced(device)
    ours = candidates._choose_triton(reduced, bias, _TRANSFORM, _SLOTS - 1)
    theirs = candidates._choose_torch(reduced, bias, _TRANSFORM, _SLOTS - 1)
    # By logit, as tokens of one logit may come in any order
    ours = ours._replace(logits=ours.logits.sort(1, descending=True).values)
    return [(a, b) for a, b, name in zip(ours, theirs, ours._fields, strict=True) if name != "token_ids"]


def _check_projection(device):
    generator = torch.Generator().manual_seed(3)
    old = 3 * torch.randn(_ROWS, _SLOTS + 1, generator=generator)
    new = old + torch.linspace(0, 5, _ROWS).unsqueeze(1) * torch.randn(old.shape, generator=generator)
    old[::3, 5:-1] = new[::3, 5:-1] = -math.inf
    upstream = torch.randn(old.shape, generator=generator).to(device)
    policy, old = (x.log_softmax(-1).to(device) for x in (new, old))
    results = []
    for solve, backward in (
        (projection._project_triton, projection._backward_triton),
        (projection._project_torch, projection._backward_torch),
    ):
        log_pi, t, *kls = solve(policy, old, 0.05)
        results.append([log_pi.exp(), t, *kls, backward(upstream, policy, old, log_pi, t)])
    return list(zip(*results, strict=True))


_CASES: dict[str, tuple[Callable, float]] = {
    "fold": (_check_fold, _TOLERANCE),
    "gradient": (_check_gradient, _TOLERANCE_OF_TILE),
    "reduce": (_check_reduce, _TOLERANCE),
    "choice": (_check_choice, _TOLERANCE),
    "projection": (_check_projection, _TOLERANCE),
}

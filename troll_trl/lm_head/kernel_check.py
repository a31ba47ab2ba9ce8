"""self_check() compares every kernel with its PyTorch fallback on this device, for `troll check`. It takes about a
second after Triton's compilation, which is cached on disk."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from troll_trl.kernels import blocks, coefficients, fold, gradient, outcomes, projection, support, topk
from troll_trl.kernels.tiles import FLOOR, LogitTransform
from troll_trl.trust_region.projection import project_rows, project_rows_backward

# Largest difference, as a share of an output's largest entry. Kernel and fallback sum float32 numbers in different
# orders. For a tile of gradients in bf16, the tolerance is twice the rounding.
_TOLERANCE, _TOLERANCE_OF_TILE = 2e-5, 1e-2
# The logits' spread, at any temperature. Before, logits at a temperature of 0.05 reached 290, where float32 numbers are
# 3e-5 apart. The entropy of an H100's kernel and of torch then differed by more than the tolerance, and a sound kernel
# was refused.
_SPREAD = 3.0


class Case(NamedTuple):
    """Shapes and options of one check: by default some tokens, a vocabulary of several tiles of which the last is
    short, unused slots, a bias and soft-capping."""

    vocabulary: int = 5003
    slots: int = 24  # K
    dtype: torch.dtype = torch.bfloat16  # dtype of the products
    transform: LogitTransform = LogitTransform(scale=1.3, softcap=8.0, temperature=0.7)
    bias: bool = True
    kl_bound: float = 0.05
    rows: int = 37
    chunk: int = 2048  # columns of a tile in the training pass


class KernelCheck(NamedTuple):
    """The result of one kernel on one case."""

    kernel: str
    ok: bool  # it ran, and agreed with its fallback to the rounding of its dtype
    difference: float  # the largest of any output, relative to that output's largest entry; NaN if it did not run
    shapes: str  # shapes of the case
    error: str  # why it did not run; else empty

    def __str__(self) -> str:
        size = f"{self.difference:.1e} of the largest entry"
        detail = (
            f"agrees with torch to {size}" if self.ok else f"FAILS: {self.error or f'differs from torch by {size}'}"
        )
        return f"{self.kernel} ({self.shapes}): {detail}"


# What Qwen3 asks for with the defaults: Triton compiles the kernels anew for it
QWEN3 = Case(151_936, 64, transform=LogitTransform(), bias=False, rows=5, chunk=32_768)


def self_check(device: torch.device, cases: Sequence[Case] = (Case(), QWEN3)) -> list[KernelCheck]:
    """Run every kernel and its PyTorch fallback on a device that the kernels run on."""
    with torch.no_grad():
        return [_check(name, *how, case, device) for case in cases for name, how in _CHECKS.items()]


def _check(name: str, run: Callable, tolerance: float, case: Case, device: torch.device) -> KernelCheck:
    dtype = str(case.dtype).removeprefix("torch.")
    shapes = f"{case.rows} tokens, vocabulary {case.vocabulary}, {case.slots} kept, {dtype}"
    try:
        pairs = run(case, device)
        difference = max((_difference(a, b) for a, b in pairs if b.numel() > 0), default=0.0)
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


def _tile_of(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, int]:
    """Products `(n, v + 1)` of the last tile, a bias `(v,)`, kept tokens `(n, K)`, within and outside of the tile, and
    the tile's first token."""
    generator = torch.Generator().manual_seed(0)
    start = (case.vocabulary - 1) // case.chunk * case.chunk
    columns, slots = case.vocabulary - start, case.slots
    stride = math.ceil((columns + 1) / 16) * 16
    tile = _SPREAD / case.transform.slope * torch.randn(case.rows, stride, generator=generator)
    ids = torch.stack([torch.randperm(case.vocabulary, generator=generator)[:slots] for _ in range(case.rows)]).int()
    ids[::3, 1 + slots // 2 :] = -1
    bias = torch.randn(columns, generator=generator) / case.transform.slope if case.bias else None
    bias = None if bias is None else bias.to(device, case.dtype)
    return tile.to(device, case.dtype)[:, : columns + 1], bias, ids.to(device), start


def _check_fold(case, device):
    tile, bias, token_ids, start = _tile_of(case, device)
    states = [fold.FoldState.empty(token_ids) for _ in range(2)]
    shared = (case.transform, token_ids, start)
    fallback = tile.to(torch.float32, copy=True)
    fold._fold_triton(tile, bias, *shared, states[0], None)
    fold._fold_torch(fallback, bias, *shared, states[1], torch.empty_like(fallback))
    # Slots that no tile has filled hold the floor; next to it no difference would show
    return list(zip(*(s._replace(kept=s.kept.masked_fill(s.kept < FLOOR / 2, 0.0)) for s in states), strict=True))


def _check_gradient(case, device):
    generator = torch.Generator().manual_seed(1)
    kept, *columns = (torch.randn(case.rows, n, generator=generator).to(device) for n in (case.slots, 1, 1))
    both = gradient.Coefficients(kept, torch.full_like(columns[0], 12.0), *columns)
    pairs = []
    for given in (both, both._replace(linear=None)):  # with a gradient of the entropy, and without
        tile, bias, token_ids, start = _tile_of(case, device)
        shared = (bias, case.transform, token_ids, start, given)
        fallback = tile.to(torch.float32, copy=True)
        gradient._gradient_triton(tile, *shared)
        gradient._gradient_torch(fallback, *shared)
        pairs.append((tile[:, :-1], fallback[:, :-1]))
    return pairs


def _reduced(case, device):
    generator = torch.Generator().manual_seed(2)
    # All of the vocabulary at once, as `select_support` takes it
    padded = math.ceil(case.vocabulary / blocks.COLUMNS_STEP) * blocks.COLUMNS_STEP
    slope = case.transform.slope
    tile = (_SPREAD / slope * torch.randn(case.rows, padded, generator=generator)).to(device, case.dtype)
    bias = (torch.randn(case.vocabulary, generator=generator) / slope).to(device, case.dtype) if case.bias else None
    sampled = torch.randint(case.vocabulary, (case.rows,), generator=generator).to(device)
    logits = torch.full((case.rows, 1), FLOOR, device=device)
    reduced = blocks.blocks_of(tile, sampled, logits, case.vocabulary, padded)
    blocks._reduce_triton(reduced, bias, case.transform, 0, case.vocabulary)
    return reduced, bias


def _capped_products(reduced, bias, transform):
    """`y` `(rows, V)` of all tokens, from the products."""
    return transform.cap_(reduced.tile[:, : reduced.vocabulary].float() + (0.0 if bias is None else bias.float()))


def _check_reduce(case, device):
    reduced, bias = _reduced(case, device)
    # The fallback's blocks have other members, so the truth here is made of whole rows
    y, factor = _capped_products(reduced, bias, case.transform), case.transform.factor
    sampled = factor * y.gather(1, reduced.sampled_ids)
    y = y.scatter(1, reduced.sampled_ids, FLOOR)
    y = torch.nn.functional.pad(y, (0, reduced.tile.shape[1] - case.vocabulary), value=FLOOR)
    y = y.unflatten(1, (-1, blocks.BLOCK))
    largest = y.amax(2)
    u = y - largest.unsqueeze(2)
    exp_u = (factor * u).exp()
    full = largest > FLOOR / 2  # a block of padding alone sums floors, which nothing reads
    ours, theirs = (reduced.max, reduced.sum_exp, reduced.sum_exp_u), (largest, exp_u.sum(2), (u * exp_u).sum(2))
    return [
        (reduced.sampled, sampled),
        *((a.where(full, 0), b.where(full, 0)) for a, b in zip(ours, theirs, strict=True)),
    ]


def _check_choice(case, device):
    k = case.slots - 1
    if k > topk.MOST_IN_REGISTERS:  # torch chooses
        return []
    reduced, bias = _reduced(case, device)
    ours, theirs = (topk.empty_top_tokens(case.rows, k, device) for _ in range(2))
    topk._choose_triton(reduced, bias, case.transform, ours)
    topk._choose_torch(reduced, bias, case.transform, theirs)
    # The logits are compared, since tokens of equal logits may come in any order; then the logits of the tokens that
    # the kernel names
    logits = case.transform.factor * _capped_products(reduced, bias, case.transform)
    named = logits.gather(1, ours.token_ids.clamp(min=0).long()).where(ours.token_ids >= 0, FLOOR)
    best = ours.logits.sort(1, descending=True).values
    sums = [(ours.rest, theirs.rest), (ours.entropy, theirs.entropy)]
    return [(named, ours.logits), (best, theirs.logits), *sums]


def _check_support(case, device):
    k = case.slots - 1
    if not 0 < k <= support.MOST_IN_REGISTERS:
        return []
    generator = torch.Generator().manual_seed(4)
    # Logits in equal steps: no number of kept tokens is within 1e-5 of the limit of the mass, where rounding decides
    order = torch.stack([torch.randperm(k, generator=generator) for _ in range(case.rows)])
    steps = 0.2 + 0.1 * (torch.arange(case.rows) % 5).unsqueeze(1)
    logits = _SPREAD - steps * order
    logits[::3] = logits[::3].masked_fill(order[::3] > k // 2, FLOOR)  # the vocabulary has no more tokens
    sampled, rest = (torch.full((case.rows, 1), x, device=device) for x in (1.0, -_SPREAD))
    rest[::2] = FLOOR
    ids = torch.stack([torch.randperm(case.vocabulary, generator=generator)[:k] for _ in range(case.rows)])
    given = topk.TopTokens(logits.to(device), ids.int().to(device), rest, rest.squeeze(1))
    sampled_ids = torch.arange(case.rows, device=device)
    ours, theirs = (
        settle(sampled_ids, sampled, given, 0.05) for settle in (support._settle_triton, support._settle_torch)
    )
    wrong_ids = ours[0] != theirs[0]  # a neighbouring id would be within the tolerance
    return [(wrong_ids, torch.zeros_like(wrong_ids)), (ours[1], theirs[1]), (ours[1].exp(), theirs[1].exp())]


def _check_outcomes(case, device):
    if case.slots > outcomes.MOST_IN_REGISTERS:
        return []
    _, _, token_ids, _ = _tile_of(case._replace(rows=max(case.rows, 4)), device)
    generator = torch.Generator().manual_seed(5)
    rows, slope = len(token_ids), case.transform.factor
    kept, *columns = (torch.randn(rows, n, generator=generator).to(device) for n in (case.slots, 1, 1, 1))
    largest, sum_exp, sum_exp_u = columns
    state = fold.FoldState(_SPREAD / slope * kept, largest / slope, 1 + sum_exp.abs(), -sum_exp_u.abs() / slope)
    state.max[3] = FLOOR  # the rest has no token
    ours, theirs = (
        of(state, token_ids, case.transform) for of in (outcomes._outcomes_triton, outcomes._outcomes_torch)
    )
    return [*zip(ours, theirs, strict=True), (ours[0].exp(), theirs[0].exp())]


def _check_coefficients(case, device):
    if case.slots > outcomes.MOST_IN_REGISTERS:
        return []
    generator = torch.Generator().manual_seed(6)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    log_probs = _SPREAD * draw(case.rows, case.slots + 1)
    log_probs[::3, 1 + case.slots // 2 : -1] = log_probs[1::3, -1] = -math.inf
    log_probs, log_z = log_probs.log_softmax(1), draw(case.rows)
    entropy, upstream = draw(case.rows).abs(), (draw(case.rows, case.slots + 1), draw(case.rows))
    pairs = []
    for g, h in (upstream, (upstream[0], None), (None, upstream[1])):
        arguments = (log_probs, log_z, entropy, g, h, case.transform)
        ours, theirs = coefficients._coefficients_triton(*arguments), coefficients._coefficients_torch(*arguments)
        pairs += [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    return pairs


def _check_projection(case, device):
    if case.slots + 1 > projection.MOST_IN_REGISTERS:
        return []
    generator = torch.Generator().manual_seed(3)
    old = _SPREAD * torch.randn(case.rows, case.slots + 1, generator=generator)
    new = old + torch.linspace(0, 5, case.rows).unsqueeze(1) * torch.randn(old.shape, generator=generator)
    old[::3, 5:-1] = new[::3, 5:-1] = -math.inf
    upstream = torch.randn(old.shape, generator=generator).to(device)
    policy, old = (x.log_softmax(-1).to(device) for x in (new, old))

    def results(solve, backward):
        log_pi, t, *kls = solve(policy, old, case.kl_bound)
        return [log_pi.exp(), t, *kls, backward(upstream, policy, old, log_pi, t)]

    ours = results(projection.project_rows, projection.project_rows_backward)
    return list(zip(ours, results(project_rows, project_rows_backward), strict=True))


_CHECKS: dict[str, tuple[Callable, float]] = {
    "fold": (_check_fold, _TOLERANCE),
    "gradient": (_check_gradient, _TOLERANCE_OF_TILE),
    "reduce": (_check_reduce, _TOLERANCE),
    "choice": (_check_choice, _TOLERANCE),
    "support": (_check_support, _TOLERANCE),
    "outcomes": (_check_outcomes, _TOLERANCE),
    "coefficients": (_check_coefficients, _TOLERANCE),
    "projection": (_check_projection, _TOLERANCE),
}

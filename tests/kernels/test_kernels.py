"""The Triton kernels against float64 truth: error ≤ error of the naive version in the same dtype + tolerance.

They run on a GPU (marker `gpu`, `make test-gpu`) or, without one, in Triton's interpreter: the last test starts this
file, the check and the tests of the head again with `TRITON_INTERPRET=1`, which must be set before Triton is imported.
"""

import contextlib
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.references import PLATEAU_AND_CLIFF, reference_support
from tests.support.limits import HANG
from tests.support.repository import ROOT, TESTS
from troll_trl.kernels import fold, gradient, projection, support, tiles, topk
from troll_trl.kernels.blocks import blocks_of, reduce_chunk
from troll_trl.kernels.dispatch import INTERPRETED, TRITON_AVAILABLE, use_triton
from troll_trl.kernels.fold import FoldState, online_logsumexp
from troll_trl.kernels.tiles import FLOOR, LogitTransform
from troll_trl.kernels.topk import choose_top_tokens, empty_top_tokens
from troll_trl.lm_head import support_selection
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs
from troll_trl.lm_head.support_selection import select_support
from troll_trl.trust_region.projection import project

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = LogitTransform(temperature=0.7)
TIED = LogitTransform(temperature=0.9)  # without a bias, and with equal logits
CAPPED = LogitTransform(scale=1.3, softcap=2.0, temperature=0.7)
# Of the largest entry: two roundings of the dtype, that of the tile's gradient and that of the result. A bias, which
# all entries share, is at most a quarter of it: the interpreter's truncation to bfloat16 made one of 0.3 %.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Small tiles, so that there are several in both directions, ragged at the end, of several blocks each."""
    if request.param == "interpreter" and not INTERPRETED:
        pytest.skip("runs in a process with TRITON_INTERPRET=1, which the last test of this file starts")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or TRITON_INTERPRET=1")
    monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (5, 128), "accelerator": (5, 128)})
    monkeypatch.setattr(fold, "BLOCK_SIZE", 64)
    monkeypatch.setattr(gradient, "BLOCK_SIZE", 64)
    monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": 5 * 1024, "accelerator": 5 * 1024})
    return torch.device("cpu" if request.param == "interpreter" else "cuda")


def make_case(device, dtype, rows=13, vocabulary=331, width=24, k=7, bias=False, seed=0, spread=1.0):
    """Hidden states, head, bias, and supports with unused slots; drawn on the CPU, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    hidden = draw(rows, width).to(device, dtype)
    weight = (spread * draw(vocabulary, width) / math.sqrt(width)).to(device, dtype)
    bias = draw(vocabulary).to(device, dtype) if bias else None
    token_ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(rows)])
    token_ids[::3, 1 + k // 2 :] = -1
    return hidden, weight, bias, token_ids.int().to(device)


def naive(hidden, weight, bias, token_ids, transform, dtype):
    """Sparse log-probabilities `(N, K + 1)` and entropy `(N,)` from full logits `(N, V)`, the product in `dtype` and
    the rest in float32 (float64 for float64)."""
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(dtype))
    logits = (logits if dtype == torch.float64 else logits.float()) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_probs = (logits / transform.temperature).log_softmax(-1)
    used = token_ids >= 0
    kept = log_probs.gather(1, token_ids.clamp(min=0).long()).masked_fill(~used, 0.0)
    in_support = torch.zeros(len(hidden), len(weight) + 1, dtype=torch.bool, device=hidden.device)
    in_support.scatter_(1, torch.where(used, token_ids, len(weight)).long(), True)
    in_support = in_support[:, :-1]
    empty = in_support.all(1, keepdim=True)
    rest = log_probs.masked_fill(in_support & ~empty, -math.inf).logsumexp(1, keepdim=True).masked_fill(empty, 0.0)
    return torch.cat([kept, rest], 1), -(log_probs.exp() * log_probs).sum(1)


def kernels(hidden, weight, bias, token_ids, transform, dtype):
    """The same from the kernels."""
    gather = lambda *_: contextlib.nullcontext()
    log_probs, entropy = SparseLogProbs.apply(hidden, weight, bias, token_ids, transform, gather)
    return log_probs.masked_fill(log_probs == -math.inf, 0.0), entropy


def outputs_and_gradients(function, case, transform, dtype, upstream, with_entropy=True):
    hidden, weight, bias, token_ids = case
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in (hidden, weight, bias) if x is not None]
    outputs = function(leaves[0], leaves[1], leaves[2] if bias is not None else None, token_ids, transform, dtype)
    loss = (outputs[0] * upstream[0].to(outputs[0].dtype)).sum()
    if with_entropy:
        loss = loss + (outputs[1] * upstream[1].to(outputs[1].dtype)).sum()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def assert_errs_no_more_than_naive(case, transform, dtype, with_entropy=True):
    for x in case[:3]:
        if x is not None:
            x.requires_grad_()
    generator = torch.Generator().manual_seed(9)
    shape = (len(case[3]), case[3].shape[1] + 1)
    upstream = [torch.randn(size, generator=generator).to(case[0].device) for size in (shape, shape[:1])]
    run = lambda function, in_dtype: outputs_and_gradients(function, case, transform, in_dtype, upstream, with_entropy)
    truth, plain, ours = run(naive, torch.float64), run(naive, dtype), run(kernels, dtype)
    names = ["log-probabilities", "entropy", *(f"gradient {i}" for i in range(len(truth) - 2))]
    for name, exact, theirs, actual in zip(names, truth, plain, ours, strict=True):
        scale = exact.abs().max().item()
        naive_error, error = ((x.double() - exact.double()).abs().max().item() for x in (theirs, actual))
        assert error <= naive_error + TOLERANCE[dtype] * max(scale, 1e-3), (
            f"{name}: off by {error:.2e}, the naive version by {naive_error:.2e}, at a scale of {scale:.2e}"
        )
        naive_bias, bias = (bias_of(x.double(), exact.double()) for x in (theirs, actual))
        assert bias <= naive_bias + TOLERANCE[dtype] / 4, f"{name}: {bias:.2e} too small or too large, as a whole"


def bias_of(actual, exact):
    """By which factor, less 1, `actual` is longer or shorter along `exact`."""
    return (((actual - exact) * exact).sum() / exact.square().sum().clamp(min=1e-30)).abs().item()


@pytest.mark.parametrize(("dtype", "bias", "transform", "with_entropy"), [
    (torch.float32, False, CAPPED, True), (torch.float32, True, PLAIN, False), (torch.bfloat16, False, PLAIN, True),
    (torch.bfloat16, True, CAPPED, True), (torch.float16, True, PLAIN, True),
], ids=str)  # fmt: skip
def test_training_pass(device, dtype, bias, transform, with_entropy):
    assert use_triton(device)
    assert_errs_no_more_than_naive(make_case(device, dtype, bias=bias), transform, dtype, with_entropy)


# Tiles of 5 rows and 128 columns. Of 130 kept tokens in 131, the last tile has three columns. Of 131, there is no rest
@pytest.mark.parametrize(
    ("rows", "vocabulary", "k"),
    [(1, 300, 4), (5, 128, 4), (6, 129, 4), (11, 5, 4), (13, 131, 1), (13, 131, 130), (6, 131, 131)],
)
def test_sizes_that_do_not_fit_a_tile(device, rows, vocabulary, k):
    case = make_case(device, torch.float32, rows=rows, vocabulary=vocabulary, k=k)
    assert_errs_no_more_than_naive(case, PLAIN, torch.float32)


def test_rest_mass_does_not_cancel(device):
    """1 − Σ kept would be 0 in float32: the rest has a mass of about 1e-13."""
    hidden, weight, _, token_ids = make_case(device, torch.float32, k=1)
    weight[token_ids[0, 0]] = 30 * hidden[0] / hidden[0].square().sum()
    log_probs, _ = SparseLogProbs.apply(hidden[:1], weight, None, token_ids[:1], LogitTransform(), None)
    expected = (hidden[0].double() @ weight.double().t()).log_softmax(0)
    expected[token_ids[0, 0]] = -math.inf
    assert expected.logsumexp(0) < -20
    torch.testing.assert_close(log_probs[0, 1].double(), expected.logsumexp(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.bfloat16), (math.inf, torch.float32), (-math.inf, torch.float16)]
)
def test_non_finite_logits_show_in_the_entropy(device, dtype, value):
    hidden, weight, bias, token_ids = make_case(device, dtype, rows=3, bias=True, k=3)
    outside = next(v for v in range(331) if not (token_ids == v).any())
    bias[outside] = value
    _, entropy = SparseLogProbs.apply(hidden, weight, bias, token_ids, PLAIN, None)
    assert not entropy.isfinite().any()
    sampled = token_ids[:, 0].long()
    *_, entropy = select_support(hidden, weight, bias, sampled, 4, 0.0, PLAIN)
    assert not entropy.isfinite().any()


def tile_of(device, dtype, rows, columns, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, columns, generator=generator)).to(device, dtype)


def test_nan_is_not_lost_in_the_rest(device):
    """With a call that does not raise, the caller looks for it in the log-probabilities, too. It passed for nothing."""
    products = tile_of(device, torch.float32, 3, 331)
    products[:, 200] = math.nan  # and a product of 0 with it is NaN: all rows have one
    hidden, weight = torch.eye(3, device=device), products.t().contiguous()
    weight[200].view(torch.int32)[1] |= -(2**31)  # a negative NaN ranks last
    for k in (1, 2, 5):
        sampled = torch.zeros(3, dtype=torch.long, device=device)
        _, log_probs, entropy = select_support(hidden, weight, None, sampled, k, 0.0, PLAIN)
        assert entropy.isnan().all() and log_probs.isnan().any(1).all()


@pytest.mark.parametrize(("vocabulary", "k", "tail_mass", "dtype", "transform"), [
    (331, 24, 1e-2, torch.float32, CAPPED), (331, 24, 1e-2, torch.float16, PLAIN), (331, 1, 1e-5, torch.float32, PLAIN),
    (70, 65, 1e-5, torch.bfloat16, CAPPED), (331, 140, 1e-5, torch.bfloat16, PLAIN),
    (331, 140, 1e-5, torch.float32, CAPPED),
    (5, 4, 0.0, torch.bfloat16, TIED), (331, 30, 0.0, torch.bfloat16, TIED), (1100, 10, 0.0, torch.bfloat16, TIED),
], ids=str)  # fmt: skip
def test_selection_is_exact(device, vocabulary, k, tail_mass, dtype, transform):
    """The tokens of a head whose product is exact in every dtype: an identity. 140 tokens take the torch choice.
    Padding blocks take no part, in a vocabulary of less than one block too. Of 18 blocks, 10 tokens leave most out."""
    products = tile_of(device, dtype, 7, vocabulary)
    bias = tile_of(device, dtype, 1, vocabulary, seed=1)[0] if transform is not TIED else None
    if transform is TIED:
        products[3], products[4] = 1.0, products[4].clamp(-1, 0.5)
    sampled = torch.arange(7, device=device) * 9 % vocabulary
    hidden, weight = torch.eye(7, device=device, dtype=dtype), products.t().contiguous()
    ids, log_probs, entropy = select_support(hidden, weight, bias, sampled, k, tail_mass, transform)
    logits = (products.double() + (0.0 if bias is None else bias.double())) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = (logits / transform.temperature).cpu()
    full = logits.log_softmax(1)
    for row in range(7):
        kept, expected = reference_support(logits[row].numpy(), sampled[row].item(), k, tail_mass)
        used = ids[row][ids[row] >= 0].tolist()
        assert len(set(used)) == len(used) and used[0] == kept[0]
        assert ids[row, len(used) :].eq(-1).all() and log_probs[row, len(used) : -1].eq(-math.inf).all()
        size = min(len(used), len(kept))
        if len(used) != len(kept):  # then the mass is that of the bound, to the rounding of float32 logits
            assert abs(full[row, kept[:size]].exp().sum() - (1 - tail_mass)) < 3e-6
        # By log-probability, as equal logits may come in any order
        torch.testing.assert_close(full[row, used[:size]], full[row, kept[:size]], rtol=0, atol=1e-5)
        torch.testing.assert_close(log_probs[row, : len(used)].cpu().double(), full[row, used], rtol=1e-4, atol=1e-5)
        rest = full[row].clone().index_fill_(0, torch.tensor(used), -math.inf).logsumexp(0)
        torch.testing.assert_close(log_probs[row, -1].cpu().double(), rest, rtol=1e-4, atol=1e-5)
        assert len(used) != len(kept) or abs(rest - expected[-1]) < 1e-4
    torch.testing.assert_close(entropy.cpu().double(), -(full.exp() * full).sum(1), rtol=1e-4, atol=1e-5)


def at_floor(device, rows):
    """Logits `(rows, 1)` of sampled tokens that no chunk has filled yet."""
    return torch.full((rows, 1), FLOOR, device=device)


@pytest.mark.parametrize(("k", "tail_mass"), [(1, 0.0), (2, 0.3), (23, 1e-5), (64, 0.0), (200, 1e-5)])
def test_settling_agrees_with_torchs(device, k, tail_mass):
    """In descending order, with ties, fewer tokens than slots, no rest, and NaN in one row."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(9, k, generator=generator)
    logits[1] = logits[1].round() + 0.0  # no −0, which ranks below 0
    logits[2, k // 2 :], logits[3] = FLOOR, 1.0
    logits[4, 0] = math.nan
    sampled, left = torch.randn(9, 1, generator=generator), torch.randn(9, 1, generator=generator) - 3
    sampled[5], sampled[6], left[7], left[2] = 60.0, -80.0, FLOOR, FLOOR
    ids = torch.stack([torch.randperm(70_000, generator=generator)[:k] for _ in range(9)]).int()
    ids[2, k // 2 :] = -1
    logits, sampled, left, ids = (x.to(device) for x in (logits, sampled, left, ids))
    arguments = (
        torch.arange(9, device=device),
        sampled,
        topk.TopTokens(logits, ids, left, left[:, 0]),
        tail_mass,
    )
    (our_ids, ours), (_, theirs) = support.settle_support(*arguments), support._settle_torch(*arguments)
    assert ours[4].isnan().all() and theirs[4].isnan().all()
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for row in range(9):
        named = our_ids[row, 1:][our_ids[row, 1:] >= 0].tolist()
        of = dict(zip(ids[row].tolist(), logits[row].tolist(), strict=True))
        assert len(set(named)) == len(named) == (ours[row, 1:-1] > -math.inf).sum() and our_ids[row, 0] == row
        values = [of[token] for token in named]
        assert values == sorted(of.values(), reverse=True)[: len(named)] or row == 4
        ties = zip(named, named[1:], values, values[1:], strict=False)
        assert all(a < b for a, b, x, y in ties if x == y)  # the same on every run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choice_from_all_numbers_of_a_dtype(device, dtype):
    """Both signs, zeros, the smallest and the largest: the order of the keys is the order of the numbers."""
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    tinier = tiny / 4 if dtype == torch.float16 else 2 * tiny  # the interpreter flushes what float32 has not
    edges = [0.0, -0.0, tiny, -tiny, tinier, -tinier, 1.0, -1.0, huge / 2, -huge / 2, huge, -huge]
    rows = torch.stack([torch.tensor(edges).roll(i).repeat_interleave(10) for i in range(4)])
    sampled = torch.tensor([0, 30, 64, 119], device=device)
    of = blocks_of(torch.nn.functional.pad(rows, (0, 8)).to(device, dtype), sampled, at_floor(device, 4), 120, 128)
    reduce_chunk(of, None, LogitTransform(), 0, 120)
    for k in (1, 10, 25, 100):
        chosen = empty_top_tokens(4, k, device)
        choose_top_tokens(of, None, LogitTransform(), chosen)
        for row in range(4):
            rest = rows[row].to(dtype).float().clone()
            rest[sampled[row]] = -math.inf
            expected = rest.sort(descending=True).values[:k].clamp(min=FLOOR)
            assert torch.equal(chosen.logits[row].cpu().sort(descending=True).values, expected)
            ids = chosen.token_ids[row][chosen.token_ids[row] >= 0].tolist()
            assert len(set(ids)) == len(ids) == (expected > FLOOR).sum()


def far_apart(tile: torch.Tensor) -> torch.Tensor:
    """The rows of a tile 2³⁰ + 16 elements apart: the third starts beyond 2³¹. Only the touched pages take memory."""
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + tile.shape[1], dtype=tile.dtype, device=tile.device)
    view = memory.as_strided(tile.shape, (stride, 1))
    return view.copy_(tile)


def test_tile_beyond_32_bit_offsets(device):
    """Row 2 lies beyond 2³¹ elements: with 32-bit offsets it would be read from elsewhere."""
    near = tile_of(device, torch.bfloat16, 3, 200)
    ids = torch.tensor([[0, 5], [7, -1], [198, 64]], dtype=torch.int32, device=device)
    sampled = ids[:, 0].long()
    results = []
    for tile in (near.clone(), far_apart(near)):
        state = FoldState.empty(ids)
        online_logsumexp(tile, None, PLAIN, ids, 0, state, None)
        results.append(state)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)

    chosen = []
    for tile in (near[:, :192].clone(), far_apart(near[:, :192])):
        blocks = blocks_of(tile, sampled.clamp(max=191), at_floor(device, 3), 192, 192)
        reduce_chunk(blocks, None, PLAIN, 0, 192)
        chosen.append(empty_top_tokens(3, 5, device))
        choose_top_tokens(blocks, None, PLAIN, chosen[-1])
    for a, b in zip(*chosen, strict=True):
        assert torch.equal(a, b)

    grads = []
    of = gradient.Coefficients(torch.ones(3, 2, device=device), *torch.ones(2, 3, 1, device=device), None)
    for tile in (near.clone(), far_apart(near)):
        grads.append(gradient.gradient_tile(tile, None, PLAIN, ids, 0, of))
    assert torch.equal(*grads)


def policies(device, dtype, rows, slots, difference, seed=0):
    """Policy, old policy and an upstream gradient `(rows, slots)`: with unused slots, tokens that only one has, rows
    inside the bound, and one row without a difference."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, slots, generator=generator, dtype=torch.float64)
    old = 3 * draw()
    new = old + difference * draw() * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    new[0] = old[0]
    if slots > 4:
        old[1::5, 1 : slots // 2] = new[1::5, 1 : slots // 2] = -math.inf
        new[2::7, 1], old[3::7, 2] = -math.inf, -math.inf
    return [x.to(device, dtype) for x in (new.log_softmax(-1), old.log_softmax(-1), draw())]


def projected(policy, old, upstream, bound):
    policy = policy.clone().requires_grad_()
    result = project(policy, old, bound)
    (gradient_of_policy,) = torch.autograd.grad(result.log_probs, policy, upstream)
    return [*(x.detach() for x in result), gradient_of_policy]


def test_projection_of_a_plateau_before_a_cliff(device):
    """The kernel halves the bracket after some Newton steps, too."""
    policy, old = torch.tensor(PLATEAU_AND_CLIFF, dtype=torch.float64, device=device).log_softmax(-1).unbind()
    assert project(policy, old, 0.3).kl.item() == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize(("dtype", "slots", "difference", "bound"), [
    (torch.float32, 65, 0.5, 0.05), (torch.float32, 65, 3.0, 1e-4), (torch.float32, 65, 3.0, math.inf),
    (torch.float32, 1, 3.0, 0.05), (torch.float64, 65, 30.0, 0.05), (torch.float64, 200, 3.0, 0.05),
], ids=str)  # fmt: skip
def test_projection_agrees_with_torchs(device, monkeypatch, dtype, slots, difference, bound):
    case = policies(device, dtype, 16, slots, difference)
    ours = projected(*case, bound)
    monkeypatch.setattr(projection, "use_triton", lambda device: False)
    theirs = projected(*case, bound)
    active, inside = theirs[1] > 0, theirs[2] <= bound
    assert torch.equal(ours[1] > 0, active) and torch.equal(ours[0][inside], theirs[0][inside])
    close = {torch.float32: 1e-5, torch.float64: 1e-9}[dtype]  # η is as accurate as the solver, to 1e-13 of the KL
    for name, a, b in zip(("π", "η", "KL(p‖q)", "KL(π‖q)", "gradient"), ours, theirs, strict=True):
        a, b = (x.exp() if name == "π" else x for x in (a, b))
        torch.testing.assert_close(a, b, rtol=close, atol=close, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(ours[0] == -math.inf, theirs[0] == -math.inf)
    if bound < math.inf:  # at the bound, unless the old policy's support alone brings the policy inside
        assert (ours[3][active].double() <= bound * (1 + 1e-3)).all()


def test_projection_of_nan_is_nan(device):
    """The torch version refuses it, for which it must wait for the device."""
    policy, old, _ = policies(device, torch.float32, 4, 9, 3.0)
    policy[1, 3], old[2, 0] = math.nan, math.nan
    result = project(policy, old, 0.05)
    for x in (result.policy_kl, result.kl, result.log_probs[:, 0]):
        assert x.isnan().tolist() == [False, True, True, False]


def test_projection_of_strided_rows_and_expanded_gradients(device):
    policy, old, _ = policies(device, torch.float32, 6, 20, 3.0)
    strided = [x.t().contiguous().t() for x in (policy, old)]
    ones = torch.ones(1, 1, device=device).expand(6, 20)
    for a, b in zip(projected(*strided, ones, 0.05), projected(policy, old, ones.contiguous(), 0.05), strict=True):
        assert torch.equal(a, b)
    empty = project(policy[:0], old[:0], 0.05)
    assert empty.log_probs.shape == (0, 20) and empty.kl.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_memory_is_no_more_than_trls():
    """At a Qwen3-0.6B's head in bf16, where both passes have several tiles in both directions."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sampled = torch.randint(151_936, (8192,), device="cuda")
    with torch.no_grad():
        token_ids, *_ = select_support(hidden, weight, None, sampled, 64, 1e-5, LogitTransform())
    gather = lambda *_: contextlib.nullcontext()

    def ours():
        return SparseLogProbs.apply(hidden, weight, None, token_ids, LogitTransform(), gather)[0]

    def theirs():
        return ChunkedLogProbFunction.apply(hidden, weight, None, sampled, 1.0, 32_768, None, 1.0, ("entropy",))[0]

    def scoring():
        with torch.no_grad():
            select_support(hidden, weight, None, sampled, 64, 1e-5, LogitTransform())

    def training(function):
        torch.autograd.grad(function().exp().sum(), [hidden, weight])

    def peak(run):
        run()  # the first product of a thread takes cuBLAS's workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: training(ours)) <= 1.02 * peak(lambda: training(theirs))
    with torch.no_grad():
        limit = 1.02 * peak(theirs)
    assert peak(scoring) <= limit


# Not what counts tensors, of which the interpreter makes its own, nor ways of the fallback, nor models that differ in a
# factor
OF_THE_HEAD = "not fsdp2 and not exceeds and not tile_on_a_gpu and not whole_vocabulary and not chunks_of_positions"
OF_THE_HEAD += " and not untied and not cohere and not smollm3 and not apertus"


@pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not installed (it exists for Linux only)")
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kernels/test_kernels.py", []),
        pytest.param("kernels/test_kernels_check.py", ["-k", "Interpreter"], marks=pytest.mark.slow),
        pytest.param("method/test_lm_head.py", ["-k", OF_THE_HEAD], marks=pytest.mark.slow),
    ],
)
def test_kernels_in_the_interpreter(name, options):
    """This file, and the tests of the check and of the head, with the kernels interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", *options]
    result = subprocess.run(
        [*command, TESTS / name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout

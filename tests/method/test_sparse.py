"""sparsify() and SparseDistribution against loops over the full softmax."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import reference_sparse_log_probs, reference_support
from troll_trl import SparseDistribution, sparsify
from troll_trl.trust_region.sparse import mass_rule

INF = math.inf
VOCABULARY = 23


def kept(sparse):
    """Number of kept tokens, `(...)`."""
    return (sparse.token_ids != -1).sum(-1)


def random_logits(*shape, spread=3.0, dtype=torch.float32, seed=0):
    return (spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def assert_is_reference(sparse, logits, sampled_ids, support_size, tail_mass):
    assert sparse.token_ids.shape == (len(logits), support_size)
    assert sparse.log_probs.shape == (len(logits), support_size + 1)
    for row, (ids, log_probs) in enumerate(zip(sparse.token_ids.tolist(), sparse.log_probs.double(), strict=True)):
        kept, expected = reference_support(logits[row].tolist(), int(sampled_ids[row]), support_size, tail_mass)
        unused = support_size - len(kept)
        assert ids == kept + [-1] * unused
        expected = expected[:-1] + [-INF] * unused + expected[-1:]
        np.testing.assert_allclose(log_probs.numpy(), expected, rtol=2e-6, atol=2e-6)


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("tail_mass", [0.0, 1e-5, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("support_size", [1, 2, 7, VOCABULARY - 1, VOCABULARY])
def test_selection_agrees_with_a_loop(support_size, tail_mass, spread):
    logits = random_logits(40, VOCABULARY, spread=spread)
    sampled_ids = torch.arange(40) % VOCABULARY  # every rank, the least probable token included
    sparse = sparsify(logits, sampled_ids, support_size, tail_mass)
    assert_is_reference(sparse, logits, sampled_ids, support_size, tail_mass)


def test_mass_rule_by_hand():
    others = torch.tensor([[0.5, 0.25, 0.125, 0.0]]).log()
    sampled = torch.tensor([[0.1]]).log()
    expected = {
        0.0: [True, True, True, False],  # a candidate without mass is none
        0.14: [True, True, True, False],  # 0.1 + 0.5 + 0.25 = 0.85 is still below 0.86
        0.16: [True, True, False, False],
        0.89: [True, False, False, False],
        0.91: [False, False, False, False],  # the sampled token alone is enough
    }
    for tail_mass, keep in expected.items():
        assert mass_rule(sampled, others, tail_mass).tolist() == [keep]


def test_a_thousand_float32_probabilities_do_not_blur_the_tail():
    # 1 − 1e-5 is 168 float32 steps below 1: a float32 running sum of so many terms would stop too early or too late
    logits = random_logits(5, 3000, spread=2.0)
    sampled_ids = logits.argmax(-1)
    sparse = sparsify(logits, sampled_ids, 3000, 1e-5)
    probs = logits.double().softmax(-1)
    for row, number in enumerate(kept(sparse).tolist()):
        mass = probs[row].sort(descending=True).values.cumsum(-1)
        assert mass[number - 2] < 1 - 1e-5 <= mass[number - 1]


@pytest.mark.parametrize("support_size", [1, 3, 8])
def test_ties(support_size):
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [2.0] * 8])
    sampled_ids = torch.tensor([6, 3])
    sparse = sparsify(logits, sampled_ids, support_size, 0.0)
    for row in range(2):
        ids = sparse.token_ids[row].tolist()
        assert ids[0] == sampled_ids[row] and len(set(ids)) == support_size and min(ids) >= 0
        # Which of the equal tokens are kept is open; what is kept is not
        kept, expected = reference_support(logits[row].tolist(), int(sampled_ids[row]), support_size, 0.0)
        assert logits[row, ids].tolist() == logits[row, kept].tolist()
        np.testing.assert_allclose(sparse.log_probs[row].numpy(), expected, rtol=1e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.data(),
    st.sampled_from([0.0, 1e-5, 0.1, 0.9]),
)
def test_property_a_distribution_with_the_exact_rest(logits, data, tail_mass):
    vocabulary = len(logits)
    sampled_id = data.draw(st.integers(0, vocabulary - 1))
    support_size = data.draw(st.integers(1, vocabulary))
    logits = torch.tensor([logits])
    sparse = sparsify(logits, torch.tensor([sampled_id]), support_size, tail_mass)
    assert sparse.log_probs.exp().sum().item() == pytest.approx(1, abs=1e-6)
    used = sparse.token_ids[0] != -1
    assert sparse.token_ids[0, 0] == sampled_id
    assert (used[:-1] | ~used[1:]).all()  # used slots first
    assert torch.isneginf(sparse.log_probs[0, :-1]).equal(~used)
    if used.sum() < support_size:  # stopped by the mass rule
        assert sparse.log_probs[..., -1].exp().item() <= tail_mass * (1 + 1e-5) + 1e-15
    expected = reference_sparse_log_probs(logits, sparse.token_ids)
    torch.testing.assert_close(sparse.log_probs.double(), expected, rtol=1e-5, atol=1e-5)


# --- log-probabilities on a given support ----------------------------------------------------------------------------


def supports(rows, vocabulary, slots, unused, seed=0):
    """Distinct random token ids `(rows, slots)`, the given columns unused."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:slots] for _ in range(rows)])
    token_ids[:, unused] = -1
    return token_ids


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "slots, unused",
    [(1, []), (6, []), (6, [3, 4, 5]), (6, [0, 2]), (4, [0, 1, 2, 3]), (VOCABULARY, []), (VOCABULARY, [22])],
    ids=["one", "some", "padded", "padding in front", "nothing kept", "all kept", "all but one"],
)
def test_values_and_gradient_against_the_full_softmax(slots, unused, dtype, tolerance):
    logits = random_logits(9, VOCABULARY, spread=4.0, dtype=dtype).requires_grad_()
    token_ids = supports(9, VOCABULARY, slots, unused)
    log_probs = SparseDistribution.log_probs_on_support(logits, token_ids)
    assert log_probs.dtype == dtype
    expected = reference_sparse_log_probs(logits, token_ids)
    torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=tolerance)

    upstream = random_logits(*log_probs.shape, seed=1, dtype=torch.float64).masked_fill(expected == -INF, 0.0)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either, which a user's search for one would hit
        log_probs = SparseDistribution.log_probs_on_support(logits, token_ids)
        (grad,) = torch.autograd.grad(log_probs, logits, upstream.to(dtype))
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(grad, expected_grad, rtol=10 * tolerance, atol=10 * tolerance)


def test_gradcheck():
    token_ids = torch.tensor([[2, 0, -1], [4, -1, -1], [1, 3, 0]])

    def finite_log_probs(logits):
        log_probs = SparseDistribution.log_probs_on_support(logits, token_ids)
        return log_probs.masked_fill(log_probs == -INF, 0.0)

    logits = random_logits(3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(finite_log_probs, (logits,))


@pytest.mark.parametrize("rest", [1e-3, 1e-7, 1e-12, 1e-30])
def test_a_tiny_rest_keeps_its_relative_accuracy(rest):
    # Eight tokens with all of the mass but `rest`: 1 − Σ kept would be rounding noise, and its gradient with it
    vocabulary, kept = 3000, 8
    logits = random_logits(20, vocabulary, spread=1.0)
    logits[:, kept:] += math.log(rest / (vocabulary - kept)) + 8  # kept logits are about 8 above their mean
    logits[:, :kept] += 8
    logits.requires_grad_()
    sampled_ids = torch.zeros(20, dtype=torch.int64)
    sparse = sparsify(logits, sampled_ids, kept, 0.0)
    if rest <= 1e-7:
        assert (sparse.token_ids.sort(-1).values == torch.arange(kept)).all()
    expected = reference_sparse_log_probs(logits.detach(), sparse.token_ids)
    log_rest = expected[:, -1]
    assert (log_rest.exp() < 100 * rest).all()
    error = (sparse.log_probs[:, -1].double() - log_rest).abs()
    assert error.max() < 1e-5  # of the logarithm, so relative in the mass

    log_probs = SparseDistribution.log_probs_on_support(logits, sparse.token_ids)
    (grad,) = torch.autograd.grad(log_probs[:, -1].sum(), logits, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(reference_sparse_log_probs(logits, sparse.token_ids)[:, -1].sum(), logits)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype):
    logits = random_logits(5, 400, spread=4.0).to(dtype)
    sampled_ids = torch.tensor([0, 399, 5, 6, 7])
    sparse, expected = sparsify(logits, sampled_ids, 16), sparsify(logits.float(), sampled_ids, 16)
    assert torch.equal(sparse.token_ids, expected.token_ids)
    assert torch.equal(sparse.log_probs, expected.log_probs)
    assert SparseDistribution.log_probs_on_support(logits, sparse.token_ids).dtype == torch.float32


# --- contract --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0)])
def test_shapes_and_dtypes(shape):
    logits = random_logits(*shape, VOCABULARY, dtype=torch.float64).requires_grad_()
    sampled_ids = torch.full(shape, 4)
    sparse = sparsify(logits, sampled_ids, 6)
    assert sparse.token_ids.shape == (*shape, 6) and sparse.token_ids.dtype == torch.int32
    assert sparse.log_probs.shape == (*shape, 7) and sparse.log_probs.dtype == torch.float32
    assert not sparse.log_probs.requires_grad
    assert sparse.token_ids.shape[:-1] == sparse.log_probs.shape[:-1] == shape
    flat = sparsify(logits.reshape(-1, VOCABULARY), sampled_ids.reshape(-1), 6)
    assert torch.equal(sparse.token_ids.reshape(-1, 6), flat.token_ids)
    assert torch.equal(sparse.log_probs.reshape(-1, 7), flat.log_probs)


def test_defaults_are_the_papers():
    sparse = sparsify(random_logits(2, 500, spread=0.1), torch.tensor([3, 4]))
    assert sparse.token_ids.shape == (2, 64)
    assert (kept(sparse) == 64).all()
    logits = torch.cat([torch.zeros(1), torch.full((99,), math.log(1e-5 / 99))])  # a rest of just under 1e-5
    assert kept(sparsify(logits, torch.tensor(0))) == 1
    logits = torch.cat([torch.zeros(1), torch.full((99,), math.log(1.1e-5 / 99))])
    assert kept(sparsify(logits, torch.tensor(0))) > 1


def test_support_size_and_rest_mass():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]]).log()
    sparse = sparsify(logits, torch.tensor([1, 0]), 2, 0.05)
    assert kept(sparse).tolist() == [2, 1]
    torch.testing.assert_close(sparse.log_probs[..., -1].exp(), torch.tensor([0.3, 0.03]))


PAIR, SIX = random_logits(2, VOCABULARY), random_logits(2, 3, VOCABULARY)
select = lambda ids=(0, 1), size=4, tail=0.0: sparsify(PAIR, torch.tensor(ids), size, tail)
evaluate = SparseDistribution.log_probs_on_support
REFUSED = [
    *((lambda k=k: select(size=k), rf"`support_size` .*23.* got {k}") for k in (0, -1, 24)),
    *((lambda x=x: select(tail=x), rf"`tail_mass` .*\[0, 1\), got {x}") for x in (-0.1, 1.0, 1, 2.5, math.nan, INF)),
    # −100 is the label of a masked position
    *((lambda i=i: select((0, i)), rf"`sampled_ids` must be in 0…22, got {i}") for i in (-1, -100, 23)),
    (lambda: select((0.0, 1.0)), "`sampled_ids` must hold integers, got torch.float32"),
    *((lambda s=s: sparsify(SIX, torch.zeros(s).long(), 4), "`sampled_ids`") for s in ((2, 2), (2,), (2, 3, 1))),
    *((lambda i=i: evaluate(PAIR, torch.tensor([[0], [i]])), f"`token_ids` .* -1…22, got {i}") for i in (-2, 23)),
    (lambda: evaluate(SIX, torch.zeros(3, 2, 4).long()), r"`token_ids` \(3, 2, 4\) and `logits` \(2, 3, 23\)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_non_finite_logits_are_named(value):
    logits = random_logits(2, VOCABULARY)
    logits[1, 7] = value
    for call in (lambda: sparsify(logits, torch.tensor([0, 1]), 4), lambda: evaluate(logits, torch.zeros(2, 1).long())):
        with pytest.raises(ValueError, match=rf"`logits` must be finite, got {value} at index \[1, 7\]"):
            call()


def test_an_unused_slot_keeps_whatever_gradient_arrives():
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    log_probs = SparseDistribution.log_probs_on_support(logits, torch.tensor([[0, 3, -1]] * 4))
    upstream = torch.ones_like(log_probs)
    (one,) = torch.autograd.grad(log_probs, logits, upstream, retain_graph=True)
    upstream[:, 2] = torch.nan
    (other,) = torch.autograd.grad(log_probs, logits, upstream)
    assert torch.equal(one, other)

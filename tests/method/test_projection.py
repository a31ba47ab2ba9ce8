"""project() against a root-finder, finite differences and the properties that define a projection."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import PLATEAU_AND_CLIFF, reference_kl, reference_project
from troll_trl.trust_region import projection
from troll_trl.trust_region.projection import kl_divergence, project, solve

BOUND = 0.05
INF = math.inf


def random_rows(rows, slots, difference, old_spread=3.0, dtype=torch.float64, seed=0):
    """Log-probabilities of a policy and an old policy `(rows, slots)` whose logits differ by up to ±`difference`."""
    generator = torch.Generator().manual_seed(seed)
    old = old_spread * torch.randn(rows, slots, generator=generator, dtype=torch.float64)
    policy = old + difference * (2 * torch.rand(rows, slots, generator=generator, dtype=torch.float64) - 1)
    return policy.log_softmax(-1).to(dtype), old.log_softmax(-1).to(dtype)


def reference_t(log_p, log_q, bound=BOUND):
    rows = zip(log_p.tolist(), log_q.tolist(), strict=True)
    return torch.tensor([reference_project(p, q, bound).t for p, q in rows], dtype=torch.float64)


def kl(log_p, log_q):
    """KL in float64 from the definition."""
    return torch.as_tensor(reference_kl(log_p.detach().double().numpy(), log_q.double().numpy()))


# --- the solution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_spread", [0.1, 3.0, 20.0], ids=["flat", "ordinary", "peaked"])
@pytest.mark.parametrize("bound", [1e-4, 0.05, 1.0])
@pytest.mark.parametrize("difference", [0.1, 1.0, 10.0, 100.0])
def test_float64_agrees_with_a_root_finder(difference, bound, old_spread):
    log_p, log_q = random_rows(25, 33, difference, old_spread)
    result = project(log_p, log_q, bound)
    torch.testing.assert_close(1 / (1 + result.eta), reference_t(log_p, log_q, bound), rtol=0, atol=1e-9)
    expected = [reference_project(p, q, bound).log_probs for p, q in zip(log_p.numpy(), log_q.numpy(), strict=True)]
    np.testing.assert_allclose(result.log_probs.numpy(), np.stack(expected), rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(result.policy_kl.numpy(), reference_kl(log_p.numpy(), log_q.numpy()), atol=1e-12)
    assert (kl(result.log_probs, log_q) <= bound * (1 + 1e-9)).all()
    torch.testing.assert_close(result.kl, kl(result.log_probs, log_q), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bound", [0.29, 0.3, 0.31])
def test_a_plateau_before_a_cliff(bound, dtype):
    """Newton's steps alone hardly shrank the bracket from either side, and left KL(π‖q) at 207 for a bound of 0.3."""
    log_p, log_q = torch.tensor(PLATEAU_AND_CLIFF, dtype=torch.float64).log_softmax(-1).to(dtype).unbind()
    result = project(log_p, log_q, bound)
    assert kl(result.log_probs, log_q).item() == pytest.approx(bound, rel=1e-3)
    expected = reference_project(log_p.double().numpy(), log_q.double().numpy(), bound)
    torch.testing.assert_close(1 / (1 + result.eta.double()).item(), expected.t, rtol=1e-4, atol=0)


def test_two_outcomes_by_hand():
    # A bound chosen so that π = (3/4, 1/4). As q is uniform, the log-odds of π are t times the log-odds of p.
    log_q, log_p = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    bound = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    result = project(log_p, log_q, bound)
    torch.testing.assert_close(result.log_probs.exp(), torch.tensor([0.75, 0.25], dtype=torch.float64))
    assert result.eta.item() == pytest.approx(math.log(99) / math.log(3) - 1, abs=1e-9)


@pytest.mark.parametrize("difference", [1.0, 5.0])
def test_no_feasible_distribution_is_closer_to_the_policy(difference):
    log_p, log_q = random_rows(40, 5, difference)
    pi = project(log_p, log_q, BOUND).log_probs
    generator = torch.Generator().manual_seed(1)
    feasible = 0
    for scale in [1e-3, 0.03, 0.3, 3.0]:
        for _ in range(50):
            noise = scale * torch.randn(pi.shape, generator=generator, dtype=torch.float64)
            other = (pi + noise).log_softmax(-1)
            # Half of the noise points out of the trust region: a little of the old policy brings it back in
            share = scale * torch.rand(len(pi), 1, generator=generator, dtype=torch.float64) / 3
            other = ((1 - share) * other.exp() + share * log_q.exp()).log()
            inside = kl(other, log_q) <= BOUND
            feasible += int(inside.sum())
            assert (kl(other, log_p)[inside] >= kl(pi, log_p)[inside] - 1e-10).all()
    assert feasible > 1000


# --- float32 accuracy, and never NaN ---------------------------------------------------------------------------------

MISSING = ["nothing", "both", "policy", "old", "padding", "all of these"]


def remove(log_p, log_q, where, generator):
    """−∞ in some slots of one policy or of both, the first slot apart, and what is left normalised again."""
    rows, slots = log_p.shape
    missing_p, missing_q = torch.zeros(2, rows, slots, dtype=torch.bool)
    if where in ("both", "all of these"):
        both = torch.rand(rows, slots, generator=generator) < 0.3
        missing_p, missing_q = missing_p | both, missing_q | both
    if where in ("policy", "all of these"):
        missing_p = missing_p | (torch.rand(rows, slots, generator=generator) < 0.1)
    if where in ("old", "all of these"):
        missing_q = missing_q | (torch.rand(rows, slots, generator=generator) < 0.1)
    if where in ("padding", "all of these"):
        padding = torch.arange(slots) >= torch.randint(1, slots, (rows, 1), generator=generator)
        missing_p, missing_q = missing_p | padding, missing_q | padding
    missing_p[:, 0] = missing_q[:, 0] = False
    policy, old = log_p.masked_fill(missing_p, -INF), log_q.masked_fill(missing_q, -INF)
    return policy.log_softmax(-1), old.log_softmax(-1)


@pytest.mark.parametrize("missing", MISSING)
def test_float32_meets_the_bound_and_is_never_nan(missing):
    generator = torch.Generator().manual_seed(7)
    active = rows = 0
    for difference in [0.3, 1.0, 3.0, 10.0, 30.0, 100.0]:
        for old_spread in [0.1, 3.0, 30.0]:
            log_p, log_q = random_rows(1900, 17, difference, old_spread, torch.float32, seed=rows)
            log_p, log_q = remove(log_p, log_q, missing, generator)
            log_p.requires_grad_()
            result = project(log_p, log_q, BOUND)
            result.log_probs.backward(torch.randn(log_p.shape, generator=generator))
            assert log_p.grad.isfinite().all() and (log_p.grad[log_p == -INF] == 0).all()
            for name in ("log_probs", "eta", "policy_kl", "kl"):
                assert not getattr(result, name).isnan().any(), name
            assert (result.log_probs.exp().double().sum(-1) - 1).abs().max() < 1e-5

            # The bound acts where it is not met by the policy restricted to the support of the old one
            restricted = log_p.detach().double().masked_fill(log_q == -INF, -INF).log_softmax(-1)
            restricted_kl = kl(restricted, log_q)
            outside = restricted_kl > BOUND * (1 + 1e-4)
            error = (kl(result.log_probs, log_q) - BOUND) / BOUND
            worst = max(error[outside].abs().tolist(), default=0.0)
            assert worst <= 1e-3, f"difference {difference}, spread {old_spread}: KL is off by {worst:.2e}"
            assert error.max() <= 1e-3
            active, rows = active + int(outside.sum()), rows + len(log_p)
    assert rows > 34_000 and active > rows / 2


@pytest.mark.parametrize("missing", MISSING)
def test_missing_tokens_agree_with_a_root_finder(missing):
    generator = torch.Generator().manual_seed(3)
    for difference in [1.0, 10.0]:
        log_p, log_q = remove(*random_rows(60, 9, difference), missing, generator)
        result = project(log_p, log_q, BOUND)
        expected = [reference_project(*row, BOUND) for row in zip(log_p.numpy(), log_q.numpy(), strict=True)]
        expected_t = torch.tensor([row.t for row in expected], dtype=torch.float64)
        # Where the reference has the limit of p → 0, the solver has a p that is nearly 0
        torch.testing.assert_close(1 / (1 + result.eta), expected_t, rtol=0, atol=1e-6)
        pi = torch.from_numpy(np.stack([row.log_probs for row in expected])).exp()
        inside = expected_t == 1
        unreduced = inside & (kl(log_p, log_q) <= BOUND)
        assert torch.equal(result.log_probs[unreduced], log_p[unreduced])
        torch.testing.assert_close(result.log_probs.exp(), pi, rtol=0, atol=2e-6)
        reachable = (expected_t > 0).unsqueeze(-1)
        assert (result.log_probs == -INF)[reachable & (pi == 0)].all()


def test_float32_gradient_is_the_float64_gradient():
    for difference in [0.3, 3.0, 30.0, 100.0]:
        log_p, log_q = random_rows(500, 17, difference, dtype=torch.float32)
        upstream = torch.randn(log_p.shape, generator=torch.Generator().manual_seed(0))
        grads = []
        for dtype in (torch.float32, torch.float64):
            leaf = log_p.to(dtype).requires_grad_()
            (grad,) = torch.autograd.grad(project(leaf, log_q.to(dtype), BOUND).log_probs, leaf, upstream.to(dtype))
            grads.append(grad.double())
        error = (grads[0] - grads[1]).norm(dim=-1) / (upstream.norm(dim=-1) + grads[1].norm(dim=-1))
        assert error.median() < 1e-6 and error.max() < 1e-3  # the solver stops at a relative error of 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_policies(dtype):
    one_hot = torch.tensor([0.0, -INF, -INF], dtype=dtype)
    other_one_hot = torch.tensor([-INF, 0.0, -INF], dtype=dtype)
    spread = torch.tensor([0.5, 0.3, 0.2], dtype=dtype).log()
    for log_p, log_q, expected in [
        (spread, one_hot, [1.0, 0.0, 0.0]),  # only the old policy's token is left
        (one_hot, one_hot, [1.0, 0.0, 0.0]),
        (other_one_hot, one_hot, [1.0, 0.0, 0.0]),
        (one_hot, spread, None),
    ]:
        log_p = log_p.clone().requires_grad_()
        result = project(log_p, log_q, BOUND)
        result.log_probs.backward(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
        assert log_p.grad.isfinite().all()
        assert result.kl <= BOUND * (1 + 1e-3) and result.eta >= 0
        if expected is not None:
            torch.testing.assert_close(result.log_probs.exp(), torch.tensor(expected, dtype=dtype))
            assert result.kl.item() == pytest.approx(0, abs=1e-7)
        else:  # no distribution on the first token alone is within the bound: the other two keep their proportion
            pi = result.log_probs.exp()
            assert (pi[1] / pi[2]).item() == pytest.approx(1.5, rel=1e-5)
            assert pi[0] > 0.5 and kl(result.log_probs, log_q).item() == pytest.approx(BOUND, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1e-12, 1e-6, 0.05, 20.0])
def test_identical_policies_are_left_alone(bound, dtype):
    log_p, _ = random_rows(50, 7, 1.0, dtype=dtype)
    log_p[:, 5:] = -INF
    log_p = log_p.log_softmax(-1)
    result = project(log_p, log_p.clone(), bound)
    assert torch.equal(result.log_probs, log_p)
    assert (result.eta == 0).all() and (result.kl == 0).all() and (result.policy_kl == 0).all()


def test_rounding_makes_no_kl_negative():
    log_p, log_q = random_rows(2000, 33, 1e-6, dtype=torch.float32)
    assert (kl(log_p, log_q) < 0).any()  # float32 log-probabilities sum to 1 only nearly
    result = project(log_p, log_q, BOUND)
    assert (result.policy_kl >= 0).all() and (result.kl >= 0).all()
    assert torch.equal(result.log_probs, log_p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_bound_returns_the_policy_bit_for_bit(dtype):
    log_p, log_q = random_rows(100, 7, 100.0, dtype=dtype)
    log_q[:, 3] = -INF  # KL(p‖q) is infinite and still within an infinite bound
    result = project(log_p, log_q, INF)
    assert torch.equal(result.log_probs, log_p)
    assert (result.eta == 0).all()


def test_continuous_where_the_bound_begins_to_act():
    log_p, log_q = random_rows(20, 7, 1.0)
    for p, q in zip(log_p, log_q, strict=True):
        policy_kl = kl(p, q).item()
        just_active = project(p, q, policy_kl * (1 - 1e-8))
        assert just_active.eta > 0
        torch.testing.assert_close(just_active.log_probs, p, rtol=0, atol=1e-6)


# --- gradient --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 8, 17])
@pytest.mark.parametrize("difference", [0.05, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("bound", [2e-4, BOUND, 1.0])
def test_gradcheck(bound, slots, difference):
    generator = torch.Generator().manual_seed(slots)
    old = torch.randn(4, slots, generator=generator, dtype=torch.float64)
    logits = old + difference * torch.randn(4, slots, generator=generator, dtype=torch.float64)
    log_q = old.log_softmax(-1)
    active = project(logits.log_softmax(-1), log_q, bound).eta > 0
    if difference >= 2.0 and bound <= BOUND:
        assert active.any()
    if difference == 0.05 and bound >= BOUND:
        assert not active.any()

    def projected(logits):
        return project(logits.log_softmax(-1), log_q, bound).log_probs

    assert torch.autograd.gradcheck(projected, (logits.requires_grad_(),), atol=1e-7)


def test_gradcheck_with_missing_tokens():
    log_q = torch.tensor([[1.0, 0.3, -1.0, -INF, 0.5, -INF]], dtype=torch.float64).log_softmax(-1)
    free = torch.tensor([[-2.0, 1.5, 0.4, -0.2]], dtype=torch.float64, requires_grad=True)  # slots 0, 1, 2 and 3

    def projected(free):
        missing = torch.full((1, 2), -INF, dtype=torch.float64)  # in both, and (slot 4) only in the policy
        result = project(torch.cat([free, missing], -1).log_softmax(-1), log_q, 0.9)
        assert result.eta > 0
        return result.log_probs[:, :3]

    assert torch.autograd.gradcheck(projected, (free,), atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0])
def test_gradient_against_finite_differences_of_the_root_finder(scale):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, generator=generator, dtype=torch.float64)
    logits = (old + scale * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()
    log_q, upstream = old.log_softmax(-1), 1000 * torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0, -0.3]).double()
    result = project(logits.log_softmax(-1), log_q, BOUND)
    assert result.eta > 0
    (grad,) = torch.autograd.grad(result.log_probs @ upstream, logits)

    def loss(at):
        return reference_project(at.log_softmax(-1).numpy(), log_q.numpy(), BOUND).log_probs @ upstream.numpy()

    h = 1e-4
    steps = h * torch.eye(6, dtype=torch.float64)
    expected = [(loss(logits.detach() + step) - loss(logits.detach() - step)) / (2 * h) for step in steps]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_only_the_policy_and_the_log_probabilities_take_part_in_the_gradient():
    log_p, log_q = random_rows(4, 6, 2.0)
    log_p.requires_grad_()
    log_q.requires_grad_()
    result = project(log_p, log_q, BOUND)
    assert not (result.eta.requires_grad or result.policy_kl.requires_grad or result.kl.requires_grad)
    (result.log_probs * torch.arange(6)).sum().backward()
    assert log_q.grad is None
    assert log_p.grad.abs().max() > 0


# --- properties: test_properties.py has more ------------------------------------------------------------------------

logit = st.floats(-100, 100, width=32)


@st.composite
def policies(draw):
    """One row of a policy and an old policy, extremes and missing tokens included."""
    slots = draw(st.integers(1, 12))
    vector = st.lists(logit, min_size=slots, max_size=slots)
    policy, old = (torch.tensor(draw(vector), dtype=torch.float64) for _ in range(2))
    for logits in (policy, old):
        missing = draw(st.sets(st.integers(1, slots), max_size=slots // 2))
        logits[[i for i in missing if i < slots]] = -INF
    return policy.log_softmax(-1), old.log_softmax(-1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(policies(), st.floats(1e-4, 10), st.integers(1, 5))
def test_property_unused_slots_change_nothing(rows, bound, unused):
    log_p, log_q = (torch.nn.functional.pad(row, (0, unused), value=-INF).requires_grad_() for row in rows)
    row = rows[0].clone().requires_grad_()
    result, padded = project(row, rows[1], bound), project(log_p, log_q, bound)
    torch.testing.assert_close(padded.log_probs[:-unused].exp(), result.log_probs.exp(), rtol=0, atol=1e-9)
    assert (padded.log_probs[-unused:] == -INF).all()
    upstream = torch.arange(1.0, len(log_p) + 1, dtype=torch.float64)
    (grad,) = torch.autograd.grad(result.log_probs, row, upstream[:-unused])
    (padded_grad,) = torch.autograd.grad(padded.log_probs, log_p, upstream)
    torch.testing.assert_close(padded_grad[:-unused], grad, rtol=1e-6, atol=1e-6)
    assert (padded_grad[-unused:] == 0).all()


# --- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_batch_shapes(shape):
    log_p, log_q = random_rows(math.prod(shape), 7, 3.0)
    flat = project(log_p, log_q, BOUND)
    result = project(log_p.reshape(*shape, 7), log_q.reshape(*shape, 7), BOUND)
    assert result.log_probs.shape == (*shape, 7)
    assert result.eta.shape == result.policy_kl.shape == result.kl.shape == shape
    for name in ("log_probs", "eta", "policy_kl", "kl"):
        assert torch.equal(getattr(result, name).flatten(), getattr(flat, name).flatten()), name


def test_strided_and_expanded_inputs():
    log_p, log_q = random_rows(12, 5, 3.0)
    expected = project(log_p, log_q[:1].expand(12, 5).contiguous(), BOUND).log_probs
    strided = log_p.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(project(strided, log_q[:1].expand(12, 5), BOUND).log_probs, expected)


def test_chunks_of_rows_change_nothing(monkeypatch):
    """Chunks bound the float64 numbers of a batch, whatever its size: the results are the same, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    old = 3 * torch.randn(50, 65, generator=generator)
    new = (old + torch.randn(50, 65, generator=generator) * torch.linspace(0, 2, 50).unsqueeze(1)).log_softmax(-1)
    old, upstream = old.log_softmax(-1), torch.randn(50, 65, generator=generator)
    results = []
    for rows in (1000, 7):
        monkeypatch.setattr(projection, "_FLOAT64_ROWS", rows)
        policy = new.clone().requires_grad_()
        result = project(policy, old, 0.05)
        results.append([*(x.detach() for x in result), *torch.autograd.grad(result.log_probs, policy, upstream)])
    assert 0 < (results[0][1] > 0).sum() < 50
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_empty_batch(shape):
    log_p = torch.zeros(shape, requires_grad=True)
    result = project(log_p, torch.zeros(shape), BOUND)
    assert result.log_probs.shape == shape and result.eta.shape == shape[:-1]
    result.log_probs.sum().backward()
    assert log_p.grad.shape == shape


def test_a_row_of_unused_slots():
    log_p = torch.full((2, 3), -INF, requires_grad=True)
    result = project(log_p, log_p.detach(), BOUND)
    assert (result.log_probs == -INF).all() and (result.kl == 0).all()
    result.log_probs.backward(torch.ones(2, 3))
    assert (log_p.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_not_modified_and_dtype_is_kept(dtype):
    log_p, log_q = random_rows(20, 5, 3.0, dtype=dtype)
    before = log_p.clone(), log_q.clone()
    result = project(log_p, log_q, BOUND)
    assert torch.equal(log_p, before[0]) and torch.equal(log_q, before[1])
    assert {x.dtype for x in result} == {dtype}
    assert result.log_probs.data_ptr() != log_p.data_ptr()


@pytest.mark.parametrize("bound", [0, 0.0, -1, math.nan, -INF])
def test_bad_bound_is_named(bound):
    log_p, log_q = random_rows(2, 3, 1.0)
    with pytest.raises(ValueError, match=f"`kl_bound` must be positive, got {float(bound)}"):
        project(log_p, log_q, bound)


def test_mismatches_are_named():
    log_p, log_q = random_rows(2, 3, 1.0)
    with pytest.raises(ValueError, match=r"the same shape \(\.\.\., S\), S at least 1, got \(2, 3\) and \(2, 2\)"):
        project(log_p, log_q[:, :2], BOUND)
    with pytest.raises(ValueError, match=r"the same shape \(\.\.\., S\), S at least 1, got \(2, 3\) and \(1, 3\)"):
        project(log_p, log_q[:1], BOUND)  # no silent broadcast
    with pytest.raises(ValueError, match="the same shape"):
        project(log_p[0, 0], log_q[0, 0], BOUND)
    with pytest.raises(ValueError, match=r"S at least 1, got \(3, 0\)"):
        project(torch.zeros(3, 0), torch.zeros(3, 0), BOUND)
    with pytest.raises(ValueError, match=r"got torch\.float32 and torch\.float64"):
        project(log_p.float(), log_q, BOUND)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16 and torch\.bfloat16"):
        project(log_p.bfloat16(), log_q.bfloat16(), BOUND)


# --- cost ------------------------------------------------------------------------------------------------------------


def test_solver_needs_few_evaluations():
    counts = []
    for difference in [0.3, 1.0, 3.0, 10.0, 30.0, 100.0]:
        for old_spread in [0.1, 1.0, 3.0, 10.0, 30.0]:
            log_p, log_q = random_rows(1000, 33, difference, old_spread)
            outside = kl(log_p, log_q) > BOUND
            _, _, solved_kl, evaluations = solve(log_p[outside], log_q[outside], BOUND, relative_tolerance=1e-3)
            assert ((solved_kl - BOUND).abs() <= 1e-3 * BOUND).all()
            counts.append(evaluations)
    counts = torch.cat(counts).double()
    assert len(counts) > 20_000
    assert counts.median() <= 5
    assert counts.quantile(0.99) <= 10
    assert counts.max() <= 20


def test_kl_divergence():
    log_p, log_q = random_rows(30, 7, 5.0)
    np.testing.assert_allclose(kl_divergence(log_p, log_q), reference_kl(log_p.numpy(), log_q.numpy()), rtol=1e-12)
    half, certain = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, -INF])
    assert kl_divergence(certain, half).item() == pytest.approx(math.log(2))
    assert kl_divergence(half, certain).item() == INF
    certain.requires_grad_()
    kl_divergence(certain, half).backward()
    assert certain.grad[1] == 0 and certain.grad[0].isfinite()


@pytest.mark.parametrize("which", ["policy", "old"])
def test_nan_is_refused(which):
    log_p, log_q = random_rows(4, 5, 1.0)
    (log_p if which == "policy" else log_q)[2, 1] = torch.nan
    with pytest.raises(ValueError, match="hold NaN"):
        project(log_p, log_q, 0.05)

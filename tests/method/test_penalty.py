"""The penalty: its formulas in float64. `tests/trl/test_loss.py` has the trainers' losses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.method.test_mask import distributions
from tests.references import reference_kl, reference_project
from troll_trl.trust_region.binary import binary_log_probs
from troll_trl.trust_region.penalty import ROUNDING, kl_penalty


def reference_penalty(p, q, bound):
    """KL(p ‖ π) and KL(p‖q) of one row, float64, by an independent root-finder."""
    pi = np.asarray(q) if bound == 0 else reference_project(p, q, bound).log_probs
    return reference_kl(p, pi), reference_kl(p, q)


def two_outcomes(log_p):
    """`log p` and `log (1 − p)` of a float64 `log p`."""
    return np.array([log_p, np.log(-np.expm1(log_p))])


# -- The mathematics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0.0, 0.01, 0.2, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binary", [False, True])
def test_value_and_gradient_are_their_definitions(binary, dtype, bound):
    """The gradient in the logits, by the chain rule from one that is written out here."""
    old, policy = distributions(rows=200, vocabulary=12)
    logits = policy.to(dtype, copy=True).requires_grad_()
    slots = 1 if binary else 12
    penalty = kl_penalty(logits.log_softmax(-1)[..., :slots], old.to(dtype)[..., :slots], bound)
    (gradient,) = torch.autograd.grad(penalty.regression.sum(), logits)

    tolerance = 2e-6 if dtype == torch.float32 else 1e-9
    for row in range(200):
        p, q = policy[row].numpy(), old[row].numpy()
        one_hot = np.eye(12)[0]
        outcomes = [two_outcomes(x[0]) for x in (p, q)] if binary else [p, q]
        value, kl = reference_penalty(*outcomes, bound)
        outside = kl > bound
        assert penalty.outside[row] == outside
        assert penalty.policy_kl[row].item() == pytest.approx(kl, abs=tolerance)
        assert penalty.regression[row].item() == pytest.approx(value if outside else 0.0, abs=tolerance)
        expected = np.zeros(12)
        if outside:
            pi = outcomes[1] if bound == 0 else reference_project(*outcomes, bound).log_probs
            log_ratio = outcomes[0] - pi
            if binary:  # ∂R/∂ log p(a), and ∂ log p(a)/∂ logits
                expected = np.exp(p[0]) * (log_ratio[0] - log_ratio[1]) * (one_hot - np.exp(p))
            else:
                expected = np.exp(p) * (log_ratio - value)
        np.testing.assert_allclose(gradient[row].numpy(), expected, rtol=0, atol=10 * tolerance)


@settings(deadline=None)
@given(st.floats(-60, -1e-9), st.floats(-60, -1e-9), st.floats(0, 2))
def test_binary_penalty_of_any_two_probabilities(log_p, log_q, bound):
    """Finite in float32 for certain and for impossible tokens, and never on the wrong side."""
    policy = torch.tensor([[log_p]], dtype=torch.float32, requires_grad=True)
    old = torch.tensor([[log_q]], dtype=torch.float32)
    penalty = kl_penalty(policy, old, bound)
    (slope,) = torch.autograd.grad(penalty.regression.sum(), policy)
    assert penalty.regression.isfinite().all() and slope.isfinite().all()
    assert penalty.regression.item() >= -1e-6
    # The regression moves the sampled token back: down if it has become more likely
    assert slope.item() * (log_p - log_q) >= 0
    if not penalty.outside.item():
        assert slope.item() == 0 and penalty.regression.item() == 0


@pytest.mark.parametrize("log_p", [-1e-12, -(2.0**-30), -1e-5, -0.1, -0.693, -0.7, -20.0, -88.0])
def test_the_probability_of_all_others_keeps_its_digits(log_p):
    p, others = binary_log_probs(torch.tensor(log_p, dtype=torch.float32)).tolist()
    exact = np.log(-np.expm1(np.float64(np.float32(min(log_p, -(2.0**-23))))))
    assert others == pytest.approx(exact, rel=3e-7, abs=1e-38)
    assert p == np.float32(min(log_p, -(2.0**-23)))


def test_rounding_alone_has_no_penalty():
    """Two float32 evaluations of the same weights: with `kl_bound` 0 each would leave a gradient for Adam to scale."""
    old, _ = distributions()
    old = old.float()
    policy = (old * (1 + ROUNDING / 4)).requires_grad_()
    for slots in (1, None):
        penalty = kl_penalty(policy[..., :slots], old[..., :slots], 0.0)
        (gradient,) = torch.autograd.grad(penalty.regression.sum(), policy)
        assert not penalty.outside.any() and not gradient.any()


def test_rounding_of_a_certain_token_has_no_penalty():
    """One digit of its logarithm, which a head takes from a difference of logits, is many digits of `log (1 − p)`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, 50, generator=generator)
    logits[:, 0] += 8 + 16 * torch.rand(5000, generator=generator)  # 1 − p(a) from 0.1 to 1e-9
    again = logits * (1 + 2.0**-22 * torch.randn(logits.shape, generator=generator))
    old, policy = (x[:, :1] - x.logsumexp(-1, keepdim=True) for x in (logits, again))
    assert not kl_penalty(policy, old, 0.0).outside.any()
    assert kl_penalty(policy - 1e-4, old, 0.0).outside.all()


@pytest.mark.parametrize("bound", [-0.1, math.nan])
def test_a_bound_out_of_range_is_refused(bound):
    with pytest.raises(ValueError, match="`kl_bound` must be positive, got"):
        kl_penalty(torch.zeros(2, 1), torch.zeros(2, 1), bound)

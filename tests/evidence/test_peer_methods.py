"""The study's published peers against their losses as they are written, by autograd in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from evidence.peer_methods import Cfpo, Cpgd


def tokens():
    """Log-probabilities `(2, 60)` of policy and old policy, some far apart, and advantages of either sign."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(2, 60, generator=generator, dtype=torch.float64)
    policy = (old + torch.randn(2, 60, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    return policy.requires_grad_(), old, torch.tensor([[1.3], [-0.7]], dtype=torch.float64)


def surrogate(bounded, old, advantages):
    """What TRL makes of a trust region's result, with an infinite clip range."""
    return -(bounded.log_probs - old).exp() * advantages


def gradients(loss, expected, policy):
    return [torch.autograd.grad(x.sum(), policy, retain_graph=True)[0] for x in (loss, expected)]


@pytest.mark.parametrize("weight", [0.001, 1.0])
def test_cpgd_is_a_clipped_policy_gradient_and_a_drift(weight):
    policy, old, advantages = tokens()
    bounded = Cpgd(SimpleNamespace(epsilon=0.2))(policy[..., None], old[..., None], advantages)
    loss = surrogate(bounded, old, advantages) + weight * bounded.regression

    log_ratio = policy - old
    clipped = log_ratio.clamp(math.log(0.8), math.log(1.2))
    drift = ((log_ratio.detach().exp() - 1).clamp(max=2.0)) * policy
    expected = -torch.min(log_ratio * advantages, clipped * advantages) + weight * drift
    torch.testing.assert_close(*gradients(loss, expected, policy))
    assert (bounded.regression >= 0).all(), "k3 is never negative"


def test_cfpo_is_a_ratio_and_its_quadratic_penalty():
    policy, old, advantages = tokens()
    bounded = Cfpo(SimpleNamespace(epsilon=0.2))(policy[..., None], old[..., None], advantages)
    loss = surrogate(bounded, old, advantages) + bounded.regression

    ratio = (policy - old).exp()
    expected = -ratio * advantages + advantages.abs() / 0.4 * (ratio - 1) ** 2
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*gradients(loss, expected, policy))

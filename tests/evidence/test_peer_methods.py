"""The published peers of the study against their losses as they are written, by autograd in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from evidence.peer_methods import Cfpo, Cpgd, Drpo, Ipo


def config(epsilon=0.2, regression_coef=1.0):
    return SimpleNamespace(epsilon=epsilon, regression_coef=regression_coef)


def tokens():
    """Log-probabilities `(2, 60)` of policy and old policy, some far apart, and advantages of either sign."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(2, 60, generator=generator, dtype=torch.float64)
    policy = (old + torch.randn(2, 60, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    return policy.requires_grad_(), old, torch.tensor([[1.3], [-0.7]], dtype=torch.float64)


def loss_of(region, policy, old, advantages, alpha=1.0):
    """What TRL makes of a trust region's result: the ratio times the weighted advantage, and the regression."""
    bounded = region(policy[..., None], old[..., None], advantages)
    weight = 1.0 if bounded.weight is None else bounded.weight
    assert bounded.weight is None or not bounded.weight.requires_grad
    return -(bounded.log_probs - old).exp() * weight * advantages + alpha * bounded.regression


def gradient(loss, policy):
    return torch.autograd.grad(loss.sum(), policy, retain_graph=True)[0]


def test_cpgd_is_a_clipped_policy_gradient_and_a_drift():
    weight = 0.01
    policy, old, advantages = tokens()
    loss = loss_of(Cpgd(config(regression_coef=weight)), policy, old, advantages, weight)
    log_ratio = policy - old
    clipped = log_ratio.clamp(math.log(0.8), math.log(1.2))
    drift = ((log_ratio.detach().exp() - 1).clamp(max=2.0)) * policy
    expected = -torch.min(log_ratio * advantages, clipped * advantages) + weight * drift
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy))


def test_cfpo_is_a_ratio_and_its_quadratic_penalty():
    policy, old, advantages = tokens()
    ratio = (policy - old).exp()
    expected = -ratio * advantages + advantages.abs() / 0.4 * (ratio - 1) ** 2
    loss = loss_of(Cfpo(config()), policy, old, advantages)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy))


def test_drpo_moves_back_what_is_beyond_its_bound():
    delta = 0.15
    policy, old, advantages = tokens()
    p, q = policy.exp(), old.exp()
    expected = -p / q * advantages + advantages.abs() * (p - q) ** 2 / (2 * delta * q)
    loss = loss_of(Drpo(config(delta)), policy, old, advantages)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy))


def test_ipo_drops_a_token_in_both_directions_but_not_its_small_penalty():
    policy, old, advantages = tokens()
    keep = (policy.exp() - old.exp()).abs() <= 0.1
    moved_with_it = ((policy - old) * advantages > 0)[~keep]
    assert keep.any() and moved_with_it.any() and not moved_with_it.all()
    expected = -1.0 * keep * advantages * (policy - old).exp() + 1e-3 * (policy - old) ** 2
    loss = loss_of(Ipo(config()), policy, old, advantages)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy))


@pytest.mark.parametrize("region", [Cfpo, Drpo, Ipo])
def test_a_published_weight_cannot_be_changed(region):
    with pytest.raises(ValueError, match=r"`regression_coef` must be 1 .* got 0\.5"):
        region(config(regression_coef=0.5))

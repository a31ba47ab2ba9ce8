"""The other methods of the study against their losses as they are written, by autograd in float64."""

from types import SimpleNamespace

import torch

from evidence.peer_methods import Clip, Ipo


def tokens():
    """Log-probabilities `(2, 60)` of policy and old policy, some far apart, and advantages of either sign."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(2, 60, generator=generator, dtype=torch.float64)
    policy = (old + torch.randn(2, 60, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    return policy.requires_grad_(), old, torch.tensor([[1.3], [-0.7]], dtype=torch.float64)


def gradient(region, policy, old, advantages):
    """Of what TRL makes of a trust region's result: the ratio times the weighted advantage."""
    bounded = region(policy[..., None], old[..., None], advantages)
    assert bounded.regression is None and not bounded.weight.requires_grad
    loss = -(bounded.log_probs - old).exp() * bounded.weight * advantages
    return torch.autograd.grad(loss.sum(), policy)[0]


def test_ipo_drops_a_token_in_both_directions():
    policy, old, advantages = tokens()
    keep = (policy.exp() - old.exp()).abs() <= 0.3
    moved_with_it = ((policy - old) * advantages > 0)[~keep]
    assert keep.any() and moved_with_it.any() and not moved_with_it.all()
    expected = torch.autograd.grad((-1.0 * keep * advantages * (policy - old).exp()).sum(), policy)[0]
    torch.testing.assert_close(gradient(Ipo(), policy, old, advantages), expected)


def test_the_clip_has_ppos_gradient():
    policy, old, advantages = tokens()
    ratio = (policy - old).exp()
    surrogate = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = torch.autograd.grad(surrogate.sum(), policy)[0]
    region = Clip(SimpleNamespace(epsilon=0.2, kl_bound=0.2))
    torch.testing.assert_close(gradient(region, policy, old, advantages), expected)
    kl = region(policy[..., None], old[..., None], advantages).token_stats["policy_kl"]
    k3 = (policy - old).exp() - 1 - (policy - old)
    torch.testing.assert_close(kl, 0.05 / 0.2 * k3)

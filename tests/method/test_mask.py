"""DPPO's mask: its weights against formulas in float64. `tests/trl/test_loss.py` has the trainer's loss."""

import math

import numpy as np
import pytest
import torch

from tests.references import reference_divergence
from troll_trl.trust_region.mask import DIVERGENCES, binary_kl, checked_bound, mask_weight

BOUNDS = {"binary_tv": 0.05, "binary_kl": 0.003}


def distributions(rows=400, vocabulary=40, seed=0, spread=3.0):
    """Log-probabilities `(rows, vocabulary)` of an old policy and of a moved one, in float64; token 0 is sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    moved = logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64) * torch.rand(
        rows, 1, generator=generator, dtype=torch.float64
    )
    sampled = logits.softmax(-1).multinomial(1, generator=generator)  # (rows, 1)
    order = (
        torch.arange(vocabulary).expand(rows, -1).scatter(1, sampled, 0).scatter(1, torch.zeros_like(sampled), sampled)
    )
    return logits.gather(1, order).log_softmax(-1), moved.gather(1, order).log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_their_definitions(name, dtype):
    old, policy = distributions()
    expected = [reference_divergence(name, p, q) for p, q in zip(policy.numpy(), old.numpy(), strict=True)]
    actual = DIVERGENCES[name](policy.to(dtype)[:, 0], old.to(dtype)[:, 0])
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        actual.double().numpy(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-13
    )


@pytest.mark.parametrize(("log_p", "log_q", "dtype", "within"), [
    (-20.0, -21.0, torch.float32, 2e-3), (-20.0, -21.0, torch.float64, 1e-7), (-1e-12, -0.01, torch.float64, 1e-12),
])  # fmt: skip
def test_a_binary_kl_of_unlikely_and_of_certain_tokens_keeps_its_digits(log_p, log_q, dtype, within):
    """By `1 − q(a)` it was −7.6e-10, for 5.4e-10."""
    kl = binary_kl(torch.tensor(log_p, dtype=dtype), torch.tensor(log_q, dtype=dtype)).item()
    p, q = (math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x)) for x in (log_p, log_q))  # of all others
    assert kl == pytest.approx(math.exp(log_q) * (log_q - log_p) + math.exp(q) * (q - p), rel=within)


@pytest.mark.parametrize("ratio_cap", [None, 1.2])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradient_is_dppos(name, ratio_cap):
    """TRL's surrogate of the weighted advantage, against `M·min(r, C)·A·∇log p(a)` token by token."""
    generator = torch.Generator().manual_seed(1)
    old, policy = distributions(rows=200)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    advantages[::10] = 0.0
    upstream = torch.randn(200, generator=generator, dtype=torch.float64)

    leaf = policy.clone().requires_grad_()
    log_probs = leaf.log_softmax(-1)
    weight, _, masked = mask_weight(log_probs[:, 0], old[:, 0], advantages, name, BOUNDS[name], ratio_cap)
    loss = -(log_probs[:, 0] - old[:, 0]).exp() * advantages * weight
    (gradient,) = torch.autograd.grad((upstream * loss).sum(), leaf)

    for row in range(200):
        p, q, advantage = policy[row], old[row], advantages[row].item()
        ratio = (p[0] - q[0]).exp().item()
        away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        keeps = not (reference_divergence(name, p.numpy(), q.numpy()) > BOUNDS[name] and away)
        factor = keeps * min(ratio, ratio_cap or math.inf) * advantage
        score = -p.exp()
        score[0] += 1  # ∇ log p(a) with respect to the logits
        torch.testing.assert_close(gradient[row], -upstream[row] * factor * score, rtol=1e-10, atol=1e-13)
        assert masked[row].item() is not keeps
    assert 10 < masked.sum() < 150, "the test needs tokens of both kinds"


def test_binary_kl_of_certain_tokens_is_finite():
    """Rounding gives a certain token a log-probability of 0 and above, where 1 − q has no logarithm."""
    old, policy = (
        torch.tensor([0.0, 1e-7, -1e-9, -0.5, -80.0]),
        torch.tensor([-1e-3, 0.0, 0.0, 0.0, -1.0]),
    )
    kl = binary_kl(policy, old)
    assert kl.isfinite().all() and (kl >= -1e-6).all()
    assert kl[0] == pytest.approx(1e-3, rel=1e-2) and kl[3] > 1 and kl[4] == pytest.approx(-math.log(1 - math.exp(-1)))


def test_a_cap_leaves_every_token_a_gradient():
    old = torch.tensor([-80.0, -20.0, 0.0])
    policy = torch.zeros(3)
    weight, *_ = mask_weight(policy, old, torch.full((3,), -1.0), "binary_tv", 0.15, ratio_cap=5.0)
    expected = torch.tensor([5 * math.exp(-80.0), 5 * math.exp(-20.0), 1.0], dtype=torch.float64)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "bound"), [("tv", 0.1), ("topk_kl", 0.1), ("binary_tv", 1.0), ("binary_tv", -0.1), ("binary_kl", math.nan)]
)
def test_a_type_or_bound_out_of_range_is_named(kind, bound):
    message = f"`divergence_(type|bound)` .* got ('{kind}'|{bound})"
    with pytest.raises(ValueError, match=message):
        checked_bound(kind, bound)
    with pytest.raises(ValueError, match=message):
        mask_weight(torch.zeros(2), torch.zeros(2), torch.ones(2), kind, bound)


def test_defaults_of_the_bound_are_the_papers():
    assert [checked_bound(kind) for kind in DIVERGENCES] == [0.15, 0.05]

"""DPPO's mask: its weights against formulas in float64, and the trainer against TRL's and against full logits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import reference_divergence
from test_trainer import take_off_policy
from tiny import certain_model, saved_model
from trl import GRPOConfig, GRPOTrainer
from trl_comparison import assert_same_movement, logged, make_trainer, micro_batch, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trust_region.mask import DIVERGENCES, mask_weight, scale_gradient
from troll_trl.trust_region.regions import MaskTrustRegion, TrustRegion, TrustRegionOutput
from troll_trl.trust_region.sparse import SparseDistribution, sparsify

MASK = {"trust_region": "mask"}
BOUNDS = {"binary_tv": 0.05, "binary_kl": 0.003, "topk_tv": 0.05, "topk_kl": 0.003}


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


# -- The weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_their_definitions(name, dtype):
    old, policy = distributions()
    expected = [reference_divergence(name, p, q) for p, q in zip(policy.numpy(), old.numpy(), strict=True)]
    actual = DIVERGENCES[name](policy.to(dtype), old.to(dtype))
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        actual.double().numpy(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-13
    )


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 12.0), st.integers(1, 30))
def test_binary_is_at_most_sparse_and_sparse_at_most_full(seed, spread, support_size):
    old, policy = distributions(rows=20, seed=seed, spread=spread)
    kept = sparsify(old, torch.zeros(20, dtype=torch.long), support_size, tail_mass=1e-3)
    q, p = (
        SparseDistribution.log_probs_on_support(old, kept.token_ids),
        SparseDistribution.log_probs_on_support(policy, kept.token_ids),
    )
    for kind in ("tv", "kl"):
        binary = DIVERGENCES[f"binary_{kind}"](p, q)
        sparse, full = DIVERGENCES[f"topk_{kind}"](p, q), DIVERGENCES[f"topk_{kind}"](policy, old)
        assert (binary <= sparse + 1e-7).all() and (sparse <= full + 1e-7).all()
        if kind == "tv":
            assert (full - sparse <= torch.minimum(p[:, -1].exp(), q[:, -1].exp()) + 1e-12).all()


@pytest.mark.parametrize("ratio_cap", [None, 1.2])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradient_is_dppos(name, ratio_cap):
    """TRL's surrogate of the weighted log-probability, against `M·min(r, C)·A·∇log p(a)` token by token."""
    generator = torch.Generator().manual_seed(1)
    old, policy = distributions(rows=200)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    advantages[::10] = 0.0
    upstream = torch.randn(200, generator=generator, dtype=torch.float64)

    leaf = policy.clone().requires_grad_()
    log_probs = leaf.log_softmax(-1)
    weight, _, masked = mask_weight(log_probs, old, advantages, name, BOUNDS[name], ratio_cap)
    handed_on = scale_gradient(log_probs[:, 0], weight)
    assert torch.equal(handed_on, log_probs[:, 0]), "the value stays"
    loss = -(handed_on - old[:, 0]).exp() * advantages
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
        torch.tensor([[0.0], [1e-7], [-1e-9], [-0.5], [-80.0]]),
        torch.tensor([[-1e-3], [0.0], [0.0], [0.0], [-1.0]]),
    )
    kl = DIVERGENCES["binary_kl"](policy, old)
    assert kl.isfinite().all() and (kl >= -1e-6).all()
    assert kl[0] == pytest.approx(1e-3, rel=1e-2) and kl[3] > 1 and kl[4] == pytest.approx(-math.log(1 - math.exp(-1)))


def test_binary_kl_resolves_what_its_dtype_does():
    """Float32 knows no log-probability between -2⁻²⁴ and 0 of a softmax; float64 does."""
    log_p, log_q = -1e-12, -0.01
    kl = DIVERGENCES["binary_kl"](*(torch.tensor([[x]], dtype=torch.float64) for x in (log_p, log_q)))
    other_q = -math.expm1(log_q)
    expected = math.exp(log_q) * (log_q - log_p) + other_q * (math.log(other_q) - math.log(-math.expm1(log_p)))
    assert kl.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [-math.inf, math.log(1e-6), math.log(1e-3)])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_empty_rest_of_the_policy_masks_nothing(name, rest, dtype):
    """A support of the whole vocabulary: an engine's rest is rounding, which was an infinite KL from the policy's."""
    policy = torch.tensor([[0.5001, 0.2999, 0.2, 0.0]], dtype=dtype).log()
    old = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2), rest]], dtype=dtype)
    expected = reference_divergence(name, policy[0, :3].double().numpy(), old[0, :3].double().numpy())
    weight, divergence, masked = mask_weight(policy, old, torch.ones(1, dtype=dtype), name, 2e-3)
    assert weight.item() == 1.0 and not masked
    assert divergence.item() == pytest.approx(expected, abs=6e-4 if name == "topk_tv" else 2e-7)
    assert mask_weight(policy, old, torch.ones(1, dtype=dtype), name, 1e-9).masked.item() is (divergence.item() > 1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_impossible_and_certain_tokens_give_no_nan(name):
    """Probabilities of 0 and 1 in either policy, in every pair: finite, except a KL to a policy that has lost a kept
    token."""
    rows = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]).log()
    policy, old = rows.repeat_interleave(6, 0), rows.repeat(6, 1)
    expected = [reference_divergence(name, p.numpy(), q.numpy()) for p, q in zip(policy, old, strict=True)]
    for p, q, divergence, exact in zip(policy, old, DIVERGENCES[name](policy, old).tolist(), expected, strict=True):
        if name == "topk_kl" and p[2] == -math.inf < q[2]:  # the policy has no rest
            exact = reference_divergence(name, p[:2].numpy(), q[:2].numpy())
        if name == "binary_kl" and p[0] == 0 > q[0]:  # float32 has no probability between 1 − 2⁻²⁴ and 1
            exact = min(exact, divergence)
            assert divergence > 8 * (1 - q[0].exp())
        assert divergence == pytest.approx(exact, abs=3e-6), (p.exp(), q.exp())
    for advantage in (-1.0, 0.0, 1.0):
        weight = mask_weight(policy, old, torch.full((36,), advantage), name, 0.1).weight
        assert (weight.isfinite()).all()


def test_a_cap_leaves_every_token_a_gradient():
    old = torch.tensor([[-80.0, 0.0], [-20.0, 0.0], [0.0, -1.0]])
    policy = torch.zeros(3, 2)
    weight, *_ = mask_weight(policy, old, torch.full((3,), -1.0), "binary_tv", 0.15, ratio_cap=5.0)
    expected = torch.tensor([5 * math.exp(-80.0), 5 * math.exp(-20.0), 1.0], dtype=torch.float64)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=0)


# -- The trainer ----------------------------------------------------------------------------------------------------

TRAINED = {
    "dapo": {},
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "entropy_bonus": {"entropy_coef": 0.05},
    "high_entropy_tokens": {"top_entropy_quantile": 0.5},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 48},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_bound_that_is_never_reached_is_trl_without_a_clip(name, tmp_path):
    """Of a binary divergence bit for bit: the head is TRL's, and the weight of every gradient is 1."""
    _, trl, ours = train_both("binary_kl", tmp_path, **{"max_steps": 5} | TRAINED[name])
    for key, value in weights(trl).items():
        assert torch.equal(value, weights(ours)[key]), key


@pytest.mark.parametrize("kind", ["binary_kl", "topk_kl"])
def test_reference_kl_is_trls(kind, tmp_path):
    path = saved_model(tmp_path / "model")
    start, trl, ours = train_both(kind, tmp_path, lambda: path, beta=1.0, use_bias_correction_kl=True, max_steps=5)
    assert_same_movement(start, weights(trl), weights(ours))
    assert logged(ours, "kl") == pytest.approx(logged(trl, "kl"), rel=1e-3, abs=1e-7)


class FullLogitsMask(GRPOTrainer):
    """DPPO from the full logits of policy and old policy, token by token; nothing of `troll_trl` is used."""

    divergence, bound, cap = "binary_tv", 0.05, None
    masked, near = 0, math.inf  # tokens, and the smallest distance of a divergence from its bound

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            output["full_old"] = self._full(output)  # (B, C, V)
        return output

    def _full(self, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logits = self.model(input_ids=ids, attention_mask=attention).logits
        return logits[:, -inputs["completion_ids"].shape[1] - 1 : -1].double().log_softmax(-1)

    def _compute_loss(self, model, inputs):
        full, loss = self._full(inputs), 0.0
        for b, t in inputs["completion_mask"].nonzero().tolist():
            sampled = inputs["completion_ids"][b, t].item()
            order = [sampled, *(v for v in range(full.shape[-1]) if v != sampled)]
            p, q = full[b, t][order], inputs["full_old"][b, t][order]
            advantage, ratio = inputs["advantages"][b].item(), (p[0] - q[0]).exp().item()
            divergence = reference_divergence(self.divergence, p.detach().numpy(), q.numpy())
            away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
            if away:
                self.near = min(self.near, abs(divergence - self.bound))
            if divergence > self.bound and away:
                self.masked += 1
                continue
            loss = loss - min(ratio, self.cap or math.inf) * advantage * p[0]
        # "dapo" of one process without accumulation: the tokens of a rollout batch, shared among its updates
        return (loss / (inputs["num_items_in_batch"] / self.args.steps_per_generation)).float()


@pytest.mark.parametrize(
    ("kind", "ratio_cap"), [("binary_tv", None), ("binary_kl", 1.1), ("topk_tv", 1.1), ("topk_kl", None)]
)
def test_a_run_is_that_of_an_independent_trainer(kind, ratio_cap, tmp_path):
    class Independent(FullLogitsMask):
        divergence, bound, cap = kind, 0.1 if kind.endswith("kl") else BOUNDS[kind], ratio_cap

    # The KLs with moves so large that their direction matters
    options = {"learning_rate": 4e-2 if kind.endswith("kl") else 1e-2, "max_steps": 6, "steps_per_generation": 3}
    expected = make_trainer(Independent, GRPOConfig, tmp_path, certain_model(), **options)
    start = weights(expected)
    expected.train()
    mask = {"divergence_type": kind, "divergence_bound": Independent.bound, "ratio_cap": ratio_cap}
    support = {"support_size": 100, "tail_mass": 0.0} if kind.startswith("topk") else {}
    options |= MASK | mask | support
    ours = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, certain_model(), **options)
    ours.train()
    assert expected.masked > 10 and expected.near > 1e-6, "the test needs masked tokens, and none near the bound"
    assert_same_movement(start, weights(expected), weights(ours))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_metrics_and_loss_of_a_micro_batch(loss_type, tmp_path):
    """Shares of tokens of either sign, and the gradient of each loss type, from full logits; some tokens are masked."""
    trainer = make_trainer(
        TrollGRPOTrainer,
        TrollGRPOConfig,
        tmp_path,
        certain_model(),
        **MASK,
        divergence_bound=0.02,
        loss_type=loss_type,
        learning_rate=2e-2,
        max_steps=3,
    )
    inputs = take_off_policy(trainer)
    inputs["advantages"][::2] *= -1
    inputs["completion_mask"][3, 5:] = 0
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:2, 2:5] = 0
    model = trainer.model.train()
    trainer.troll_metrics["train"].pop()
    model.zero_grad()
    trainer.compute_loss(model, inputs).backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    metrics = trainer.troll_metrics["train"].pop()

    mask, old = inputs["completion_mask"] * inputs["tool_mask"], inputs["old_per_token_logps"].double()
    log_probs = FullLogitsMask._full(trainer, inputs).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    advantages = inputs["advantages"].double().unsqueeze(1).expand(mask.shape)
    ratio, divergence = (log_probs - old).exp().detach(), (log_probs.exp() - old.exp()).abs().detach()
    masked = (divergence > 0.02) & ((ratio - 1) * advantages > 0) & mask.bool()
    per_token = -(ratio * advantages * log_probs).masked_fill(masked, 0.0) * mask
    expected = {
        "dapo": per_token.sum() / (inputs["num_items_in_batch"] / 4),
        "grpo": (per_token.sum(1) / mask.sum(1)).mean(),
        "bnpo": per_token.sum() / mask.sum(),
        "dr_grpo": per_token.sum() / (len(mask) * 8),
        "luspo": per_token.sum(1).mean(),
    }[loss_type]
    (expected_gradient,) = torch.autograd.grad(expected, model.model.embed_tokens.weight)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-3 * expected_gradient.abs().max().item())

    live = mask.bool()
    for name, tokens in {"": live, "_positive": live & (advantages > 0), "_negative": live & (advantages < 0)}.items():
        share = (masked & tokens).sum() / tokens.sum()
        assert share > 0 and metrics[f"troll/masked_fraction{name}"] == pytest.approx(share.item())
    assert metrics["troll/divergence_mean"] == pytest.approx(divergence[live].mean().item(), rel=1e-4)
    assert metrics["troll/divergence_max"] == pytest.approx(divergence[live].max().item(), rel=1e-4)


def test_a_binary_divergence_holds_no_cache_and_calls_trls_head_alone(tmp_path, monkeypatch):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **MASK, max_steps=4)
    calls, forward = [], trainer.model.forward

    def counting(**kwargs):
        if kwargs.get("fused_lm_head"):
            calls.append((torch.is_grad_enabled(), bool(kwargs.keys() & {"support_size", "tail_mass", "token_ids"})))
        return forward(**kwargs)

    monkeypatch.setattr(trainer.model, "forward", counting)
    trainer.train()
    assert calls == [(False, False)] * 4 + [(True, False)] * 4
    assert not any(name.startswith("troll") for name in micro_batch(trainer))


def test_a_masked_token_of_any_ratio_leaves_the_loss_finite():
    """Its ratio overflows, and 0·inf is NaN. Possible where completions are not the policy's own."""
    policy = torch.tensor([[[-0.1]], [[-0.5]]], requires_grad=True)  # (B, C, 1)
    old, advantages = torch.tensor([[[-95.0]], [[-0.6]]]), torch.ones(2, 1)
    bounded = MaskTrustRegion("binary_tv", 0.15)(policy, old, advantages)
    (-(bounded.log_probs - old[..., 0]).exp() * advantages).sum().backward()
    assert policy.grad.flatten().tolist() == [0.0, pytest.approx(-math.exp(0.1))]


class WithoutSupport(TrustRegion):
    needs_support = False
    differences = staticmethod(lambda policy, old: None)

    def __call__(self, policy, old, advantages):
        self.differences(policy.detach(), old)
        return TrustRegionOutput(policy[..., 0])


def test_rloo_serves_a_trust_region_without_a_support(tmp_path):
    """TRL's rollout batch has no old log-probability of a token: every batch would have been taken for an idle one."""
    given = []

    class Own(TrollRLOOTrainer):
        def _make_trust_region(self, args):
            region = WithoutSupport()
            region.differences = lambda policy, old: given.append((policy - old).abs().max().item())
            return region

    make_trainer(Own, TrollRLOOConfig, tmp_path, beta=0.0, learning_rate=2e-2).train()
    assert len(given) == 8, "the trust region was not called in every update"
    assert max(given[0], given[4]) < 1e-5 and min(given[1:4]) > 1e-3


# -- Options --------------------------------------------------------------------------------------------------------


def config(tmp_path, **options):
    return TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_region": "ball"}, "`trust_region` must be one of projection, penalty, mask, got 'ball'"),
        ({"divergence_type": "tv"}, "`divergence_type` must be one of binary_tv, .* got 'tv'"),
        ({"divergence_type": ["binary_tv"]}, r"`divergence_type` must be one of .* got \['binary_tv'\]"),
        ({"divergence_bound": 1.0}, r"`divergence_bound` of binary_tv must be in \(0, 1\).* got 1.0"),
        (
            {"divergence_type": "topk_kl", "divergence_bound": -1},
            r"`divergence_bound` of topk_kl must be in \(0, inf\], got -1",
        ),
        ({"ratio_cap": 0.5}, "`ratio_cap` must be at least 1 and finite, got 0.5"),
        ({"importance_sampling_level": "sequence"}, "`importance_sampling_level='sequence'` is not supported"),
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ],
)
def test_what_a_mask_cannot_do_is_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **MASK | options)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("tv", 0.1), ("binary_tv", 1.0), ("topk_tv", -0.1), ("binary_kl", math.nan), ("topk_kl", 0), ("topk_kl", True)],
)
def test_what_a_mask_cannot_do_is_refused_without_a_config(kind, bound):
    message = f"`divergence_(type|bound)` .* got ('tv'|{bound})"
    with pytest.raises(ValueError, match=message):
        MaskTrustRegion(kind, bound)
    with pytest.raises(ValueError, match=message):
        mask_weight(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2), kind, bound)


def test_defaults_of_the_bound_are_the_papers(tmp_path):
    bounds = {kind: config(tmp_path, **MASK, divergence_type=kind).divergence_bound for kind in DIVERGENCES}
    assert bounds == {"binary_tv": 0.15, "binary_kl": 0.05, "topk_tv": 0.15, "topk_kl": 0.05}
    assert config(tmp_path).divergence_bound is None


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        (
            MASK | {"kl_bound": 0.1},
            "kl_bound=0.1 unused by this trust region (masked beyond a binary_tv of 0.15)",
        ),
        (MASK | {"kl_bound": "auto", "steps_per_generation": 16}, "kl_bound=0.2 unused"),
        (MASK | {"regression_coef": 0.5}, "regression_coef=0.5 unused"),
        (MASK | {"support_size": 8}, "support_size=8 unused"),
        ({"divergence_type": "topk_kl"}, "divergence_type=topk_kl unused by this trust region (KL bound 0.05)"),
        ({"ratio_cap": 5.0}, "ratio_cap=5.0 unused"),
    ],
)
def test_options_of_the_other_trust_region_are_said_to_be_unused(options, unused, tmp_path):
    with pytest.warns(UserWarning) as said:
        config(tmp_path, **options)
    files = [warning.filename for warning in said if unused in str(warning.message)]
    assert files == [__file__], "at the line that made the config"


def test_what_is_printed_and_what_the_model_card_says(tmp_path, capsys):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **MASK, ratio_cap=5.0)
    printed = capsys.readouterr().out
    assert "masked beyond a binary_tv of 0.15, ratios capped at 5" in printed and "kept per position" not in printed
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "2602.04879" in card and "2510.03817" not in card

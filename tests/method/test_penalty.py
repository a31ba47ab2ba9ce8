"""TRL's clip with TROLL's penalty: the formulas in float64, and the trainers against TRL's and against full logits."""

import math
import re
from textwrap import indent

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_trl import replace
from references import reference_kl, reference_project
from repository import ROOT
from test_mask import distributions
from test_trainer import take_off_policy
from tiny import certain_model, saved_model, tiny_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer
from trl_comparison import OURS, logged, make_trainer, micro_batch, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig
from troll_trl.trust_region.penalty import ROUNDING, binary_log_probs, kl_penalty

PENALTY = {"trust_region": "penalty"}
BINARY = PENALTY | {"divergence_type": "binary_kl"}


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
    # The sampled token is pulled back: down if it has become more likely
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


@pytest.mark.parametrize("bound", [-0.1, math.nan, True, "0.1"])
def test_a_bound_out_of_range_is_refused(bound):
    with pytest.raises(ValueError, match="`kl_bound` must be at least 0, got"):
        kl_penalty(torch.zeros(2, 1), torch.zeros(2, 1), bound)


# -- The trainers ---------------------------------------------------------------------------------------------------

CLIPPED = {
    "dapo": {},
    "clip_higher": {"epsilon": 0.1, "epsilon_high": 0.5},
    "no_limit": {"epsilon": math.inf},
    "two_sided": {"delta": 1.5},
    "sequence_ratio": {"importance_sampling_level": "sequence", "epsilon": 1e-2},
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4},
    "idle": {"steps_per_generation": 1, "max_steps": 4},
}


def trained(*args, **options):
    trainer = make_trainer(*args, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", CLIPPED)
def test_without_weight_it_is_trls_clip_bit_for_bit(name, tmp_path):
    options = CLIPPED[name] | {"learning_rate": 2e-2}
    trl = trained(GRPOTrainer, GRPOConfig, tmp_path, tiny_model(), **options)
    kind = PENALTY if name == "bnpo" else BINARY  # of either kind nothing reads a support
    ours = trained(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, tiny_model(), **options, **kind, regression_coef=0.0)
    for key, value in weights(trl).items():
        assert torch.equal(value, weights(ours)[key]), key
    for key in ("loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert logged(ours, key) == logged(trl, key), key
    if name in ("dapo", "clip_higher", "sequence_ratio"):
        assert max(logged(trl, "clip_ratio/region_mean")) > 0, "the test needs clipped tokens"


def test_rloo_without_weight_is_trls_clip_bit_for_bit(tmp_path):
    path, options = saved_model(tmp_path / "model"), {"learning_rate": 2e-2, "beta": 0.3}
    trl = trained(RLOOTrainer, RLOOConfig, tmp_path, path, **options)
    ours = trained(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, path, **options, **BINARY, regression_coef=0.0)
    for key, value in weights(trl).items():
        assert torch.equal(value, weights(ours)[key]), key
    assert max(logged(ours, "clip_ratio/region_mean")) > 0, "the test needs clipped completions"


def off_policy(algorithm, tmp_path, **options):
    """A trainer and a micro-batch behind its policy, with advantages of either sign."""
    if algorithm == "rloo":
        options = {"beta": 0.0} | options
    options = {"kl_bound": 0.01, "regression_coef": 0.5, "learning_rate": 2e-2, "max_steps": 3} | options
    trainer = make_trainer(*OURS[algorithm], tmp_path, certain_model(), **options)
    inputs = take_off_policy(trainer)
    inputs["advantages"][::2] *= -1
    if algorithm == "grpo":  # RLOO has summed its old log-probabilities
        inputs["completion_mask"][3, 5:] = 0
    trainer.model.train()
    trainer.troll_metrics["train"].pop()
    return trainer, inputs


def full_log_probs(trainer, inputs):
    """`(B, C, V)` float64, differentiable."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    return logits.double().log_softmax(-1)


def reference_regression(trainer, inputs, binary):
    """Per-token penalties `(B, C)` float64 with their gradient, the sampled tokens' `log p(a)` and `log q(a)`, and the
    number of penalised tokens."""
    full, bound = full_log_probs(trainer, inputs), trainer.args.kl_bound
    sampled = full.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)  # (B, C)
    old = (inputs["old_per_token_logps"] if binary else inputs["troll_old_log_probs"][..., 0]).double()
    regression, outside = torch.zeros_like(sampled), 0
    for b, t in inputs["completion_mask"].nonzero().tolist():
        if binary:
            p = torch.stack([sampled[b, t], (-torch.expm1(sampled[b, t])).log()])
            q = torch.from_numpy(two_outcomes(old[b, t].item()))
        else:
            support, q = inputs["troll_old_token_ids"][b, t], inputs["troll_old_log_probs"][b, t].double()
            kept = support[support >= 0].long()
            others = [v for v in range(full.shape[-1]) if v not in kept.tolist()]
            p = torch.cat([full[b, t, kept], full[b, t, others].logsumexp(0, keepdim=True)])
            q = torch.cat([q[: len(kept)], q[-1:]])
        fixed = p.detach().numpy()
        _, kl = reference_penalty(fixed, q.numpy(), bound)
        if kl > bound:
            pi = q.numpy() if bound == 0 else reference_project(fixed, q.numpy(), bound).log_probs
            regression[b, t] = (p.exp() * (p - torch.as_tensor(pi))).sum()
            outside += 1
    return regression, sampled, old, outside


@pytest.mark.parametrize(
    ("loss_type", "bound", "binary"),
    [("dapo", 0.0, False), ("dapo", 0.01, True), ("grpo", 0.0, True), ("grpo", 0.01, False), ("luspo", 0.01, False)],
)
def test_loss_and_gradient_are_a_clip_and_a_penalty(loss_type, bound, binary, tmp_path):
    options = {"loss_type": loss_type, "kl_bound": bound, "epsilon": 0.1, "epsilon_high": 0.3}
    trainer, inputs = off_policy("grpo", tmp_path, **options, **(BINARY if binary else PENALTY))
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = trainer.model.model.embed_tokens.weight.grad.clone()

    regression, sampled, old, outside = reference_regression(trainer, inputs, binary)
    mask, ratio = inputs["completion_mask"].double(), (sampled - old).exp()
    advantages = inputs["advantages"].double().unsqueeze(1)
    clipped = ratio.clamp(0.9, 1.3)
    per_token = -torch.min(ratio * advantages, clipped * advantages) + 0.5 * regression
    expected = {
        "dapo": (per_token * mask).sum() / (inputs["num_items_in_batch"] / 4),
        "grpo": ((per_token * mask).sum(1) / mask.sum(1)).mean(),
        "luspo": (per_token * mask).sum(1).mean(),
    }[loss_type]
    (expected_gradient,) = torch.autograd.grad(expected, trainer.model.model.embed_tokens.weight)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-3 * expected_gradient.abs().max().item())
    metrics = trainer.troll_metrics["train"].pop()
    assert outside >= 5 and metrics["troll/penalized_fraction"] == pytest.approx(outside / mask.sum().item())
    assert metrics["troll/regression"] == pytest.approx(regression.sum().item() / mask.sum().item(), rel=1e-3)
    assert ("troll/support_size_mean" in metrics) is not binary


@pytest.mark.parametrize("binary", [False, True])
def test_loss_of_a_completion_in_rloo(binary, tmp_path):
    trainer, inputs = off_policy("rloo", tmp_path, **(BINARY if binary else PENALTY))
    loss = trainer.compute_loss(trainer.model, inputs)
    regression, sampled, old, outside = reference_regression(trainer, inputs, binary)
    mask = inputs["completion_mask"]
    ratio = ((sampled - old) * mask).sum(1).exp()
    advantages = inputs["advantages"].double()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert outside >= 5
    expected = (-surrogate + 0.5 * (regression * mask).sum(1)).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-5)


def test_rloo_keeps_the_old_policy_of_its_first_pass(tmp_path):
    """The reference is scored after it, by other weights."""
    path = saved_model(tmp_path / "model")
    options = BINARY | {"beta": 0.5, "learning_rate": 2e-2, "max_steps": 6, "kl_bound": 1e-4}
    trainer = make_trainer(TrollRLOOTrainer, TrollRLOOConfig, tmp_path, path, **options)
    trainer.train()
    inputs = micro_batch(trainer)
    scores = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
    torch.testing.assert_close(scores, inputs["old_logps"])
    assert max(logged(trainer, "troll/penalized_fraction")) > 0
    assert logged(trainer, "troll/penalized_fraction")[0] == 0, "the weights of the rollout"


def test_a_binary_penalty_holds_no_support_and_calls_trls_head_alone(tmp_path, monkeypatch):
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **BINARY, max_steps=4)
    calls, forward = [], trainer.model.forward

    def counting(**kwargs):
        if kwargs.get("fused_lm_head"):
            calls.append((torch.is_grad_enabled(), bool(kwargs.keys() & {"support_size", "tail_mass", "token_ids"})))
        return forward(**kwargs)

    monkeypatch.setattr(trainer.model, "forward", counting)
    trainer.train()
    assert calls == [(False, False)] * 4 + [(True, False)] * 4
    assert not any(name.startswith("troll") for name in micro_batch(trainer))


@pytest.mark.parametrize("binary", [False, True])
def test_metrics(binary, tmp_path):
    options = {"learning_rate": 2e-2, "eval_strategy": "steps", "eval_steps": 4, "kl_bound": 1e-3 if binary else 0.02}
    kind = BINARY if binary else PENALTY
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options, **kind)
    trainer.train()
    names = ["penalized_fraction", "policy_kl_mean", "policy_kl_max", "regression"]
    names += [] if binary else ["support_size_mean", "rest_mass_mean"]
    for name in names:
        assert len(logged(trainer, f"troll/{name}")) == 8 and len(logged(trainer, f"eval_troll/{name}")) == 2
    assert len(logged(trainer, "clip_ratio/region_mean")) == 8
    assert 0 < max(logged(trainer, "troll/penalized_fraction")) < 1
    assert logged(trainer, "eval_troll/penalized_fraction") == [0.0, 0.0], "an evaluation scores what sampled"


REFUSED = [
    ({"divergence_type": "binary_tv"}, "`divergence_type='binary_tv'` is not supported with `trust_region` 'penalty'"),
    ({"divergence_type": "topk_tv"}, "`divergence_type='topk_tv'` is not supported with `trust_region` 'penalty'"),
    ({"divergence_type": ["binary_kl"]}, "is not supported with `trust_region` 'penalty'"),
    ({"divergence_bound": 0.1}, "`divergence_bound=0.1` is not supported with `trust_region` 'penalty'"),
    ({"ratio_cap": 2.0}, "`ratio_cap=2.0` is not supported with `trust_region` 'penalty'"),
    ({"kl_bound": -0.1}, "`kl_bound` must be at least 0( or 'auto')?, got -0.1"),
    ({"kl_bound": math.nan}, "`kl_bound` must be at least 0( or 'auto')?, got nan"),
    ({"regression_coef": -1.0}, "`regression_coef` must be at least 0 and finite, got -1.0"),
    ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ({"trust_region": "projection", "kl_bound": 0.0}, "`kl_bound` must be positive( or 'auto')?, got 0.0"),
]
CONFIGS = (TrollGRPOConfig, TrollRLOOConfig, AsyncTrollGRPOConfig)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [(config, *case) for config in CONFIGS for case in REFUSED if case[0].keys() <= config.__dataclass_fields__.keys()],
)
def test_what_a_penalty_cannot_do_is_refused_by_name(config, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(str(tmp_path), use_cpu=True, bf16=False, **(PENALTY | options))


def test_rloo_has_no_mask(tmp_path):
    with pytest.raises(ValueError, match="`trust_region` 'mask' is an option of GRPO alone"):
        TrollRLOOConfig(str(tmp_path), use_cpu=True, bf16=False, trust_region="mask")


def test_the_clip_range_is_used_and_is_not_said_to_be_unused(tmp_path, recwarn):
    config = TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, epsilon=0.1, epsilon_high=1.0, **BINARY)
    assert not [warning for warning in recwarn if "unused" in str(warning.message)]
    assert config.trust_region_options() == {
        "trust_region": "penalty",
        "kl_bound": 0.05,
        "regression_coef": 1.0,
        "divergence_type": "binary_kl",
        "epsilon": 0.1,
        "epsilon_high": 1.0,
        "delta": None,  # a resumed run did not say that it had changed
    }
    assert "binary KL of 0.05" in config.make_trust_region().describe()


def test_without_weight_it_measures_two_outcomes(tmp_path):
    """The head of a support would round otherwise than TRL's. The option's help says it."""
    options = {"use_cpu": True, "bf16": False, "regression_coef": 0.0, "support_size": 8}
    with pytest.warns(UserWarning, match=r"support_size=8 unused by .* \(a penalty beyond a binary KL of 0.05\)"):
        config = TrollGRPOConfig(str(tmp_path), **options, **PENALTY)
    assert not config.make_trust_region().needs_support
    said = config.__dataclass_fields__["regression_coef"].metadata["help"]
    assert "At 0, the penalty's metrics measure 'binary_kl'" in said


def test_the_model_card_names_the_part_of_troll_that_trained(tmp_path):
    make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **BINARY).create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "trained with TROLL's regression, a method introduced in" in card and "2510.03817" in card


# -- The proposal to TRL ----------------------------------------------------------------------------------------------


def proposal():
    """The function of docs/design.md, and the lines that call it in TRL's `_compute_loss`."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("### A proposal to TRL: a binary penalty")[2].partition("\n### ")[0]
    function, lines = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    scope = {"torch": torch}
    exec(function, scope)
    return scope["binary_kl_penalty"], lines


@pytest.mark.parametrize("bound", [1e-3, 0.05, 0.8])
def test_the_proposal_is_the_binary_penalty(bound):
    proposed, _ = proposal()
    old, policy = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)).log()
    old[:4], policy[:4] = torch.tensor([-88.0, -1e-9, 0.0, -5.0]), torch.tensor([-1e-9, -88.0, -3.0, -5.0])
    both = [policy.clone().requires_grad_() for _ in range(2)]
    ours = kl_penalty(both[0].unsqueeze(-1), old.unsqueeze(-1), bound)
    values = ours.regression, proposed(both[1], old, bound)
    ours_gradient, its_gradient = (torch.autograd.grad(v.sum(), x)[0] for v, x in zip(values, both, strict=True))
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-6)
    # A change of a certain token's logarithm changes no logit: (1 − p) is the factor
    scale = -torch.expm1(policy)
    torch.testing.assert_close(its_gradient * scale, ours_gradient * scale, rtol=1e-3, atol=3e-6)
    assert 10 < ours.outside.sum() < 490, "the test needs tokens inside and outside"


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo"])
def test_the_proposal_in_trls_source_trains_our_weights(loss_type, tmp_path, monkeypatch):
    proposed, lines = proposal()
    options = {"loss_type": loss_type, "learning_rate": 2e-2, "epsilon": math.inf, "max_steps": 4}
    penalty = BINARY | {"kl_bound": 1e-4, "regression_coef": 3.0}
    ours = trained(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, tiny_model(), **options, **penalty)
    assert max(logged(ours, "troll/penalized_fraction")) > 0.1, "the test needs penalized tokens"
    monkeypatch.setattr(grpo_trainer, "binary_kl_penalty", proposed, raising=False)
    before = '    mode = "train" if self.model.training else "eval"\n    if self.loss_type in ["grpo", "sapo"]:'
    replace(monkeypatch, GRPOTrainer, {before: indent(lines, "    ") + before}, only=["_compute_loss"])
    runs = []
    for coefficient in (3.0, 0.0):
        monkeypatch.setattr(GRPOConfig, "kl_penalty_coef", coefficient, raising=False)
        monkeypatch.setattr(GRPOConfig, "kl_penalty_bound", 1e-4, raising=False)
        runs.append(trained(GRPOTrainer, GRPOConfig, tmp_path, tiny_model(), **options))
    proposed_run, without = map(weights, runs)
    start, expected = dict(tiny_model().named_parameters()), weights(ours)
    apart = lambda first, second: max((first[name] - second[name]).abs().max().item() for name in expected)
    moved = apart(expected, start)
    assert apart(expected, proposed_run) <= 1e-3 * moved < 0.03 * moved <= apart(expected, without)
    assert logged(runs[0], "loss") == pytest.approx(logged(ours, "loss"), rel=1e-4, abs=1e-6)

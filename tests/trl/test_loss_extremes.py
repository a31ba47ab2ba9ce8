"""Ratios, loss scales and masked numbers at the ends of float32; a TRL that changes; the buffered batch."""

import functools
import math

import pytest
import torch
from trl import GRPOTrainer

from tests.tiny import certain_model, saved_model, tiny_model
from tests.trl.reference_loss import mask, penalty, projection
from tests.trl.test_loss import REGIONS, SUPPORT, Own, assert_is_reference, loss_of
from tests.trl_comparison import OURS, logged, make_trainer, off_policy
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.trainers.loss import Ratio, bound, limit_log_ratio, masked_columns
from troll_trl.trust_region.regions import TrustRegionOutput
from troll_trl.trust_region.sparse import SparseDistribution

SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}


def sharp_model():
    """A model whose least likely tokens have a log-probability of some −100."""
    return tiny_model(spread=400.0)


def far_from_its_old_policy(algorithm, tmp_path, **options):
    """Return a trainer of a sharp model, and a micro-batch with completions of its least likely tokens, to which a
    smooth old policy gave much more."""
    options = {"learning_rate": 0.0, "max_steps": 1, "model": sharp_model(), "regression_coef": 0.5, **options}
    trainer, inputs = off_policy(algorithm, tmp_path, **options)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    generator = torch.Generator().manual_seed(1)
    for t in range(1, length, 2):  # a token changes the distributions after it
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 + t]
        ids[:, ids.shape[1] - length + t] = inputs["completion_ids"][:, t] = logits.argmin(-1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    if trainer.support is not None:
        top = logits.scatter(-1, inputs["completion_ids"].unsqueeze(-1), -math.inf).topk(11).indices
        inputs["old_token_ids"] = torch.cat([inputs["completion_ids"].unsqueeze(-1), top], -1).int()
        old = torch.randn(*top.shape[:2], 13, generator=generator).log_softmax(-1)
        inputs["old_sparse_logps"], inputs["old_per_token_logps"] = old, old[..., 0].contiguous()
    else:
        inputs["old_per_token_logps"] = -0.2 - torch.rand(inputs["completion_ids"].shape, generator=generator)
    if algorithm == "rloo":
        inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    return trainer, inputs


FAR = {
    "projection": ({**SUPPORT, "kl_bound": 0.3}, projection(0.3)),
    "penalty": ({"trust_region": "penalty", "divergence_type": "topk_kl", **SUPPORT}, penalty(0.01)),
    "own": REGIONS["own"],
}


@pytest.mark.parametrize("level", [{}, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("region", FAR)
def test_a_token_far_below_its_old_policy_keeps_the_whole_regression(region, level, tmp_path):
    """At a log-ratio of −85 a hundredth of the regression was left, and from −90 on it was NaN."""
    options, reference_region = FAR[region]
    trainer, inputs = far_from_its_old_policy("grpo", tmp_path, **options, **level)
    reference = assert_is_reference(trainer, inputs, reference_region, sharp_model)
    if region == "penalty":  # the other two have a log-ratio of their own
        assert reference.log_ratio.min() < (-95 if not level else -40)
    assert (reference.regression > 0.1).double().mean() > 0.5
    assert_is_reference(trainer, inputs, reference_region, sharp_model, scale=65_536.0)  # as fp16 scales


def test_the_reference_kl_of_a_token_far_below_its_old_policy_is_the_policys(tmp_path):
    """TRL multiplies it by a ratio that the loss limits, and the policy's ratio has no limit: at −60, the KL would be
    `exp(20)` times as large."""
    path = saved_model(tmp_path / "model", spread=120.0)
    trainer, inputs = far_from_its_old_policy("grpo", tmp_path, model=path, beta=0.3, trust_region="penalty")
    noise = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(2))
    inputs["ref_per_token_logps"] = inputs["old_per_token_logps"] - noise.abs()
    reference = assert_is_reference(trainer, inputs, penalty(0.01), lambda: tiny_model(spread=120.0))
    assert -80 < reference.log_ratio.min() < -50 and reference.kl > 0.1


def test_a_long_completion_in_rloo_keeps_the_whole_regression(tmp_path):
    """1,000 tokens, whose log-ratios sum to −120."""
    options = {"learning_rate": 0.0, "max_steps": 1, "model": certain_model(), "regression_coef": 0.5, **SUPPORT}
    trainer, inputs = off_policy("rloo", tmp_path, **options)
    inputs = {name: value[:1] if value.dim() else value for name, value in inputs.items()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (1, 1000), generator=generator)
    inputs["completion_ids"], inputs["completion_mask"] = ids, torch.ones_like(ids)
    whole = torch.cat([inputs["prompt_ids"], ids], 1)
    with torch.no_grad():
        logits = trainer.model(input_ids=whole).logits[:, -1001:-1]
    top = logits.scatter(-1, ids.unsqueeze(-1), -math.inf).topk(11).indices
    inputs["old_token_ids"] = torch.cat([ids.unsqueeze(-1), top], -1).int()
    policy = SparseDistribution.log_probs_on_support(logits, inputs["old_token_ids"])
    inputs["old_sparse_logps"] = (policy + 0.3 * torch.randn(policy.shape, generator=generator)).log_softmax(-1)
    inputs["old_logps"] = policy[..., 0].sum(1) + 120.0
    reference = assert_is_reference(trainer, inputs, projection(0.01))
    assert -140 < reference.log_ratio.item() < -100 and (reference.regression > 0).double().mean() > 0.5


@pytest.mark.parametrize(("cap", "left"), [(None, True), (5.0, True), (5.0, False)])
def test_a_mask_at_a_log_ratio_of_100(cap, left, tmp_path):
    """A masked token adds nothing: `0·exp(100)` is NaN. With a cap C, the gradient of a token that keeps it is C·A."""
    options = {"trust_region": "mask", "divergence_bound": 1e-6, "ratio_cap": cap, "model": certain_model()}
    trainer, inputs = off_policy("grpo", tmp_path, **options)
    inputs["advantages"] = inputs["advantages"].abs() * (1 if left else -1)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"].clone()
    inputs["old_per_token_logps"][:, 3:5] -= 100
    reference = assert_is_reference(trainer, inputs, mask("binary_tv", 1e-6, cap or math.inf))
    assert reference.log_ratio.max() > 95
    one = inputs | {"completion_mask": torch.zeros_like(inputs["completion_mask"])}
    one["completion_mask"][0, 3] = 1
    loss, gradients = loss_of(trainer, one)
    if left:
        assert loss == 0 and not any(gradient.any() for gradient in gradients.values())
    else:
        tokens = inputs["num_items_in_batch"].item() / trainer.args.steps_per_generation
        assert loss == pytest.approx(5 * -inputs["advantages"][0].item() / tokens, rel=1e-5)


def test_the_limit_of_a_completions_mean_leaves_out_the_padding():
    """The limit shifts the old policy of the padding, too. With a mean over that, the regression would vanish."""
    log_probs, mask = torch.tensor([[-90.0, -70.0, 0.0, 0.0]]), torch.tensor([[True, True, False, False]])
    limited = limit_log_ratio(TrustRegionOutput(log_probs), torch.zeros(1, 4), mask, Ratio.MEAN)
    assert Ratio.MEAN.log(log_probs, limited, mask).item() == -40


def test_rounded_log_probabilities_are_refused():
    rounded = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"are torch\.bfloat16, not float32"):
        bound(Own(), rounded, rounded, torch.ones(1, 1), torch.ones(1, 1).bool())


def test_without_a_weight_a_ratio_has_no_upper_limit():
    """It overflows, and the guard skips its update. With a limit, the update would be taken."""
    log_q = torch.zeros(1, 1)
    assert limit_log_ratio(TrustRegionOutput(log_q + 90), log_q, torch.ones(1, 1).bool(), Ratio.TOKEN) == 0


COLUMNS = ["old_sparse_logps", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"]
COLUMNS += ["importance_sampling_ratio", "advantages"]


@pytest.mark.parametrize("kind", [SUPPORT, {"trust_region": "penalty"}, {"trust_region": "mask"}, SEQUENCE])
def test_what_masked_positions_hold_changes_nothing(kind, tmp_path):
    path = saved_model(tmp_path / "model", spread=25.0)
    trainer, inputs = off_policy("grpo", tmp_path, model=path, beta=0.3, off_policy_mask_threshold=1e-3, **kind)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    inputs["completion_mask"][1, 4:], inputs["completion_mask"][2] = 0, 0
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 2] = 0
    inputs["importance_sampling_ratio"] = 0.5 + torch.rand(inputs["completion_ids"].shape)
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"].clone()
    inputs["advantages"] = inputs["advantages"].unsqueeze(1).expand(inputs["completion_ids"].shape).clone()
    masked = inputs["completion_mask"] * inputs["tool_mask"] == 0
    expected_loss, expected = loss_of(trainer, inputs)
    expected_metrics = trainer.troll_metrics["train"].pop()
    assert math.isfinite(expected_loss) and max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    for value in (math.nan, math.inf, -math.inf, 200.0, -200.0):
        spoiled = dict(inputs)
        for name in COLUMNS:
            if name in inputs:
                spoiled[name] = inputs[name].clone()
                spoiled[name][masked] = value
        loss, gradients = loss_of(trainer, spoiled)
        assert loss == expected_loss
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items()), value
        assert trainer.troll_metrics["train"].pop() == expected_metrics


def test_masks_and_pixels_of_the_shape_of_the_tokens_stay_as_they_are():
    live = torch.tensor([[True, False]])
    columns = {name: torch.ones(1, 2) for name in ("tool_mask", "pixel_values", "a_users_own")}
    columns |= {"completion_mask": torch.ones(1, 2, dtype=torch.long), "advantages": torch.ones(1), "sizes": None}
    (masked,) = masked_columns(columns, live).items()
    assert masked[0] == "a_users_own" and masked[1].tolist() == [[1, 0]]


def test_a_trl_that_reads_the_advantages_before_it_scores_is_refused(tmp_path, monkeypatch):
    original = GRPOTrainer._compute_loss

    @functools.wraps(original)
    def early(self, model, inputs):
        return original(self, model, {**inputs, "advantages": inputs["advantages"]})

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", early)
    with pytest.raises(RuntimeError, match="has not read its advantages after that"):
        make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path).train()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_buffered_batch_is_read_again_unchanged(algorithm, tmp_path):
    path = saved_model(tmp_path / "model")
    options = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.3, "learning_rate": 2e-2, "kl_bound": 0.01}
    trainer = make_trainer(*OURS[algorithm], tmp_path, model=path, max_steps=4, **options)
    seen, compute_loss = [], trainer.compute_loss

    def recording(model, inputs, *args, **kwargs):
        before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        loss = compute_loss(model, inputs, *args, **kwargs)
        assert all(torch.equal(inputs[name], value) for name, value in before.items())
        seen.append(before)
        return loss

    trainer.compute_loss = recording
    trainer.train()
    for first, second in zip(seen[:2], seen[2:], strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert max(logged(trainer, "troll/projected_fraction")) > 0

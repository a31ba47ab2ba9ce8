"""The loss of the trainers and its gradient, against an independent float64 reference from full logits."""

import math

import pytest
import torch
from transformers import TrainerCallback

from tests.tiny import certain_model, saved_model
from tests.trl.reference_loss import Bounded, mask, penalty, projection, reference_loss
from tests.trl_comparison import OURS, make_trainer, micro_batch, off_policy
from troll_trl import TrustRegion, TrustRegionOutput

SUPPORT = {"support_size": 12, "tail_mass": 1e-3}


class Own(TrustRegion):
    """A region with all three: another log-probability, a regression and a weight."""

    def __call__(self, policy, old, advantages):
        log_ratio = policy[..., 0] - old[..., 0]
        used = old > -math.inf
        squared = (policy - old).masked_fill(~used, 0.0).square().sum(-1)
        return TrustRegionOutput(old[..., 0] + log_ratio.tanh(), squared, weight=1 / (1 + log_ratio**2))


def own(p, q, _advantage):
    log_ratio = p[0] - q[0]
    return Bounded(q[0] + log_ratio.tanh(), (p - q).square().sum(), 1 / (1 + log_ratio.item() ** 2))


# Options of the config, and the reference's region
REGIONS = {
    "projection": (SUPPORT, projection(0.01)),
    "penalty": ({"trust_region": "penalty"}, penalty(0.01)),
    "penalty_topk": ({"trust_region": "penalty", "divergence_type": "topk_kl", **SUPPORT}, penalty(0.01)),
    "penalty_everywhere": ({"trust_region": "penalty", "kl_bound": 0.0}, penalty(0.0)),
    "mask": ({"trust_region": "mask", "divergence_bound": 0.02}, mask("binary_tv", 0.02)),
    "mask_kl_capped": (
        {"trust_region": "mask", "divergence_type": "binary_kl", "divergence_bound": 0.002, "ratio_cap": 1.1},
        mask("binary_kl", 0.002, 1.1),
    ),
    "own": ({"trust_region": f"{__name__}.Own", **SUPPORT}, own),
}
KL = {"beta": 0.3}  # with TRL's bias correction, its default
PLAIN_KL = KL | {"use_bias_correction_kl": False}
SEQUENCE = {"importance_sampling_level": "sequence"}
OPTIONS = {
    "dapo": {},
    "alpha_0": {"regression_coef": 0.0, "temperature": 0.7},
    "alpha_5": {"regression_coef": 5.0},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo"},
    "reference_kl": PLAIN_KL,
    "bias_correction": {"loss_type": "bnpo", **KL},
    "tools": KL,
    # Factors of the surrogate, not of the reference KL
    "importance_ratio": {"loss_type": "grpo", **KL},
    "entropy_quantile": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05, **KL},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-3, **KL},
    "off_policy_mask_of_the_engine": {"off_policy_mask_threshold": 1e-3},
    "token_advantages": {},  # TRL offers `(B, C)` to subclasses
    "sequence": {"loss_type": "grpo", **SEQUENCE},
    "sequence_luspo": {"loss_type": "luspo", "temperature": 0.7, **SEQUENCE},
    "sequence_kl": {**SEQUENCE, **KL},
    "sequence_importance_ratio": SEQUENCE,
}
CASES = [("projection", name) for name in OPTIONS]
CASES += [("penalty", name) for name in ("dapo", "tools", "sequence_luspo", "off_policy_mask", "token_advantages")]
CASES += [("penalty_topk", "grpo"), ("penalty_everywhere", "luspo")]
CASES += [("mask", name) for name in ("dapo", "reference_kl", "importance_ratio", "off_policy_mask")]
CASES += [("mask_kl_capped", "bnpo"), *(("own", name) for name in ("alpha_5", "tools", "sequence_kl"))]


def prepared(region, name, tmp_path):
    """Return a trainer, a micro-batch behind its policy with every column that the options read, and its region."""
    options, reference = REGIONS[region]
    options = {"model": certain_model(), "regression_coef": 0.5} | options | OPTIONS[name]
    if "beta" in options:
        options["model"] = saved_model(tmp_path / "model", spread=25.0)
    trainer, inputs = off_policy("grpo", tmp_path, **options)
    generator = torch.Generator().manual_seed(0)
    noise = lambda scale: scale * torch.randn(inputs["completion_ids"].shape, generator=generator)
    if "beta" in options:  # farther away than some steps of training put it
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + noise(0.3)
    if name.endswith("importance_ratio"):
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        inputs["importance_sampling_ratio"] = noise(0.5).exp()
        inputs["importance_sampling_ratio"][0] = 0.0  # as a mask mode has it
    if name == "off_policy_mask_of_the_engine":  # it leaves out other completions than the old policy would
        inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] + noise(3.0)
    if name.startswith("sequence"):  # a mean over its padding changed a completion's ratio, and no test saw it
        lengths = 1 + torch.arange(len(inputs["completion_mask"])) % inputs["completion_mask"].shape[1]
        inputs["completion_mask"] = inputs["completion_mask"].cumsum(1).le(lengths.unsqueeze(1)).long()
    if name == "token_advantages":
        inputs["advantages"] = inputs["advantages"].unsqueeze(1) + noise(0.5)
    if name == "tools":
        inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
        inputs["tool_mask"][:, 2::3] = 0
    return trainer, inputs, reference


def loss_of(trainer, inputs, scale=1.0):
    """Return the trainer's loss and its gradients by name."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    (loss * scale).backward()
    return loss.item(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_is_reference(trainer, inputs, region, make_model=certain_model, scale=1.0):
    reference = reference_loss(trainer, inputs, region, make_model)
    loss, gradients = loss_of(trainer, inputs, scale)
    assert loss == pytest.approx(reference.loss, rel=3e-4, abs=1e-5)
    assert_same_gradients({name: gradient / scale for name, gradient in gradients.items()}, [reference.gradients])
    return reference


def assert_same_gradients(actual, references):
    """Of the mean of the `references`, up to rounding."""
    expected = {name: sum(each[name] for each in references) / len(references) for name in actual}
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-4
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).abs().max().item()
        assert difference < 1e-3 * largest, f"{name}: off by {difference / largest:.1e} of the largest gradient"


@pytest.mark.parametrize(("region", "name"), CASES)
def test_grpo(region, name, tmp_path):
    trainer, inputs, reference_region = prepared(region, name, tmp_path)
    trainer._metrics["train"].clear()
    reference = assert_is_reference(trainer, inputs, reference_region)
    metrics = trainer.troll_metrics["train"].pop()
    if region.startswith("mask"):
        assert 0.05 < metrics["troll/masked_fraction"] < 0.95
    else:
        outside = (reference.regression > 0).double().mean().item()
        assert outside > 0.05
    if region in ("projection", "penalty"):
        live = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum().item()
        assert metrics["troll/regression"] == pytest.approx(reference.regression.sum().item() / live, rel=1e-3)
    if "beta" in OPTIONS[name]:
        assert trainer._metrics["train"]["kl"] == [pytest.approx(reference.kl, rel=1e-3)], "the policy's"


@pytest.mark.parametrize(
    ("region", "alpha"), [("projection", 0.5), ("projection", 5.0), ("penalty", 5.0), ("penalty_topk", 0.5)]
)
def test_rloo(region, alpha, tmp_path):
    options, reference_region = REGIONS[region]
    options = {"model": certain_model(), "regression_coef": alpha} | options
    trainer, inputs = off_policy("rloo", tmp_path, **options)
    reference = assert_is_reference(trainer, inputs, reference_region)
    assert (reference.regression > 0).double().mean() > 0.05


@pytest.mark.parametrize("loss_type", ["rloo", "dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_the_regression_under_gradient_accumulation(loss_type, tmp_path):
    """The gradient of the second update is the mean of the reference's over its two micro-batches."""
    kept = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            kept["weights"] = {name: weight.clone() for name, weight in model.state_dict().items()}
            kept["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}

    algorithm = "rloo" if loss_type == "rloo" else "grpo"
    options = {"trust_region": "penalty", "kl_bound": 1e-3, "regression_coef": 5.0, "beta": 0.0, "max_grad_norm": 1e9}
    options |= {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 2e-2, "model": certain_model()}
    options |= {} if algorithm == "rloo" else {"loss_type": loss_type}
    trainer = make_trainer(*OURS[algorithm], tmp_path, **options)
    trainer.add_callback(Keep())
    trainer.train()
    trainer.model.load_state_dict(kept["weights"])
    references = [reference_loss(trainer, micro_batch(trainer, n), penalty(1e-3), certain_model) for n in (2, 3)]
    assert all((reference.regression > 0).double().mean() > 0.05 for reference in references)
    assert_same_gradients(kept["gradients"], [reference.gradients for reference in references])

"""Without a learning signal no weight moves: what is zero by definition has a gradient of zero, and not its rounding,
which Adam would scale up to full steps."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from limits import HANG
from no_signal import moved
from peft import LoraConfig
from test_distributed import launch
from tiny import saved_model, tiny_model, token_reward

from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head.patch import SparseCausalLMOutput
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs
from troll_trl.lm_head.support_selection import select_support
from troll_trl.trainers.trust_region_model import TrustRegionModel, snap_to_reference
from troll_trl.trust_region.regions import ProjectionTrustRegion
from troll_trl.trust_region.sparse import SparseDistribution

RUNS = {
    "dapo": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "reference_kl": {"beta": 0.04},
    "reference_kl_bias_correction": {"beta": 0.04, "use_bias_correction_kl": True, "bf16": True},
    "rloo": {"algorithm": "rloo", "normalize_advantages": True},  # its `beta` is 0.05
}


@pytest.mark.parametrize("name", RUNS)
def test_without_a_reward_no_weight_moves(name, tmp_path):
    model = saved_model(tmp_path / "model")  # where a reference comes from
    assert moved(tmp_path / "run", model=model, **RUNS[name]) == []


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_with_lora(beta, tmp_path):
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian")
    assert moved(tmp_path, peft_config=adapter, beta=beta) == []


def test_with_weights_in_bfloat16(tmp_path):
    assert moved(tmp_path, model=tiny_model().to(torch.bfloat16), bf16=True) == []


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    flags = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    said = launch([[*flags, str(Path(__file__).with_name("no_signal.py")), str(tmp_path)]], HANG)
    for rank in (0, 1):
        assert f"rank {rank} of 2: 0 weights moved" in said, said


def test_the_runs_above_can_fail(tmp_path):
    assert moved(tmp_path, reward=token_reward), "with a reward the weights move"


def test_tokens_of_advantage_0_have_no_gradient():
    """Completions of groups that are all right or all wrong, beside one of a group that is not."""
    old, policy, mask = _distributions(rows=4)
    with_signal = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    loss_pass, sampled, leaf = _loss_pass(old, policy, mask)
    loss = (-with_signal * (sampled - old.log_probs[..., 0]).exp() + loss_pass.bounded.regression).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (gradient[1:] == 0).all(), "tokens of advantage 0"
    assert (gradient[0].abs().amax(-1) > 0).all()


def test_inside_the_bound_the_regression_is_zero_and_outside_it_is_not():
    old, policy, mask = _distributions(rows=4)
    policy[2:] += 3 * torch.randn(policy[2:].shape, generator=torch.Generator().manual_seed(1))
    loss_pass, _, leaf = _loss_pass(old, policy.log_softmax(-1), mask)
    inside = loss_pass.bounded.token_stats["eta"] == 0
    assert inside[:2].all() and not inside[2:].any()
    assert (loss_pass.bounded.regression[inside] == 0).all() and (loss_pass.bounded.regression[~inside] > 0).all()
    (gradient,) = torch.autograd.grad(loss_pass.bounded.regression.sum(), leaf)
    assert (gradient[inside] == 0).all() and (gradient[~inside].abs().amax(-1) > 0).all()


def test_gradient_of_a_token_inside_the_bound_is_that_of_the_ratio():
    """
    Relative to each token's own gradient, which for a token of probability 1 − 1e-4 is 1e-4 of the others'. The truth
    is the gradient of `exp(log p(a) − log q(a))` from full logits in float64: TRL's loss without a clip.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, vocabulary = 300, 2000
    hidden = torch.randn(tokens, 32, generator=generator) * torch.logspace(-1, 1, tokens).unsqueeze(1)
    weight = 0.5 * torch.randn(vocabulary, 32, generator=generator)
    sampled = (hidden @ weight.T).softmax(-1).multinomial(1, generator=generator).squeeze(1)
    transform = LogitTransform(1.0, None, 1.0)
    ids, old, _ = select_support(hidden, weight, None, sampled, 64, 1e-5, transform)

    exact = hidden.double().requires_grad_()
    log_probs = (exact @ weight.double().T).log_softmax(-1).gather(1, sampled.unsqueeze(1)).squeeze(1)
    (expected,) = torch.autograd.grad((log_probs - log_probs.detach()).exp().sum(), exact)
    assert log_probs.exp().max() > 1 - 1e-4, "the test needs a token that is nearly certain"

    leaf = hidden.clone().requires_grad_()
    policy, _ = SparseLogProbs.apply(leaf, weight, None, ids, transform, lambda *_: nullcontext())
    distribution = SparseDistribution(ids.unsqueeze(0), old.unsqueeze(0))
    loss_pass, projected = _through(distribution, policy.unsqueeze(0), torch.ones(1, tokens))
    assert (loss_pass.bounded.token_stats["eta"] == 0).all()
    loss = ((projected - distribution.log_probs[..., 0]).exp() + loss_pass.bounded.regression).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    error = (gradient.double() - expected).norm(dim=1) / expected.norm(dim=1)
    # What float32 can tell of a logit, and of 1 − p
    eps = torch.finfo(torch.float32).eps
    rounding = 4 * eps * (1 + (hidden @ weight.T).abs().amax(1)) + 2 * eps / (1 - log_probs.detach().exp())
    assert (error <= rounding).all(), f"largest error {(error / rounding).max():.1f} times the rounding"


def test_differences_of_rounding_are_none_and_larger_ones_stay():
    others = torch.tensor([-0.1, -30.0, -0.1, -30.0, 0.0])
    log_probs = others + torch.tensor([5e-7, 4e-6, 1e-4, 1e-3, 0.0])
    merged = snap_to_reference(log_probs, others)
    assert torch.equal(merged, torch.stack([others[0], others[1], log_probs[2], log_probs[3], others[4]]))


def _distributions(rows: int):
    """Old policy and, within rounding, the same policy over 9 tokens; `(rows, 5, 10)` each."""
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(rows, 5, 10, generator=generator)).log_softmax(-1)
    ids = torch.arange(9, dtype=torch.int32).expand(rows, 5, 9)
    policy = (log_probs + 1e-3 * torch.randn(log_probs.shape, generator=generator)).log_softmax(-1)
    return SparseDistribution(ids, log_probs), policy, torch.ones(rows, 5)


def _through(old, policy, mask):
    region = ProjectionTrustRegion(0.05)
    loss_pass = TrustRegionModel(region, old.log_probs, old.token_ids, mask.bool(), torch.ones(len(mask), 1))
    output = SparseCausalLMOutput(sparse_log_probs=policy, log_probs=policy[..., 0])
    projected = loss_pass.wrap(lambda **_: output, policy.shape[1])().log_probs
    return loss_pass, projected


def test_log_probabilities_that_were_rounded_are_refused():
    """As FSDP2 does it: masked positions are float32, and would promote the others back."""
    old, policy, mask = _distributions(rows=2)
    with pytest.raises(TypeError, match=r"log-probabilities are torch\.bfloat16, not float32"):
        _through(old, policy.bfloat16(), mask)


def _loss_pass(old, policy, mask):
    leaf = policy.clone().requires_grad_()
    loss_pass, projected = _through(old, leaf.log_softmax(-1), mask)
    return loss_pass, projected, leaf

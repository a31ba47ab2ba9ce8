"""The check of the sparse LM head against the model's own logits, which a run makes at its first rollout."""

from types import MethodType

import pytest
import torch

from tests.tiny import tiny_model
from tests.trl_comparison import make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.lm_head import add_sparse_lm_head, head_check
from troll_trl.lm_head.head_check import check_head
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs

CHANGES = {
    "scaled": lambda logits: 0.9 * logits,
    "capped": torch.tanh,
    "biased": lambda logits: logits + torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype),
    "negated": lambda logits: -logits,
}


def changed_model(change: str):
    """A model that changes its logits by what no config names."""
    model = tiny_model()
    own = model.forward

    def forward(self, *args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = CHANGES[change](output.logits)
        return output

    model.forward = MethodType(forward, model)
    return model


@pytest.mark.parametrize(
    ("trainer", "config", "change", "dtype"),
    [
        *((TrollGRPOTrainer, TrollGRPOConfig, change, torch.float32) for change in CHANGES),
        (TrollRLOOTrainer, TrollRLOOConfig, "scaled", torch.bfloat16),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(trainer, config, change, dtype, tmp_path):
    model, bf16 = changed_model(change).to(dtype), dtype == torch.bfloat16
    trainer = make_trainer(trainer, config, tmp_path, model, bf16=bf16, beta=0.0)
    with pytest.raises(ValueError, match=r"wrong for this model: .* differ .* by [0-9.e+]+ nats"):
        trainer.train()
    assert trainer.state.global_step == 0


def model_inputs() -> dict[str, torch.Tensor]:
    """Two rows with padding on the left of a prompt and on the right of a completion, as TRL makes them."""
    prompt = 5
    input_ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, : prompt - 1] = attention_mask[0, prompt + 1 :] = 0  # one token of a prompt, one of a completion
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 6.0, 300.0])  # logits of up to some 1, 6 and 300
def test_rounding_and_dropout_are_no_difference(dtype, spread):
    model = tiny_model(spread=spread, attention_dropout=0.5).to(dtype).train()  # all passes draw the same dropout
    for temperature, support_size in ((0.5, 1), (1.0, 8), (3.0, 100)):
        add_sparse_lm_head(model, temperature)
        check_head(model, model_inputs(), 7, support_size, temperature)


@pytest.mark.parametrize("wrong", ["sampled token", "other tokens", "projection"])
def test_a_wrong_gradient_is_refused(wrong, monkeypatch):
    """The values are right, so nothing else would show it."""
    model = tiny_model()
    add_sparse_lm_head(model)
    scale = torch.ones(9)
    scale[0 if wrong == "sampled token" else slice(1, None)] = 0.8
    module, name = (head_check, "project") if wrong == "projection" else (SparseLogProbs, "backward")
    original = getattr(module, name)

    def backward(ctx, log_probs, entropy):
        return original(ctx, log_probs * scale, entropy)

    def project(policy, old, bound):
        projection = original(policy, old, bound)
        log_probs = projection.log_probs.detach() + 0.9 * (policy - policy.detach())
        return projection._replace(log_probs=log_probs)

    monkeypatch.setattr(module, name, project if wrong == "projection" else staticmethod(backward))
    with pytest.raises(ValueError, match=r"gradient of head and projection differs .* by [0-9.e+-]+ of its norm"):
        check_head(model, model_inputs(), 7, 8, 1.0)


def test_one_token_is_enough_to_tell_and_nothing_random_is_drawn():
    model = changed_model("scaled")
    add_sparse_lm_head(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="on average over 1 tokens"):
        check_head(model, {name: x[:1] for name, x in model_inputs().items()}, 7, 8, 1.0)
    assert torch.equal(torch.get_rng_state(), before)

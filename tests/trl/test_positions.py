"""A model with absolute positions is scored at the positions at which it sampled, whatever the padding."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from tests.tiny import tiny_tokenizer
from tests.trl_comparison import OURS, make_trainer

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 |= {"resid_pdrop": 0.0}
OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT |= {"dropout": 0.0, "max_position_embeddings": 64}
TOKENS = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def make_model(family):
    torch.manual_seed(0)
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**GPT2, **TOKENS))
        positions = model.transformer.wpe
    else:  # counts by itself, and its own forward passes by the module that the head calls
        model = OPTForCausalLM(OPTConfig(**OPT, **TOKENS))
        positions = model.model.decoder.embed_positions
    with torch.no_grad():
        positions.weight.mul_(50)
        model.get_output_embeddings().weight.mul_(20)
    return model


@torch.no_grad()
def unpadded(model, inputs, row):
    """Return the log-probabilities of a completion, from a pass of its row alone."""
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
    logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(-1, completion.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(("family", "region"), [("gpt2", "projection"), ("gpt2", "penalty"), ("opt", "projection")])
def test_old_policy_policy_and_reference(family, region, tmp_path, monkeypatch):
    make_model(family).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    options = {"trust_region": region, "kl_bound": 10.0, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-2}
    trainer = make_trainer(*OURS["grpo"], tmp_path, str(tmp_path / "model"), **options)
    old_policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer.train()
    inputs, scored = dict(trainer._buffered_inputs[0]), []
    assert len({*inputs["prompt_mask"].sum(1).tolist()}) > 1, "the test needs padding"
    score = trainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *args, **kwargs: scored.append(score(*args, **kwargs)) or scored[0],
    )
    trainer.compute_loss(trainer.model, inputs)
    for row in range(len(inputs["prompt_ids"])):
        length = int(inputs["completion_mask"][row].sum())
        for model, log_probs in (
            (old_policy, inputs["old_per_token_logps"]),
            (reference, inputs["ref_per_token_logps"]),
            (trainer.model, scored[0][0]),  # inside of the bound, the policy's
        ):
            torch.testing.assert_close(log_probs[row, :length], unpadded(model, inputs, row), rtol=1e-4, atol=2e-5)

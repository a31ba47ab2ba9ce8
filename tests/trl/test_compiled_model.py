"""`torch_compile: true`: the backbone in one graph, the head as it is, and the log-probabilities right."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
def test_compiled_model_is_trls(tmp_path):
    """As Dynamo traces it, without a compiler: Inductor's numbers are compared below."""
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "default"}
    start, trl, troll = train_both("grpo", tmp_path, **compiled, steps_per_generation=2, max_steps=2)
    assert_same_movement(start, weights(trl), weights(troll))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler for the CPU: g++")
def test_inductor_trains_as_eager(tmp_path):
    """At the weights of the rollout the policy was 0.1 nats from the old policy: training was wrong in silence."""
    runs = []
    for options in ({}, {"torch_compile": True}):
        trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, **options, max_steps=2)
        trainer.train()
        runs.append(trainer)
    eager, compiled = runs
    assert logged(compiled, "troll/policy_kl_max")[0] < 1e-5, "the weights of the rollout"
    assert max(logged(eager, "troll/projected_fraction")) > 0, "nothing is projected"
    for key in ("loss", "grad_norm", "troll/projected_fraction", "troll/policy_kl_max"):
        assert logged(compiled, key) == pytest.approx(logged(eager, key), rel=1e-3, abs=1e-6), key
    breaks = sum(counters["graph_break"].values())
    assert counters["graph_break"] and all("_head" in reason for reason in counters["graph_break"]), breaks

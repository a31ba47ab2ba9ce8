"""`torch_compile: true`: the backbone in one graph, the head as it is, and the log-probabilities right."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from tests.trl_comparison import logged, make_trainer
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler for the CPU: g++")
def test_inductor_trains_as_eager(tmp_path, monkeypatch):
    """At the weights of the rollout the policy was 0.1 nats from the old policy: training was wrong in silence."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
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

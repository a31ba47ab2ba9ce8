"""The method without `resilience`: a trainer that leaves the mixin out trains the same weights, and logs the same."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import saved_model
from tests.trl_comparison import COSTS, logged, make_trainer, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer, TrustRegionGRPO
from troll_trl.resilience.checkpoints import CheckpointedTrainer
from troll_trl.resilience.guard import GuardedTrainer
from troll_trl.trainers.rloo import TrustRegionRLOO

ALONE = {
    "grpo": (TrustRegionGRPO, TrollGRPOTrainer, TrollGRPOConfig),
    "rloo": (TrustRegionRLOO, TrollRLOOTrainer, TrollRLOOConfig),
}
OPTIONS = {
    "binary penalty": {"trust_region": "penalty", "kl_bound": 1e-4},
    "idle": {"steps_per_generation": 1},
    "evaluated": {"kl_bound": 1e-3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps"},
}


def run_of(trainer, config, folder, options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(saved_model(folder / "model"))
    run = make_trainer(trainer, config, folder, model, beta=0.1, learning_rate=2e-2, max_steps=6, **options)
    run.train()
    return run


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("grpo", "idle"), ("grpo", "evaluated"), ("rloo", "binary penalty"), ("rloo", "evaluated")],
)
def test_the_method_trains_the_same_weights_alone(algorithm, options, tmp_path):
    alone, whole, config = ALONE[algorithm]
    assert issubclass(whole, alone) and not issubclass(alone, (GuardedTrainer, CheckpointedTrainer))
    run = run_of(alone, config, tmp_path / "alone", OPTIONS[options])
    expected = run_of(whole, config, tmp_path / "whole", OPTIONS[options])
    assert logged(run, "troll/skipped_updates") == []
    for name, weight in weights(expected).items():
        assert torch.equal(weights(run)[name], weight), name
    own = ("troll/skipped_updates", *COSTS)
    for line, other in zip(run.state.log_history, expected.state.log_history, strict=True):
        shared = {name: value for name, value in other.items() if not name.endswith(own)}
        assert {name: line[name] for name in shared} == pytest.approx(shared, rel=0, abs=0, nan_ok=True)

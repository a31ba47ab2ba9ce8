"""TROLL with TRL's colocated vLLM engine, the real one, on a CPU. Run by `make test-vllm`."""

import gc

import pytest
import torch

from tests.engines.vllm_engine import SGD, model_for_vllm, plain_linear_layers, start_engines_with
from tests.trl_comparison import assert_same_movement, logged, make_trainer, train_both, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OPTIONS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}


@pytest.fixture(autouse=True)
def collect_engines():
    yield
    gc.collect()  # an engine is in cycles with its trainer


@pytest.fixture
def engine(monkeypatch):
    """Call it with the engine's dtype, before a trainer is made."""
    plain_linear_layers(monkeypatch.setattr)
    return lambda dtype="float32": start_engines_with(monkeypatch, dtype)


@pytest.fixture
def model(tmp_path):
    return model_for_vllm(tmp_path / "model")


@pytest.mark.parametrize(("algorithm", "updates"), [("grpo", 1), ("grpo", 4), ("rloo", 4)])
def test_open_bound_without_regression_is_trl_without_a_clip(engine, model, tmp_path, algorithm, updates):
    engine()
    only = {"beta": 0.0} if algorithm == "rloo" else {}
    options = {**OPTIONS, **SGD, **only, "steps_per_generation": updates}
    start, trl_run, troll_run = train_both(algorithm, tmp_path, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))


@pytest.mark.parametrize(("mode", "limit"), [("token_truncate", 1.002), ("sequence_mask", 1.005)])
def test_correction_is_trls(engine, model, tmp_path, mode, limit):
    """With limits so narrow that each acts on the difference between bfloat16 and float32."""
    engine("bfloat16")
    correction = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": limit}
    # One rollout batch: a second would start from weights that differ by their rounding
    options = {**OPTIONS, **SGD, **correction, "vllm_importance_sampling_correction": True, "max_steps": 4}
    start, trl_run, troll_run = train_both("grpo", tmp_path, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))
    applied = torch.cat([batch["importance_sampling_ratio"].flatten() for batch in troll_run._buffered_inputs])
    assert (applied == (0.0 if mode.endswith("mask") else torch.tensor(limit))).any(), "the limit was not reached"


def test_the_trust_region_is_around_the_scoring_pass(engine, model, tmp_path):
    """An engine in bfloat16 samples otherwise than the trainer scores: the correction weighs that, and the projection
    does not see it. `q` is the policy before the first update of a rollout batch, and bounds those after it."""
    engine("bfloat16")
    options = {**OPTIONS, "learning_rate": 2e-2, "max_steps": 8}
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, model=model, **options)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 1e-3, "the engine samples as the trainer"
    kl_before = logged(trainer, "troll/policy_kl_max")
    assert max(kl_before[0], kl_before[4]) < 1e-6, "of the first update on each of the two rollout batches"
    assert max(kl_before) > trainer.args.kl_bound
    assert max(logged(trainer, "troll/kl_max")) <= trainer.args.kl_bound * (1 + 1e-5)

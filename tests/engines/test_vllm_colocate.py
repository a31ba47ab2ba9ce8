"""TROLL with TRL's colocated vLLM engine, the real one, on a CPU. Run by `make test-vllm`."""

import gc
import math

import pytest
import torch
from peft import LoraConfig
from tiny import WORDS, token_reward
from trl_comparison import assert_same_movement, assert_same_run, logged, make_trainer, train_both, weights
from vllm_corrections import CORRECTIONS, assert_correction_is_trls
from vllm_engine import (
    SGD,
    largest_difference,
    model_for_vllm,
    plain_linear_layers,
    sample_and_score,
    start_engines_with,
)

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OPTIONS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}


@pytest.fixture(autouse=True)
def collect_engines():
    yield
    gc.collect()  # an engine is in cycles with its trainer, and there is one for each of some thirty


@pytest.fixture
def engine(monkeypatch):
    """Call it with the engine's dtype, before a trainer is made."""
    plain_linear_layers(monkeypatch.setattr)
    return lambda dtype="float32": start_engines_with(monkeypatch, dtype)


@pytest.fixture
def model(tmp_path):
    return model_for_vllm(tmp_path / "model")


def troll(folder, model, **options):
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, model=model, **{**OPTIONS, **options})


def test_without_plain_layers_a_sync_fails(model, tmp_path, monkeypatch):
    """The negative control of `plain_linear_layers`: the weights that vLLM packed take none."""
    start_engines_with(monkeypatch, "float32")
    with pytest.raises(AttributeError, match="weight_loader"):
        troll(tmp_path, model).train()


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_open_bound_without_regression_is_trl_without_a_clip(engine, model, tmp_path, algorithm, updates):
    engine()
    only = {"beta": 0.0} if algorithm == "rloo" else {}
    options = {**OPTIONS, **SGD, **only, "steps_per_generation": updates}
    start, trl_run, troll_run = train_both(algorithm, tmp_path, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))


@pytest.mark.parametrize("mode", [*CORRECTIONS, None])
def test_correction_is_trls(engine, model, tmp_path, mode):
    engine("bfloat16")
    assert_correction_is_trls(tmp_path, model, mode, **OPTIONS)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.3)])
def test_the_engine_follows_the_policy(engine, model, tmp_path, dtype, limit):
    engine(dtype)
    trainer = troll(tmp_path, model, learning_rate=2e-2)
    before = largest_difference(trainer)
    trainer.train()
    stale = largest_difference(trainer)
    trainer.vllm_generation.sync_weights()
    after = largest_difference(trainer)
    print(f"{dtype}: {before:.1e} before, {stale:.1e} stale, {after:.1e} after a sync")
    assert before < limit and after < limit and stale > 3 * after


def test_the_trust_region_is_around_the_scoring_pass(engine, model, tmp_path):
    """An engine in bfloat16 samples otherwise than the trainer scores: the correction weighs that, and the projection
    does not see it. `q` is the policy before the first update of a rollout batch, and bounds those after it."""
    engine("bfloat16")
    trainer = troll(tmp_path, model, learning_rate=2e-2, max_steps=8)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 1e-3, "the engine samples as the trainer"
    kl_before = logged(trainer, "troll/policy_kl_max")
    assert max(kl_before[0], kl_before[4]) < 1e-6, "of the first update on each of the two rollout batches"
    assert max(kl_before) > trainer.args.kl_bound
    assert max(logged(trainer, "troll/kl_max")) <= trainer.args.kl_bound * (1 + 1e-5)


def test_lora(engine, model, tmp_path):
    """The adapter reaches the engine merged into the weights."""
    engine()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    trainer = troll(tmp_path, model, peft_config=lora, learning_rate=5e-2)
    trainer.train()
    stale = largest_difference(trainer)
    trainer.vllm_generation.sync_weights()
    assert largest_difference(trainer) < 1e-3 < stale
    assert max(logged(trainer, "troll/kl_max")) <= trainer.args.kl_bound * (1 + 1e-5)


@pytest.mark.parametrize("stop", [3, 4], ids=["inside_a_rollout_batch", "at_its_end"])
def test_resumes_exactly(engine, model, tmp_path, stop):
    """On a CPU a colocated engine draws from torch's generator, which a checkpoint holds."""
    engine()
    options = {"save_strategy": "steps", "save_steps": stop, "learning_rate": 2e-2}
    whole = troll(tmp_path / "whole", model, **options)
    whole.train()
    resumed = troll(tmp_path / "resumed", model, **options)
    torch.manual_seed(0)
    resumed.train(str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert_same_run(whole, resumed)


def test_structured_outputs(engine, model, tmp_path):
    engine()
    seen = set()

    def reward(completion_ids, **kwargs):
        seen.update(token for ids in completion_ids for token in ids)
        return token_reward(completion_ids)

    troll(tmp_path, model, reward=reward, vllm_structured_outputs_regex="(w1|w2)+", max_steps=4).train()
    first = 3 + WORDS.index("w1")
    assert {first, first + 1} <= seen <= {first, first + 1, 1}, "w1, w2 and the end"


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}])
def test_temperature_and_filters(engine, model, tmp_path, filters):
    """The engine reports what it drew from: the policy at the temperature, and renormalised over what is left of it."""
    engine()
    trainer = troll(tmp_path, model, max_steps=4, **filters)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    for tokens, log_probs, logits in sample_and_score(trainer):
        policy = (logits / 0.7).softmax(-1)
        order = policy.argsort(-1, descending=True)[:, : filters.get("top_k", logits.shape[-1])]
        largest = policy.gather(-1, order)
        largest = largest / largest.sum(-1, keepdim=True)
        kept = largest * (largest.cumsum(-1) - largest < filters.get("top_p", math.inf))
        expected = torch.zeros_like(policy).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        torch.testing.assert_close(log_probs, expected[range(len(tokens)), tokens].log(), rtol=0, atol=1e-3)
    # The ratio to the policy is then the mass that the filters keep, not 1
    mean = logged(trainer, "sampling/importance_sampling_ratio/mean")[0]
    print(f"mean ratio of a completion {mean:.3f}")
    assert mean < 0.98 if "top_k" in filters else mean == pytest.approx(1, abs=1e-3)


def test_evaluation_is_trls(engine, model, tmp_path):
    engine()
    options = {**OPTIONS, **SGD, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 8}
    start, trl_run, troll_run = train_both("grpo", tmp_path, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))
    for key in ("eval_reward", "eval_completions/mean_length"):
        assert len(logged(troll_run, key)) == 2
        assert logged(troll_run, key) == pytest.approx(logged(trl_run, key), rel=1e-3)

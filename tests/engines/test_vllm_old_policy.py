"""`old_policy: engine` with vLLM's engine, the real one, on a CPU. Run by `make test-vllm`."""

import pytest
import torch

from tests.engines.vllm_engine import model_for_vllm, plain_linear_layers, start_engines_with
from tests.trl_comparison import OURS, logged, make_trainer, micro_batch, weights

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Call it with options of the config, `dtype` of the engine and the name of a folder."""
    plain_linear_layers(monkeypatch.setattr)
    model = model_for_vllm(tmp_path / "model")

    def make(dtype="float32", folder="run", algorithm="grpo", **options):
        start_engines_with(monkeypatch, dtype)
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "old_policy": "engine"}
        options = {"model": model, **engine, "learning_rate": 2e-2, **options}
        return make_trainer(*OURS[algorithm], tmp_path / folder, **options)

    return make


@pytest.mark.parametrize(
    ("dtype", "limit", "algorithm"), [("float32", 1e-5, "grpo"), ("bfloat16", 1e-3, "grpo"), ("float32", 1e-5, "rloo")]
)
def test_the_engine_and_the_trainer_at_equal_weights(trainer, dtype, limit, algorithm):
    """In the first update of a rollout batch the trust region bounds what they disagree on, and all later ones too."""
    options = {"beta": 0.0, "kl_bound": 0.01}
    run = trainer(dtype, algorithm=algorithm, **options)
    run.train()
    kl = [logged(run, f"troll/policy_kl_{name}") for name in ("mean", "max")]
    print(f"{algorithm}, {dtype}: KL at equal weights, mean {kl[0][0]:.1e}, max {kl[1][0]:.1e}; {kl[1][4]:.1e}")
    assert max(kl[1][0], kl[1][4]) < limit
    assert dtype == "float32" or kl[1][0] > 1e-6, "the engine is in bfloat16"
    assert max(kl[1]) > 0.01 and max(logged(run, "troll/kl_max")) <= 0.01 * (1 + 1e-4)
    assert set(logged(run, "troll/unscored_tokens")) == {0}


@pytest.mark.parametrize("support_size", [20, 100])
def test_the_rows_are_the_policys(trainer, support_size):
    """The sampled token first, whatever its rank, then others by descending probability; and the right rest."""
    run = trainer(support_size=support_size, tail_mass=0.0, learning_rate=0.0, max_steps=1)
    run.train()
    inputs = micro_batch(run)
    vocabulary = run.model.config.vocab_size
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        logits = run.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    ranks = []
    for b, t in inputs["completion_mask"].nonzero().tolist():
        listed, old = inputs["old_token_ids"][b, t], inputs["old_sparse_logps"][b, t]
        policy = logits[b, t].float().log_softmax(-1)
        used = listed >= 0
        count = int(used.sum())
        sampled = inputs["completion_ids"][b, t].item()
        assert listed[0] == sampled and len({*listed[used].tolist()}) == count
        ranks.append(int((policy > policy[sampled]).sum()))
        expected = [i for i in policy.argsort(descending=True).tolist() if i != sampled]
        # vLLM lists K − 1 tokens, the sampled one perhaps among them
        assert count == min(support_size, vocabulary) - (ranks[-1] < support_size - 1)
        torch.testing.assert_close(old[1:count], policy[expected[: count - 1]], rtol=0, atol=1e-4)
        torch.testing.assert_close(old[0], policy[sampled], rtol=0, atol=1e-4)
        rest = 1 - policy[listed[used].long()].exp().double().sum()
        assert old[-1].exp().item() == pytest.approx(rest.item(), abs=2e-5)
    assert support_size > 60 or max(ranks) >= support_size, "a sampled token that is not among the most likely"


def test_one_update_a_mask_and_what_the_engine_is_asked_for(trainer):
    run = trainer(steps_per_generation=1, max_steps=3, trust_region="mask", divergence_bound=0.05)
    run.train()
    assert run.vllm_generation.logprobs == 0 and "old_sparse_logps" not in run._buffered_inputs[0]
    assert not run.args.trust_region_idle and logged(run, "troll/masked_fraction") == [0.0, 0.0, 0.0]


def test_a_temperature(trainer):
    run = trainer(temperature=0.7, max_steps=4)
    run.train()
    assert logged(run, "troll/policy_kl_max")[0] < 1e-5


@pytest.mark.parametrize("stop", [3, 4], ids=["inside_a_rollout_batch", "at_its_end"])
def test_resumes_exactly(trainer, tmp_path, stop):
    options = {"save_strategy": "steps", "save_steps": stop}
    whole = trainer(folder="whole", **options)
    whole.train()
    resumed = trainer(folder="resumed", **options)
    torch.manual_seed(0)
    resumed.train(str(tmp_path / "whole" / f"checkpoint-{stop}"))
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name

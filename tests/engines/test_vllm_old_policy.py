"""`old_policy: engine` with vLLM's engine, the real one, on a CPU. Run by `make test-vllm`."""

import gc
import os

import pytest
import torch
from test_compatibility import moe
from tiny import tiny_tokenizer
from training_args import parse_training_args
from trl_comparison import logged, make_trainer, micro_batch, weights
from vllm_engine import MODEL, model_for_vllm, plain_experts, plain_linear_layers, start_engines_with

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer, small_models
from troll_trl.cli.make_trainer import make_trainer as make_trainer_of_command
from troll_trl.cli.quickstart import CONFIG, make_problems
from troll_trl.small_models import write_problems

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Call it with options of the config, `dtype` of the engine and the name of a folder."""
    plain_linear_layers(monkeypatch.setattr)
    model = model_for_vllm(tmp_path / "model")

    def make(dtype="float32", folder="run", algorithm="grpo", **options):
        start_engines_with(monkeypatch, dtype)
        classes = {"grpo": (TrollGRPOTrainer, TrollGRPOConfig), "rloo": (TrollRLOOTrainer, TrollRLOOConfig)}[algorithm]
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "old_policy": "engine"}
        options = {"model": model, **engine, "learning_rate": 2e-2, **options}
        return make_trainer(*classes, tmp_path / folder, **options)

    return make


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-3)])
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


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_mixture_of_experts_at_equal_weights(trainer, monkeypatch, tmp_path, dtype, limit):
    """In the second rollout batch, too: the engine has the experts that the trainer updated."""
    plain_experts(monkeypatch.setattr)
    moe(**MODEL, moe_intermediate_size=32).save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    run = trainer(dtype, model=str(tmp_path / "mixture"), beta=0.0, kl_bound=0.01)
    run.train()
    kl = logged(run, "troll/policy_kl_max")
    print(f"mixture, {dtype}: KL at equal weights, at most {kl[0]:.1e} and {kl[4]:.1e}")
    assert max(kl[0], kl[4]) < limit and max(kl) > 0.01
    assert max(logged(run, "troll/kl_max")) <= 0.01 * (1 + 1e-4)


@pytest.mark.parametrize("support_size", [2, 20, 60, 100])
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


@pytest.mark.parametrize("seed", [*map(int, os.environ.get("SEEDS", "0").split(","))])
def test_it_learns_sums_as_with_the_trainers_old_policy(monkeypatch, tmp_path, seed):
    """160 of the quickstart's updates from one start. With SEEDS=0,1,2, the two ended 7, at most 5 and at most 5 points
    apart."""
    plain_linear_layers(monkeypatch.setattr)
    torch.manual_seed(seed)
    train, held_out = make_problems(seed)
    tokenizer = small_models.make_tokenizer()
    model = small_models.make_model(tokenizer, head_dim=32)  # vLLM has no attention kernel for smaller heads on a CPU
    small_models.warm_up(model, *small_models.encode(tokenizer, train))
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    success = {}
    for old_policy in ("trainer", "engine"):
        start_engines_with(monkeypatch, "float32")
        flags = ["--config", str(CONFIG), "--use_vllm", "--vllm_mode", "colocate", "--vllm_max_model_length", "64"]
        flags += ["--old_policy", old_policy, "--max_steps", "160", "--eval_steps", "160", "--seed", str(seed)]
        script_args, training_args, model_args = parse_training_args(flags)
        write_problems(tmp_path / "data", train, held_out)
        script_args.dataset_name, model_args.model_name_or_path = str(tmp_path / "data"), str(tmp_path / "start")
        training_args.output_dir = str(tmp_path / old_policy)
        run = make_trainer_of_command(script_args, training_args, model_args)
        run.train()
        success[old_policy] = logged(run, "eval_reward")
        assert max(logged(run, "troll/kl_max")) <= 0.05 * (1 + 1e-4)
        gc.collect()
    print(f"seed {seed}: success before and after {success}")
    before, after = zip(*success.values(), strict=True)
    assert min(after) - max(before) > 0.1 and abs(after[0] - after[1]) < 0.1

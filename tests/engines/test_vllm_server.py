"""TROLL with a vLLM server, a real one on loopback, on a CPU. Run by `make test-vllm`."""

import time

import pytest
from peft import LoraConfig
from tiny import WORDS, token_reward
from trl_comparison import assert_same_movement, assert_same_run, logged, make_trainer, train_both, weights
from vllm_corrections import CORRECTIONS, assert_correction_is_trls
from vllm_engine import SGD, largest_difference, model_for_vllm
from vllm_server import free_port, send_weights_by_loopback, serving

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    send_weights_by_loopback(monkeypatch)


def options_for(server, **options):
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        # A server goes on drawing from where the last run left it; with a seed each rollout batch draws anew
        "generation_kwargs": {"seed": 5},
        **options,
    }


def troll(folder, model, **options):
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, model=model, **options)


@pytest.mark.parametrize(("algorithm", "updates"), [("grpo", 1), ("grpo", 4), ("rloo", 4)])
def test_open_bound_without_regression_is_trl_without_a_clip(server, model, tmp_path, algorithm, updates):
    only = {"beta": 0.0} if algorithm == "rloo" else {}
    options = options_for(server, steps_per_generation=updates, **SGD, **only)
    start, trl_run, troll_run = train_both(algorithm, tmp_path, lambda: model, **options)
    assert_same_movement(start, weights(trl_run), weights(troll_run))


@pytest.fixture(scope="module")
def rounding_server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("rounding server"), "bfloat16") as server:
        yield server


@pytest.mark.parametrize("mode", [*CORRECTIONS, None])
def test_correction_is_trls(rounding_server, model, tmp_path, mode):
    assert_correction_is_trls(tmp_path, model, mode, **options_for(rounding_server))


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])])
def test_the_engine_follows_the_policy(server, model, tmp_path, adapter):
    options = options_for(server, learning_rate=5e-2 if adapter else 2e-2, peft_config=adapter)
    trainer = troll(tmp_path, model, **options)
    trainer.vllm_generation.sync_weights()  # the server has those of another run
    before = largest_difference(trainer)
    trainer.train()
    stale = largest_difference(trainer)
    trainer.vllm_generation.sync_weights()
    after = largest_difference(trainer)
    print(f"{before:.1e} before, {stale:.1e} stale, {after:.1e} after a sync")
    assert before < 1e-3 and after < 1e-3 < stale
    assert max(logged(trainer, "troll/kl_max")) <= trainer.args.kl_bound * (1 + 1e-5)


def test_several_engines_follow_the_policy(model, tmp_path):
    """`trl vllm-serve --data_parallel_size`: TRL sends the weights to each of them."""
    with serving(model, tmp_path, engines=2) as server:
        trainer = troll(tmp_path / "run", model, **options_for(server, learning_rate=2e-2))
        trainer.train()
        stale = largest_difference(trainer)
        trainer.vllm_generation.sync_weights()
        # Requests go to either engine
        after = max(largest_difference(trainer) for _ in range(4))
        assert after < 1e-3 < stale


@pytest.mark.parametrize("stop", [3, 4], ids=["inside_a_rollout_batch", "at_its_end"])
def test_resumes_exactly_with_a_seed(server, model, tmp_path, stop):
    options = options_for(server, save_strategy="steps", save_steps=stop, learning_rate=2e-2)
    # The log-probabilities that a server reports depend, in their last bits, on which requests it happened to batch
    options["vllm_importance_sampling_correction"] = False
    whole = troll(tmp_path / "whole", model, **options)
    whole.train()
    resumed = troll(tmp_path / "resumed", model, **options)
    resumed.train(str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert_same_run(whole, resumed)


def test_structured_outputs_and_evaluation(server, model, tmp_path):
    seen = set()

    def reward(completion_ids, **kwargs):
        seen.update(token for ids in completion_ids for token in ids)
        return token_reward(completion_ids)

    options = options_for(server, vllm_structured_outputs_regex="(w1|w2)+", eval_strategy="steps", eval_steps=4)
    trainer = troll(tmp_path, model, reward=reward, max_steps=4, **options)
    trainer.train()
    first = 3 + WORDS.index("w1")
    assert {first, first + 1} <= seen <= {first, first + 1, 1}, "w1, w2 and the end"
    assert len(logged(trainer, "eval_reward")) == 1


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("grpo", {}), ("grpo", {"trust_region": "mask", "divergence_bound": 0.05}), ("rloo", {})],
)
def test_the_servers_distribution_as_the_old_policy(server, model, tmp_path, algorithm, options):
    classes = {"grpo": (TrollGRPOTrainer, TrollGRPOConfig), "rloo": (TrollRLOOTrainer, TrollRLOOConfig)}[algorithm]
    options = options_for(server, old_policy="engine", learning_rate=2e-2, beta=0.0, **options)
    run = make_trainer(*classes, tmp_path, model=model, **options)
    run.train()
    moved = logged(run, "troll/divergence_max" if "trust_region" in options else "troll/policy_kl_max")
    assert max(moved[0], moved[4]) < 1e-4 and max(moved) > 0.01
    assert set(logged(run, "troll/unscored_tokens")) == {0}


def test_a_server_that_dies_ends_the_run(server, model, tmp_path):
    """TRL's client tries five times more, over one minute. The last test that has this server."""
    rewarded = []

    def reward(completion_ids, **kwargs):
        if len(rewarded) == 1:
            server.kill()
        rewarded.append(time.monotonic())
        return token_reward(completion_ids)

    trainer = troll(tmp_path, model, reward=reward, **options_for(server, max_steps=16))
    with pytest.raises(ConnectionError, match=rf"server at {server.url} stopped answering .* `--resume`"):
        trainer.train()
    print(f"ended {time.monotonic() - rewarded[-1]:.0f} s after the server")
    assert trainer.state.global_step == 8


def test_a_server_that_is_not_there_is_said_before_the_model_is_loaded(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.1}
    with pytest.raises(OSError, match=f"can't be reached at {url} after 0.1 seconds"):
        troll(tmp_path, str(tmp_path / "no model"), **options)

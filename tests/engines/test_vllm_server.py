"""TROLL with a vLLM server, a real one on loopback, on a CPU. Run by `make test-vllm`."""

import pytest

from tests.engines.vllm_engine import model_for_vllm
from tests.engines.vllm_server import free_port, send_weights_by_loopback, serving
from tests.tiny import token_reward
from tests.trl_comparison import OURS, logged, make_trainer

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


def troll(folder, model, url, algorithm="grpo", **options):
    # A server goes on drawing from where the last run left it; with a seed each rollout batch draws anew
    draws = {"generation_kwargs": {"seed": 5}}
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, **draws, **options}
    return make_trainer(*OURS[algorithm], folder, model=model, **options)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("grpo", {}), ("grpo", {"trust_region": "mask", "divergence_bound": 0.05}), ("rloo", {})],
)
def test_the_servers_distribution_as_the_old_policy(server, model, tmp_path, algorithm, options):
    """The first update of each rollout batch finds no difference, so the server has the trainer's weights."""
    options = {"old_policy": "engine", "learning_rate": 2e-2, "beta": 0.0, **options}
    run = troll(tmp_path, model, server.url, algorithm, **options)
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
        rewarded.append(True)
        return token_reward(completion_ids)

    trainer = troll(tmp_path, model, server.url, reward=reward, max_steps=16)
    with pytest.raises(ConnectionError, match=rf"server at {server.url} stopped answering"):
        trainer.train()
    assert trainer.state.global_step == 8


def test_a_server_that_is_not_there_is_said_before_the_model_is_loaded(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=url):
        troll(tmp_path, str(tmp_path / "no model"), url, vllm_server_timeout=0.1)

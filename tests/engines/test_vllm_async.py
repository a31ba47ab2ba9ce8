"""Asynchronous GRPO with TRL's rollout worker and a real vLLM server on a CPU. Run by `make test-vllm`."""

import pytest

pytest.importorskip("troll_trl.experimental.async_grpo", exc_type=ImportError)  # needs the tested TRL

import json
import shutil
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from tests.engines.vllm_async import make_served_trainer, send_weights_by_loopback
from tests.engines.vllm_engine import model_for_vllm
from tests.engines.vllm_server import environment_of_a_process, serving
from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.trl_comparison import logged

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_for_vllm(tmp_path_factory.mktemp("model"))


def test_the_engines_log_probabilities_are_those_of_the_same_weights(model, tmp_path, monkeypatch):
    """Through TRL's child process and queue. The weights stay: a completion may span two versions of them."""
    send_weights_by_loopback(monkeypatch.setattr)
    temperature = 0.7
    with serving(model, tmp_path) as server:
        options = {"temperature": temperature, "max_steps": 3, "learning_rate": 0.0}
        trainer = make_served_trainer(model, server.url, tmp_path, **options)
        trainer.train()
    policy, differences = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), []
    for sample in trainer.received:
        ids, trained = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask).nonzero()[:, 0]
        with torch.no_grad():
            log_probs = (policy(ids[None]).logits[0] / temperature).log_softmax(-1)
        expected = log_probs[trained - 1, ids[trained]]
        differences += (torch.tensor(sample.old_log_probs)[trained] - expected).abs().tolist()
    assert len(differences) > 100 and max(differences) < 1e-4
    assert max(logged(trainer, "troll/divergence_max")) < 1e-4


def test_nothing_is_taken_from_the_models_generation_config(model, tmp_path, monkeypatch):
    folder = shutil.copytree(model, tmp_path / "model")
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.6, "min_p": 0.4, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(options))
    send_weights_by_loopback(monkeypatch.setattr)
    with serving(str(folder), tmp_path) as server:
        trainer = make_served_trainer(str(folder), server.url, tmp_path, max_steps=1)
        trainer.train()
    assert logged(trainer, "ratio")[0] == pytest.approx(1, abs=1e-4)


def test_the_example_for_a_cpu_runs(tmp_path):
    environment = environment_of_a_process() | {"UPDATES": "2", "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "asynchronous_cpu.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Mean reward of the first updates: " in done.stdout.splitlines()[-1]

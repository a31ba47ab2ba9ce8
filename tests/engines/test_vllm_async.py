"""Asynchronous GRPO with TRL's rollout worker and a real vLLM server on a CPU. Run by `make test-vllm`."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from limits import HANG
from repository import ROOT
from transformers import AutoModelForCausalLM
from trl_comparison import logged
from vllm_async import make_served_trainer, send_weights_by_loopback
from vllm_engine import model_for_vllm
from vllm_server import environment_of_a_process, serving

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
K = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_support_is_that_of_the_same_weights_in_transformers(
    temperature, server, model, tmp_path, monkeypatch
):
    """Every kept token and the rest, through TRL's child process and queue. The weights stay: a completion may span two
    versions of them, and a sample names the first."""
    send_weights_by_loopback(monkeypatch.setattr)
    trainer = make_served_trainer(
        model, server.url, tmp_path, temperature=temperature, max_steps=3, learning_rate=0.0, support_size=K
    )
    trainer.train()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    differences, tokens = [], 0
    for sample in trainer.received:
        ids = torch.tensor(sample.input_ids)
        with torch.no_grad():
            log_probs = (policy(ids[None]).logits[0] / temperature).log_softmax(-1)
        for position in sample.completion_mask.nonzero()[0].tolist():
            row, old = log_probs[position - 1], torch.tensor(sample.old_log_probs[position])
            kept = [ids[position].item(), *(int(i) for i in old[K + 1 :] if i >= 0)]
            assert len(kept) == len(set(kept)) in (K - 1, K)
            # Of all others none is more likely than the last that is kept, but for rounding
            others = [i for i in range(len(row)) if i not in kept]
            assert row[others].max() <= row[kept[1:]].min() + 1e-4
            expected = torch.cat([row[kept], row[others].logsumexp(0, keepdim=True)])
            differences += (torch.cat([old[: len(kept)], old[K : K + 1]]) - expected).abs().tolist()
            tokens += 1
    print(f"temperature {temperature}: {tokens} tokens, largest difference {max(differences):.1e}")
    assert tokens > 100 and max(differences) < 1e-4
    assert sum(logged(trainer, "troll/dropped_samples")) == 0
    assert max(logged(trainer, "troll/policy_kl_max")) < 1e-6


def test_the_bound_holds_around_a_real_engine(server, model, tmp_path, monkeypatch):
    """Whose weights follow the policy's, some updates late."""
    send_weights_by_loopback(monkeypatch.setattr)
    trainer = make_served_trainer(model, server.url, tmp_path, kl_bound=1e-3, max_steps=8, learning_rate=2e-2)
    trainer.train()
    policy_kl, kl = (logged(trainer, f"troll/{name}") for name in ("policy_kl_max", "kl_max"))
    print(f"policy KL {policy_kl}, KL {kl}, staleness {logged(trainer, 'sample/staleness_max')}")
    assert policy_kl[0] < 1e-6, "the engine has other weights than the policy"
    assert max(policy_kl) > 1e-3 and max(kl) <= 1e-3 * (1 + 1e-3)
    # Queue and requests hold 40 samples of the first weights, and the run trains on more; how many more versions come
    # depends on the speed of the machine
    assert max(sample.model_version for sample in trainer.received) >= 1, "no weights were sent"


def test_nothing_is_taken_from_the_models_generation_config(model, tmp_path, monkeypatch):
    """`min_p` was: the ratio of the first update was 0.20."""
    folder = shutil.copytree(model, tmp_path / "model")
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.6, "min_p": 0.4, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(options))
    send_weights_by_loopback(monkeypatch.setattr)
    with serving(str(folder), tmp_path) as server:
        for region in ("mask", "projection"):
            trainer = make_served_trainer(str(folder), server.url, tmp_path, trust_region=region, max_steps=1)
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


def test_a_killed_run_continues_with_the_same_server(server, model, tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("vllm_async.py")), str(model), server.url, str(tmp_path)]
    environment = environment_of_a_process()
    with open(tmp_path / "first.log", "wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            limit = time.monotonic() + HANG
            while not (tmp_path / "checkpoint-2" / "trainer_state.json").exists():
                assert run.poll() is None and time.monotonic() < limit, (tmp_path / "first.log").read_text()[-4000:]
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # its worker too
            run.wait()
    assert not (tmp_path / "log.json").exists(), "it ended before it was killed"
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-4000:]
    lines = [line for line in json.loads((tmp_path / "log.json").read_text()) if "troll/kl_max" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(math.isfinite(line["loss"]) for line in lines)
    resumed = next(line for line in lines if "perf/step_s" not in line and line["step"] > 1)
    assert resumed["troll/policy_kl_max"] < 1e-6, "the server was not sent the weights of the checkpoint"

"""When the rollout worker's process, a reward function or the server fails: the run ends, says why, and can resume."""

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from async_engine import Engine, make_trainer, no_reward
from limits import HANG
from repository import IMPORT_PATH
from tiny import saved_model, tiny_prompts, tiny_tokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from troll_trl.experimental.async_grpo.worker import WatchedRolloutLoop

MASK = {"trust_region": "mask"}
CONFIG = {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": 20}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def serving(status):
    """A server that answers with the codes of `status`, by the last part of the path, or else 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status.get(self.path.strip("/").partition("?")[0], 200))
            self.end_headers()
            self.wfile.write(json.dumps({"vllm_config": CONFIG}).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def worker_trainer(folder, output, monkeypatch, url):
    """A trainer with the worker that TRL makes, and a transfer of weights that needs no server."""
    for available in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(trl_worker, available, lambda *_, **__: True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template  # which TRL's worker knows
    return make_trainer(
        folder, output, Engine(folder), rollout_worker=None, processing_class=tokenizer, reward_funcs=[no_reward],
        vllm_server_base_url=url, **MASK,
    )  # fmt: skip


class Raising(WatchedRolloutLoop):
    def run(self):
        self._run_loops = self.fail
        super().run()

    async def fail(self, stop_event):
        raise KeyError("no column `solution`")


class Killed(WatchedRolloutLoop):
    def run(self):
        time.sleep(0.5)  # its watcher waits for the stop event by then, as that of any worker does
        os.kill(os.getpid(), signal.SIGKILL)


class Idle(WatchedRolloutLoop):
    def run(self):
        while True:
            self._heartbeat_value.value = time.time()
            time.sleep(0.1)


# -- The worker's process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "message"),
    [(Raising, "KeyError: .*no column `solution`"), (Killed, "exit code -9, killed")],
)
def test_a_worker_that_dies_ends_the_run_with_its_error(loop, message, folder, tmp_path, monkeypatch):
    """TRL's `stop` waited for ever for the dead process, and the user never saw the error."""
    # TRL spawns the process, which then imports torch for seconds; a child of a fork server has it
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    monkeypatch.setattr(trl_worker.mp, "get_context", lambda method: context)
    with serving({}) as url:
        trainer = worker_trainer(folder, tmp_path, monkeypatch, url)
        trainer.rollout_worker._loop_cls = loop
        with pytest.raises(RuntimeError, match=f"(?s)worker's process failed: .*{message}.*resume_from_checkpoint"):
            trainer.train()


def run_until_killed(folder, output):
    """A trainer whose worker idles; prints the worker's process."""
    monkeypatch = pytest.MonkeyPatch()
    with serving({}) as url:
        trainer = worker_trainer(folder, output, monkeypatch, url)
        trainer.rollout_worker._loop_cls = Idle
        start = trainer.rollout_worker.start
        trainer.rollout_worker.start = lambda: (start(), print(trainer.rollout_worker._process.pid, flush=True))
        trainer.train()


@pytest.mark.slow
def test_a_worker_ends_when_its_trainer_is_killed(folder, tmp_path):
    """It lived on, and went on asking the server."""
    code = f"from test_async_worker import run_until_killed; run_until_killed({str(folder)!r}, {str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": IMPORT_PATH}
    script = tmp_path / "train.py"
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    run = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        worker = next(int(line) for line in run.stdout if line.strip().isdecimal())
        os.kill(worker, 0)
        run.kill()
        limit = time.monotonic() + HANG
        while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
            assert time.monotonic() < limit, "the worker lives on"
            time.sleep(0.1)
    except FileNotFoundError:
        pass  # it ended between the two questions
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_hangs_is_named(asynchronous):
    """The run waited for ever, or ended with "child is hung"."""
    PartialState(cpu=True)
    failed, errors = multiprocessing.Event(), queue.Queue()

    def unending_reward(completions, **kwargs):
        failed.wait()
        return [0.0]

    async def unending_async_reward(completions, **kwargs):
        return unending_reward(completions)  # blocks the loop, and with it the heartbeat

    reward = unending_async_reward if asynchronous else unending_reward
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = {}
    loop = WatchedRolloutLoop(
        hang_seconds=0.01, model_name="model", dataset=tiny_prompts(), reward_funcs=[reward], eos_token_ids=[1],
        processing_class=tokenizer, rollout_buffer=queue.Queue(), model_version_value=multiprocessing.Value("i", 0),
        heartbeat_value=multiprocessing.Value("d", 0.0), failed_event=failed, exception_info_queue=errors,
        metrics_queue=queue.Queue(),
    )  # fmt: skip
    result = loop.reward_funcs[0](completions=["a"])
    assert (asyncio.run(result) if asynchronous else result) == [0.0]
    kind, message, _ = errors.get()
    assert kind == "TimeoutError" and f"`{reward.__name__}` hangs" in message and "heartbeat_stale_after_s" in message
    loop._loop.close()


# -- The server -----------------------------------------------------------------------------------------------------


def test_a_server_without_its_development_endpoints_is_named(folder, tmp_path, monkeypatch):
    """It was a bare `404 Client Error`."""
    with serving({"server_info": 404}) as url:
        trainer = worker_trainer(folder, tmp_path, monkeypatch, url)
        with pytest.raises(ValueError, match=r"no http://127.*/server_info.*VLLM_SERVER_DEV_MODE=1"):
            trainer.train()


@pytest.mark.parametrize("engine_alone", [False, True])
def test_a_server_that_dies_says_how_to_resume(engine_alone, folder, tmp_path, monkeypatch):
    """The run waited for ten minutes, and ended with an error of aiohttp."""
    status = {}
    with contextlib.ExitStack() as server:
        trainer = worker_trainer(folder, tmp_path, monkeypatch, server.enter_context(serving(status)))

        def die():
            status["health"] = 500
            if not engine_alone:
                server.close()

        trainer.rollout_worker.start = die
        trainer.rollout_queue.queue = queue.Queue()
        trainer.rollout_queue.queue.get = lambda timeout: queue.Queue().get(block=False)  # no sample, and no waiting
        trainer.rollout_worker.check_health = lambda stale_after_s: None  # as if its requests were tried again
        with pytest.raises(ConnectionError, match=r"stopped answering .*resume_from_checkpoint=True"):
            trainer.train()


# -- Resuming -------------------------------------------------------------------------------------------------------


def test_a_resume_skips_a_checkpoint_that_was_cut_off(folder, tmp_path, caplog):
    """It took the newest folder, and failed."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    saving |= {"trust_region": "penalty", "divergence_type": "binary_kl", "epsilon": math.inf}
    make_trainer(folder, tmp_path, Engine(folder), **saving).train()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "checkpoint-6").mkdir()
    trainer = make_trainer(folder, tmp_path, Engine(folder), **saving)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 (it has no" in caplog.text and "checkpoint-4 (optimizer.pt has 0 bytes" in caplog.text
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3, 4]


class Worker(Engine, AsyncRolloutWorker):
    """A worker to TRL, whose samples come from the engine. Of the first groups one is spoilt, and one is too old."""

    def __init__(self, folder):
        super().__init__(folder)
        self._loop_kwargs = {"dataset_start_index": 0}
        self._mp_ctx, self._process = multiprocessing, None
        self.groups = -1  # then the first one's id is 0

    def group(self):
        samples = super().group()
        for sample in samples:
            if self.groups == 1:
                sample.old_log_probs[:] = np.nan
            if self.groups == 2:
                sample.model_version = -100
        return samples


def test_the_position_in_the_prompts_passes_over_dropped_groups(folder, tmp_path):
    """It stayed at the first group that was dropped, so a resume repeated all prompts after it."""
    with serving({}) as url:
        engine = Worker(folder)
        trainer = make_trainer(
            folder, tmp_path, engine, save_strategy="steps", save_steps=8, max_steps=8, vllm_server_base_url=url, **MASK
        )
        trainer.train()
    state = json.loads((tmp_path / "checkpoint-8" / "rollout_state.json").read_text())
    assert {1, 2}.isdisjoint(trainer._trained_groups)
    assert state["prompt_index"] == max(trainer._trained_groups) + 1 > 4

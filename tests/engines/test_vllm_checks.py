"""The message when a vLLM server is lost. No server runs here."""

import sys
from types import SimpleNamespace

import pytest
import requests

from troll_trl import TrollGRPOConfig
from troll_trl.trainers.vllm import explain_lost_server

SERVER = {"vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_port": 1}


@pytest.mark.parametrize("options", [SERVER, {"vllm_mode": "colocate"}])
@pytest.mark.parametrize("lives", [True, False])
def test_a_lost_server_is_named(lives, options, tmp_path, monkeypatch):
    """An error of a reward function's own stays what it is: the server answers, or there is none."""
    if lives:
        monkeypatch.setattr(requests, "get", lambda url, timeout: SimpleNamespace(raise_for_status=lambda: None))
    args = TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, **options)
    lost = args.vllm_mode == "server" and not lives
    said = f"http://{args.vllm_server_host}:{args.vllm_server_port} stopped answering" if lost else "of one request"
    with pytest.raises(ConnectionError if lost else requests.ConnectionError, match=said), explain_lost_server(args):
        raise requests.ConnectionError("of one request")


def test_without_a_server_a_rollout_needs_no_requests(tmp_path, monkeypatch):
    """It is none of TRL's requirements."""
    monkeypatch.setitem(sys.modules, "requests", None)
    with explain_lost_server(TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)):
        pass

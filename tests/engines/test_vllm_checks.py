"""What is said around vLLM, without one: a server that is lost, an engine that breaks the model."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests

from troll_trl import TrollGRPOConfig
from troll_trl.trainers.vllm import check_sampling, check_vllm, explain_lost_server


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def answering():
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def config(tmp_path):
    return lambda **options: TrollGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, **options)


def fail_to_ask(args):
    with explain_lost_server(args):
        raise requests.ConnectionError("of one request")


def test_a_lost_server_is_named(config):
    with answering() as port:
        args = config(vllm_mode="server", vllm_server_host="127.0.0.1", vllm_server_port=port)
        with pytest.raises(requests.ConnectionError, match="of one request"):
            fail_to_ask(args)  # a reward function's own: the server answers
    with pytest.raises(ConnectionError, match=f"server at http://127.0.0.1:{port} stopped answering .* `--resume`"):
        fail_to_ask(args)
    with pytest.raises(requests.ConnectionError, match="of one request"):
        fail_to_ask(config())


def test_a_colocated_engine_that_breaks_the_model_is_said(config, caplog):
    with caplog.at_level("WARNING"):
        check_vllm(config())
        assert "vllm_model_impl" not in caplog.text
        check_vllm(config(vllm_model_impl="transformers"))
    assert "vllm_model_impl='transformers'" in caplog.text


@pytest.mark.parametrize("given", [
    {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"bad_words": ["a"]},
    {"min_tokens": 4},
])  # fmt: skip
def test_an_engine_that_is_the_old_policy_samples_from_the_policy(given):
    options = {"temperature": 1.0, "top_k": 0, "generation_kwargs": {"seed": 3, "stop": ["b"], "top_p": 1.0}}
    check_sampling(options)
    with pytest.raises(ValueError, match=next(iter(given))):
        check_sampling(options | {"generation_kwargs": given})

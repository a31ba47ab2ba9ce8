"""Messages for faults around vLLM: no server, a server that is lost, an engine that breaks the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)


def check_vllm(args: Any) -> None:
    """Before the model is loaded: wait for the vLLM server, and warn of a colocated engine that breaks the model. If no
    server answers within `vllm_server_timeout` seconds, TRL's `OSError` names its address."""
    if not args.use_vllm:
        return
    if args.vllm_mode == "server" and args.process_index == 0:
        from trl.generation.vllm_client import VLLMClient

        VLLMClient(server_url(args), connection_timeout=args.vllm_server_timeout)
    if args.vllm_mode == "colocate" and args.vllm_model_impl == "transformers":
        logger.warning(
            "`vllm_model_impl='transformers'` with `vllm_mode='colocate'`: vLLM changes the model's class for the "
            "whole process. The trainer's model then fails, under TRL's own trainer too. Leave it at 'auto', or give "
            "vLLM a server of its own (`vllm_mode='server'`)."
        )


def server_url(args: Any) -> str:
    """The address at which TRL looks for the server."""
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


@contextmanager
def explain_lost_server(args: Any) -> Iterator[None]:
    """Around a rollout: if the server stops answering, raise a `ConnectionError` with its address and what to do. TRL's
    client gives up after five retries, a minute, with the address of one request."""
    if not (args.use_vllm and args.vllm_mode == "server"):
        yield
        return
    import requests

    try:
        yield
    except requests.RequestException as error:
        try:  # a reward function may ask servers of its own
            requests.get(f"{server_url(args)}/health", timeout=10)
        except requests.RequestException:
            raise ConnectionError(
                f"The vLLM server at {server_url(args)} stopped answering ({type(error).__name__}). Look at its log, "
                "start it again, and continue from the newest checkpoint: `--resume`, or "
                "`trainer.train(resume_from_checkpoint=True)`."
            ) from error
        raise

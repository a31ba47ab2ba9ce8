"""vLLM: which sampling options are refused, the wait for its server, and messages for a lost one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Options of the configs with which the engine samples from a distribution other than the policy's, and values without
# that effect
_CHANGES_THE_DISTRIBUTION: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0,),
    "vllm_structured_outputs_regex": (None, []),
}
# Further `generation_kwargs` that are known to leave the distribution as it is. vLLM has many that do not, which are
# refused
_LEAVES_THE_DISTRIBUTION = {
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "flat_logprobs",
    "truncate_prompt_tokens",
}


def check_sampling(options: Mapping[str, Any]) -> None:
    """
    Raise a `ValueError` for a sampling option of a config with which the engine would not sample from the policy's
    distribution. Call this if the engine's distribution is the old policy. Options in `generation_kwargs` override the
    others, as in TRL's requests.
    """
    own = options.get("generation_kwargs") or {}
    requests = {**options, **own}
    for name, without_effect in _CHANGES_THE_DISTRIBUTION.items():
        if (value := requests.get(name, without_effect[0])) not in without_effect:
            raise ValueError(
                f"`{name}={value}` is not supported: the engine would sample from a distribution other than the "
                f"policy's, and the trust region would surround the wrong one. Set `{name}` to {without_effect[0]}."
            )
    for name in own.keys() - _CHANGES_THE_DISTRIBUTION - _LEAVES_THE_DISTRIBUTION:
        raise ValueError(
            f"`{name}={own[name]}` in `generation_kwargs` is not supported: the engine may sample from a distribution "
            "other than the policy's, and the trust region would surround the wrong one. Remove it."
        )


def check_vllm(args: Any) -> None:
    """Wait for the vLLM server before the model is loaded. If no server answers within `vllm_server_timeout` seconds,
    TRL raises an `OSError` with the address."""
    if args.use_vllm and args.vllm_mode == "server" and args.process_index == 0:
        from trl.generation.vllm_client import VLLMClient

        # Tries an endpoint that TRL needs: without VLLM_SERVER_DEV_MODE, TRL's next request would fail with a bare 404
        VLLMClient(server_url(args), connection_timeout=args.vllm_server_timeout).get_server_info()


def server_url(args: Any) -> str:
    """The address at which TRL looks for the server."""
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


@contextmanager
def explain_lost_server(args: Any) -> Iterator[None]:
    """
    Wrap a rollout's requests to a server. After an error of `requests`, raise an error with instructions if the server
    stopped answering (`ConnectionError`) or lacks an endpoint (`ValueError`). The errors of TRL's clients name only the
    address of one request, some after a minute of retries.
    """
    if not (args.use_vllm and args.vllm_mode == "server"):
        yield
        return
    import requests  # TRL installs it with vLLM only

    url = server_url(args)
    try:
        yield
    except requests.RequestException as error:
        # The error may come from another server that a reward function uses
        response = getattr(error, "response", None)
        if response is not None and response.status_code == 404 and response.url.startswith(url):
            raise ValueError(
                f"The vLLM server has no {response.url}. Start it with `VLLM_SERVER_DEV_MODE=1` in "
                "its environment: without this variable, the server has no endpoints for the exchange of weights. With "
                "it, anyone who can reach the server can replace its weights: use `--host 127.0.0.1`, or an address in "
                "a network that you trust."
            ) from error
        try:
            requests.get(f"{url}/health", timeout=10).raise_for_status()  # whether its engine is alive
        except requests.RequestException:
            raise ConnectionError(
                f"The vLLM server at {url} stopped answering ({type(error).__name__}). Look at its "
                "log, start it again, and continue from the newest checkpoint: `--resume`, or "
                "`trainer.train(resume_from_checkpoint=True)`."
            ) from error
        raise


def check_server(info: Mapping[str, Any], url: str, support_size: int = 1) -> None:
    """Raise a `ValueError` if the server at `url` returns log-probabilities that ignore the temperature, or too few for
    `support_size` tokens, the sampled one included. `info` is what TRL's clients get from the server."""
    model = info["model_config"]
    mode = model["logprobs_mode"]
    most = model["max_logprobs"]
    needed = support_size - 1  # and the sampled token
    if mode != "processed_logprobs" or 0 <= most < needed:  # -1: as many as asked for
        raise ValueError(
            f"The vLLM server at {url} runs with `--logprobs-mode {mode}` and `--max-logprobs {most}"
            "`: its log-probabilities ignore the temperature, or are too few for `support_size`. Start it with "
            f"`--logprobs-mode processed_logprobs --max-logprobs {max(needed, 20)}`."
        )

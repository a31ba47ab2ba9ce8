"""check_server(): whether vLLM's answers will have what the trust region needs."""

from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)


def check_server(client: Any, support_size: int | None) -> None:
    """
    Ask the server of TRL's `client` for its configuration, once it is up. A `ValueError` says that it returns too few
    log-probabilities for a support of `support_size` tokens, or log-probabilities before the temperature.

    Without `VLLM_SERVER_DEV_MODE=1` the server does not answer. Then this warns, and a refused request ends the run.
    """
    from requests import RequestException  # TRL's client has it; troll_trl imports without

    client.wait_for_server_ready()
    try:
        model = client.get_server_info()["model_config"]
        mode, most = model["logprobs_mode"], model["max_logprobs"]
    except (RequestException, KeyError) as error:
        logger.warning(
            f"The vLLM server does not give its configuration ({type(error).__name__}: {error}). Make sure that it was "
            f"started with {_flags(support_size)}, or set VLLM_SERVER_DEV_MODE=1 for it."
        )
        return
    needed = 0 if support_size is None else support_size - 1
    if mode != "processed_logprobs" or 0 <= most < needed:  # -1: as many as asked for
        raise ValueError(
            f"The vLLM server at {client.server_url} runs with `--logprobs-mode {mode}` and `--max-logprobs {most}`: "
            "its log-probabilities are not those that it samples from, or too few for `support_size`. Start it with "
            f"{_flags(support_size)}."
        )


def _flags(support_size: int | None) -> str:
    most = "" if support_size is None else f" --max-logprobs {max(support_size - 1, 20)}"
    return f"`--logprobs-mode processed_logprobs{most}`"

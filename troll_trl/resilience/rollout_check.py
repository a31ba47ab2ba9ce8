"""checked_rollouts(): checks what a user's `rollout_func` returns before TRL pads it. Padding hides a row that is too
short, or an operation of torch fails and names neither the function nor the row."""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_IDS = ("prompt_ids", "completion_ids")
_OF_TOKENS = ("logprobs", "env_mask")  # a number for each token of the completion


def checked_rollouts(rollout_func: Callable[..., Any], corrects: bool) -> Callable[..., Any]:
    """
    Wrap a rollout function: it then raises a `ValueError` for rows of a wrong number or length, and for tokens that the
    model does not have. TRL's importance sampling `corrects` the loss if it reads `logprobs`.
    """

    @functools.wraps(rollout_func)
    def rollout(prompts: list[Any], trainer: Any) -> Any:
        output = rollout_func(prompts, trainer)
        if not isinstance(output, Mapping):
            raise ValueError(f"`rollout_func` must return a dictionary, got {type(output).__name__}.")
        if corrects and output.get("logprobs", ...) is None:  # TRL names a column that is missing
            raise ValueError(
                "`rollout_func` returned None for `logprobs`, which the importance sampling correction reads. Return "
                "the log-probabilities of the engine that sampled, or set `vllm_importance_sampling_correction=False`."
            )
        vocabulary = getattr(trainer.model.config.get_text_config(), "vocab_size", math.inf)
        _check(output, len(prompts), vocabulary)
        return output

    return rollout


def _check(output: Mapping[str, Any], prompts: int, vocabulary: float) -> None:
    columns = {name: rows for name, rows in output.items() if name in (*_IDS, *_OF_TOKENS) and rows is not None}
    for name, rows in columns.items():
        if len(rows) != prompts:
            raise ValueError(
                f"`rollout_func` got {prompts} prompts and returned {len(rows)} rows of `{name}`. Return one for each "
                "prompt, in their order: a prompt comes once for each of its generations."
            )
    for name, rows in columns.items():
        for number, row in enumerate(rows):
            where = f"`rollout_func` returned in row {number} of `{name}`"
            if name in _OF_TOKENS:
                if len(row) != (length := len(output["completion_ids"][number])):
                    raise ValueError(f"{where} {len(row)} numbers, and its completion has {length} tokens.")
            elif len(row) == 0:
                raise ValueError(f"{where} no token, expected at least one.")
            elif bad := [token for token in row if not _is_token(token, vocabulary)]:
                raise ValueError(f"{where} {bad[0]!r}, expected token ids: whole numbers from 0, below {vocabulary}.")


def _is_token(token: Any, vocabulary: float) -> bool:
    try:
        return 0 <= operator.index(token) < vocabulary
    except TypeError:  # no whole number
        return False

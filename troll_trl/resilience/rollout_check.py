"""checked_rollouts(): checks what a user's `rollout_func` returns before TRL pads it. Padding hides a row that is too
short, or an operation of torch fails and names neither the function nor the row."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

# Checked in this order, since the others must be as long as the completions
_TOKENS = ("completion_ids", "prompt_ids")
_EXPECTED = {
    "logprobs": "Give a number or None for every token of the completion, 0.0 for those that `env_mask` leaves out.",
    "env_mask": "Give 1 for every token of the completion that the model sampled, and 0 for every other.",
}


def checked_rollouts(rollout_func: Callable[..., Any], corrects: bool) -> Callable[..., Any]:
    """
    The rollout function, which raises a `ValueError` for rows of a wrong number or length, and for tokens that the
    model does not have. The message names the argument, the row and both lengths. TRL's importance sampling `corrects`
    the loss if it reads `logprobs`.
    """

    @functools.wraps(rollout_func)
    def rollout(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        output = rollout_func(prompts, *args, **kwargs)
        if not isinstance(output, Mapping):
            raise ValueError(
                f"`rollout_func` returned {type(output).__name__}, expected a dictionary with `prompt_ids`, "
                "`completion_ids` and `logprobs`."
            )
        _check_rows(output, len(prompts), _vocabulary(args[0]) if args else math.inf)  # TRL names what it lacks
        if corrects and "logprobs" in output and output["logprobs"] is None:
            raise ValueError(
                "`rollout_func` returned None for `logprobs`, which the importance sampling correction reads. "
                "Return the log-probabilities of the engine that sampled, or set "
                "`vllm_importance_sampling_correction` to False."
            )
        return output

    return rollout


def _vocabulary(trainer: Any) -> float:
    """How many tokens the model of a `trainer` has; infinity if its config does not say."""
    config = getattr(getattr(trainer, "model", None), "config", None)
    config = config.get_text_config() if isinstance(config, PretrainedConfig) else None
    return getattr(config, "vocab_size", math.inf)


def _check_rows(output: Mapping[str, Any], prompts: int, vocabulary: float) -> None:
    names = [name for name in _TOKENS if name in output]
    names += [name for name in _EXPECTED if output.get(name) is not None]
    columns = [name for name, value in output.items() if name not in (*_TOKENS, *_EXPECTED) and isinstance(value, list)]
    for name in names + columns:  # TRL hands a list to the reward functions row by row, and any other value whole
        rows = _length(output[name], f"`rollout_func` returned for `{name}`")
        if rows != prompts:
            raise ValueError(
                f"`rollout_func` got {prompts} prompts, and returned {rows} rows of `{name}`. Return one for each "
                "prompt, in their order: a prompt comes once for each of its generations."
            )
    for number in range(prompts if "completion_ids" in names else 0):
        for name in names:
            row, said = output[name][number], f"`rollout_func` returned in row {number} of `{name}`"
            length = _length(row, said)
            if name in _EXPECTED:
                _check_row(name, row, len(output["completion_ids"][number]), said)
            elif length == 0:
                raise ValueError(f"{said} no token, expected at least one.")
            else:
                _check_ids(row, vocabulary, said)


def _length(rows: Any, said: str) -> int:
    if not hasattr(rows, "__len__"):
        raise ValueError(f"{said} {rows!r}, expected a list.")
    return len(rows)


def _check_ids(row: Sequence[Any], vocabulary: float, said: str) -> None:
    for place, token in enumerate(row.tolist() if hasattr(row, "tolist") else row):
        if not _is_token(token, vocabulary):
            raise ValueError(
                f"{said} {token!r} at position {place}, expected the id of a token: a whole number, at least 0"
                f"{'' if math.isinf(vocabulary) else f' and below {vocabulary}, the size of the vocabulary'}."
            )


def _is_token(token: Any, vocabulary: float) -> bool:
    try:
        return 0 <= operator.index(token) < vocabulary
    except TypeError:  # no whole number
        return False


def _check_row(name: str, row: Sequence[Any], length: int, said: str) -> None:
    if len(row) != length:
        raise ValueError(f"{said} {len(row)} numbers, and its completion has {length} tokens. {_EXPECTED[name]}")
    for place, value in enumerate(row):
        if name == "env_mask" and value not in (0, 1):
            raise ValueError(f"{said} {value!r} at position {place}, expected 0 or 1. {_EXPECTED[name]}")
        if name == "logprobs" and not (value is None or hasattr(value, "__float__")):
            raise ValueError(
                f"{said} {value!r} at position {place}, expected a number or None. `vllm_generation.generate` gives a "
                "list for every token: take `[number for (number,) in row]`."
            )

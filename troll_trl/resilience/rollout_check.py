"""checked_rollouts(): checks what a user's `rollout_func` returns before TRL pads it. Otherwise padding would hide a
row that is too short, or a torch operation would fail without naming the function or the row."""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_IDS = ("completion_ids", "prompt_ids")
_OF_TOKENS = ("logprobs", "env_mask")  # a number for each token of the completion


def checked_rollouts(rollout_func: Callable[..., Any], corrects: bool) -> Callable[..., Any]:
    """
    Wrap a rollout function to raise a `ValueError` for a wrong number or length of rows, and for tokens that the model
    does not have. `corrects` is whether TRL's importance sampling correction reads `logprobs`.
    """

    @functools.wraps(rollout_func)
    def rollout(prompts: list[Any], trainer: Any) -> Any:
        output = rollout_func(prompts, trainer)
        if not isinstance(output, Mapping):
            raise ValueError(f"`rollout_func` returned {type(output).__name__}, expected a dictionary.")
        _check(output, len(prompts), getattr(trainer.model.config.get_text_config(), "vocab_size", math.inf))
        if corrects and output.get("logprobs", ...) is None:  # TRL names a column that is missing
            raise ValueError(
                "`rollout_func` returned None for `logprobs`, which the importance sampling correction reads. Return "
                "the engine's log-probabilities of the completions, or set "
                "`vllm_importance_sampling_correction=False`."
            )
        return output

    return rollout


def _check(output: Mapping[str, Any], prompts: int, vocabulary: float) -> None:
    # TRL gives a column of your own to the reward functions row by row if it is a list
    columns = {name: rows for name, rows in output.items() if name in (*_IDS, *_OF_TOKENS) or isinstance(rows, list)}
    columns = {name: rows for name, rows in columns.items() if name in _IDS or rows is not None}
    for name, rows in columns.items():
        if (number := _length(rows, f"for `{name}`")) != prompts:
            raise ValueError(
                f"`rollout_func` got {prompts} prompts, and returned {number} rows of `{name}`. Return one for each "
                "prompt, in their order: a prompt comes once for each of its generations."
            )
    for name in [name for name in (*_IDS, *_OF_TOKENS) if name in columns]:
        for number, row in enumerate(columns[name]):
            length = _length(row, where := f"in row {number} of `{name}`")
            if name in _OF_TOKENS:
                if length != (tokens := len(output["completion_ids"][number])):
                    raise ValueError(
                        f"`rollout_func` returned {length} numbers {where}, but its completion has {tokens} tokens."
                    )
            elif length == 0:
                raise ValueError(f"`rollout_func` returned no token {where}, expected at least one.")
            elif bad := [token for token in _plain(row) if not _is_token(token, vocabulary)]:
                raise ValueError(
                    f"`rollout_func` returned {bad[0]!r} {where}, expected the ids of tokens: whole numbers, at least "
                    f"0 and below {vocabulary}, the size of the vocabulary."
                )


def _length(rows: Any, where: str) -> int:
    if not hasattr(rows, "__len__"):
        raise ValueError(f"`rollout_func` returned {rows!r} {where}, expected a list.")
    return len(rows)


def _plain(row: Any) -> Any:
    return row.tolist() if hasattr(row, "tolist") else row


def _is_token(token: Any, vocabulary: float) -> bool:
    try:
        return 0 <= operator.index(token) < vocabulary
    except TypeError:  # not a whole number
        return False

"""checked_rollouts(): what a user's `rollout_func` returns, before TRL pads it. There a row that is too short gets the
padding of a shorter completion, or lets an operation of torch fail that names neither."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_EXPECTED = {
    "logprobs": "Give a number or None for every token of the completion, 0.0 for those that `env_mask` leaves out.",
    "env_mask": "Give 1 for every token of the completion that the model sampled, and 0 for every other.",
}


def checked_rollouts(rollout_func: Callable[..., Any], corrects: bool) -> Callable[..., Any]:
    """
    The rollout function, which raises a `ValueError` for rows of a wrong number or length. The message names the
    argument, the row and both lengths. TRL's importance sampling `corrects` the loss if it reads `logprobs`.
    """

    @functools.wraps(rollout_func)
    def rollout(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        output = rollout_func(prompts, *args, **kwargs)
        if isinstance(output, Mapping):  # TRL names what it lacks
            _check_rows(output, len(prompts))
            if corrects and "logprobs" in output and output["logprobs"] is None:
                raise ValueError(
                    "`rollout_func` returned None for `logprobs`, which the importance sampling correction reads. "
                    "Return the log-probabilities of the engine that sampled, or set "
                    "`vllm_importance_sampling_correction` to False."
                )
        return output

    return rollout


def _check_rows(output: Mapping[str, Any], prompts: int) -> None:
    names = ("prompt_ids", "completion_ids", *_EXPECTED)
    given = {name: output[name] for name in names if output.get(name) is not None}
    for name, rows in given.items():
        if len(rows) != prompts:
            raise ValueError(
                f"`rollout_func` got {prompts} prompts, and returned {len(rows)} rows of `{name}`. Return one for each "
                "prompt, in their order: a prompt comes once for each of its generations."
            )
    for number, ids in enumerate(given.get("completion_ids", ())):
        if len(ids) == 0:
            raise ValueError(f"`rollout_func` returned no token in row {number} of `completion_ids`, expected one.")
        for name in _EXPECTED:
            if name in given:
                _check_row(name, number, given[name][number], len(ids))


def _check_row(name: str, number: int, row: Any, length: int) -> None:
    said = f"`rollout_func` returned in row {number} of `{name}`"
    if row is None or len(row) != length:
        what = "None" if row is None else f"{len(row)} numbers"
        raise ValueError(f"{said} {what}, and its completion has {length} tokens. {_EXPECTED[name]}")
    for place, value in enumerate(row):
        if name == "env_mask" and value not in (0, 1):
            raise ValueError(f"{said} {value!r} at position {place}, expected 0 or 1. {_EXPECTED[name]}")
        if name == "logprobs" and not (value is None or hasattr(value, "__float__")):
            raise ValueError(
                f"{said} {value!r} at position {place}, expected a number or None. `vllm_generation.generate` gives a "
                "list for every token: take `[number for (number,) in row]`."
            )

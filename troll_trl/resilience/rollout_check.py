"""checked_rollouts(): checks what a user's `rollout_func` returns before TRL pads it. Padding hides a row that is too
short, or an operation of torch fails and names neither the function nor the row."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Checked in this order, since the others must be as long as the completions
_TOKENS = ("completion_ids", "prompt_ids")
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
    names = [name for name in _TOKENS if name in output]
    names += [name for name in _EXPECTED if output.get(name) is not None]
    for name in names:
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


def _length(rows: Any, said: str) -> int:
    if not hasattr(rows, "__len__"):
        raise ValueError(f"{said} {rows!r}, expected a list.")
    return len(rows)


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

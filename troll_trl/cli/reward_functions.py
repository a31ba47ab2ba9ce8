"""Loads reward functions by a short name, an import path, or a call of a function that makes one."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from troll_trl.fields import imported

REWARD_FUNCTIONS = {
    "math_accuracy": "troll_trl.rewards.math_accuracy_reward",
    # `trl grpo` has these names, and these arguments
    "accuracy_reward": "trl.rewards.accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
    "get_soft_overlong_punishment": (
        "trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)"
    ),
}


def is_math_accuracy(name: str) -> bool:
    """Return whether a setting names the reward that compares with a gold answer, by any of its paths."""
    return re.fullmatch(r"math_accuracy|troll_trl\.rewards\.([\w.]+\.)?math_accuracy_reward", name) is not None


def load_reward_function(name: str) -> Callable:
    """
    Load a reward function by a name in `REWARD_FUNCTIONS`, or by a dotted import path. If arguments in parentheses
    follow the path, call the function, which must return a reward function: `my_lib.length_penalty(limit=512)`. Raises
    a `ValueError` if this fails.
    """
    text = REWARD_FUNCTIONS.get(name, name)
    path, bracket, _ = text.partition("(")
    path = REWARD_FUNCTIONS.get(path, path).partition("(")[0]
    if "." not in path:
        raise ValueError(
            f"`reward_funcs` names {name!r}, which is neither one of {', '.join(REWARD_FUNCTIONS)} nor a dotted import "
            "path such as my_lib.rewards.custom_reward."
        )
    try:
        function = imported(path)
        if bracket:
            call: Any = ast.parse(text, mode="eval").body
            keywords = {item.arg: ast.literal_eval(item.value) for item in call.keywords}
            function = function(*map(ast.literal_eval, call.args), **keywords)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"`reward_funcs` names {name!r}: {error}.") from error
    if not callable(function):
        raise ValueError(f"`reward_funcs` names {name!r}, which is {function!r}, not a function.")
    return function


def check_signature(name: str, function: Callable, columns: Sequence[str] | None) -> None:
    """Refuse a reward function that cannot be called as TRL's trainers call it: with arguments of their own, and with
    the `columns` of the data, if these are known."""
    given = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    given += [column for column in columns or () if column not in ("prompt", "completion", "completion_ids")]
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C
        return
    try:
        (signature.bind_partial if columns is None else signature.bind)(**dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"`reward_funcs` names {name!r}, but a call with {', '.join(given)} fails: {error}. Take what the reward "
            "needs by name and all else as `**kwargs`: `def reward(completions, **kwargs)`."
        ) from None

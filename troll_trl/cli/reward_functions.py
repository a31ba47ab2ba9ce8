"""Reward functions by their names in settings: short ones, import paths, and calls of functions that make them."""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from troll_trl.cli.settings.renamed import REWARDS

REWARD_FUNCTIONS = {
    "math_accuracy": "troll_trl.rewards.math_accuracy_reward",
    # The names that `trl grpo` knows, and its arguments
    "accuracy_reward": "trl.rewards.accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
    "get_soft_overlong_punishment": (
        "trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)"
    ),
}
# TRL gives these to every reward function, by name. It must take the first ones.
_HANDED_ON = {"prompts", "completions", "completion_ids"}
_ALSO_GIVEN = {"trainer_state", "log_extra", "log_metric", "environments"}


def load_reward_functions(names: Iterable[str]) -> list[Callable]:
    """The reward functions of `reward_funcs`. A `ValueError` lists every name that [`load_reward_function`] refuses."""
    functions, refused = [], []
    for name in names:
        try:
            functions.append(load_reward_function(name))
        except ValueError as error:
            refused.append(str(error))
        except ImportError as error:
            refused.append(f"`reward_funcs` names {name!r}: {error}.")
    if refused:
        raise ValueError("\n  ".join(refused if len(refused) == 1 else ["several reward functions:", *refused]))
    return functions


def load_reward_function(name: str) -> Callable:
    """
    The reward function of one of `REWARD_FUNCTIONS`, or of a dotted import path. With arguments in brackets, all by
    name, it calls what is there, which must return a reward function: `my_lib.length_penalty(limit=512)`. Raises a
    `ValueError` if there is no such function, and an `ImportError` if there is no such module.
    """
    path, arguments = _read_call(REWARD_FUNCTIONS.get(name, name))
    path = REWARD_FUNCTIONS.get(path, path).partition("(")[0]
    if path in REWARDS:
        raise ValueError(f"`reward_funcs` names {name!r}, which open-r1 has. {REWARDS[path]}")
    if "." not in path:
        raise ValueError(
            f"`reward_funcs` names {name!r}, which is none of {', '.join(REWARD_FUNCTIONS)} and no dotted import path "
            "such as my_lib.rewards.custom_reward."
        )
    module, _, attribute = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module), attribute, None)
    if function is None:
        raise ValueError(f"`reward_funcs` names {name!r}, but the module {module} has no {attribute!r}.")
    if arguments is not None:
        try:
            function = function(**arguments)
        except TypeError as error:
            raise ValueError(f"`reward_funcs` names {name!r}, which cannot be called so: {error}") from None
    _check_signature(function, name)
    return function


def _read_call(text: str) -> tuple[str, dict[str, Any] | None]:
    """The path and the arguments of `path(name=value)`; `None` for those of a path alone."""
    if "(" not in text and ")" not in text and "=" not in text:
        return text, None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise SyntaxError
        return ast.unparse(call.func), {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"`reward_funcs` names {text!r}, which is neither a name nor a call such as my_lib.penalty(limit=512): "
            "arguments by name, numbers or quoted texts. In a list in brackets a comma ends an item: give each its own "
            "line with a dash, or quote it."
        ) from None


def _check_signature(function: Any, name: str) -> None:
    """Refuse, before the first reward, a function that cannot take what TRL gives to every reward function."""
    if not callable(function):
        raise ValueError(f"`reward_funcs` names {name!r}, which is not a function but {function!r}.")
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := sorted(_HANDED_ON - parameters.keys()):
        raise ValueError(
            f"`reward_funcs` names {name!r}, which takes ({', '.join(parameters)}) and is handed {', '.join(missing)} "
            "too. If it is a reward function, let it take **kwargs; if it makes one, call it here, with its arguments "
            f"by name: {name.partition('(')[0]}({', '.join(f'{word}=...' for word in parameters)})."
        )


def check_columns(function: Callable, columns: Iterable[str], data: str) -> None:
    """Refuse (`ValueError`) the data called `data` if they lack a column that a reward function needs: a parameter
    without a default that TRL does not give."""
    columns = [*columns]
    given = {*columns, *_HANDED_ON, *_ALSO_GIVEN}
    wanted = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in given
    ]
    if wanted:
        hint = " `answer_column` names the column to make it from." if "solution" in wanted else ""
        raise ValueError(
            f"The reward function {getattr(function, '__name__', function)!r} wants the column {', '.join(wanted)}, "
            f"and {data} has {', '.join(columns)}.{hint}"
        )

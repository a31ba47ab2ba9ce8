"""probe_of(): TRL's own trainer in the state of ours, on which a check runs TRL's methods without consequences."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from troll_trl.trainers.trl_compat import METHOD


def owner_of(trainer: Any) -> type:
    """The class of TRL from which a trainer derives."""
    return next(cls for cls in type(trainer).__mro__ if cls in METHOD)


def probe_of(trainer: Any, owner: type, stubs: Mapping[str, Callable], below: Mapping[str, Callable] | None = None):
    """
    An instance of TRL's class `owner` with the attributes of `trainer`, but without what a subclass or an instance
    overrides, and with metrics of its own.

    `stubs` replace methods of `owner`, and methods in `below` replace what `owner` inherits and calls by `super()`.
    What TRL's methods assign stays in the probe. What they change in place, such as a model, changes for both.
    """
    inherited = type(owner.__name__, owner.__bases__, dict(below or {}))  # follows `owner` in the order of bases
    probe: Any = object.__new__(type(owner.__name__, (owner, inherited), dict(stubs)))
    for name, value in vars(trainer).items():
        if not hasattr(owner, name):
            counts = isinstance(value, dict) and value.keys() == {"train", "eval"}  # metrics, whatever their name
            setattr(probe, name, {mode: defaultdict(list) for mode in value} if counts else value)
    return probe

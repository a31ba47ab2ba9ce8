"""
Every private part of TRL, transformers and accelerate that the package uses, in two tiers, and the check that it still
exists.

- `METHOD`, and `ENGINE` with `old_policy="engine"`: without such a part no trainer starts.
  `trainers/arithmetic_check.py` compares what names cannot show.
- `RELIABILITY`: if one of these parts has moved, the trainer warns, switches it off, and trains without it.
  `trainers/step_check.py` tries what names cannot show.

Each is looked for as soon as it can be there: methods before a trainer is made, its attributes after, and those of a
running training (`RUNNING`) when one runs. No run reads TRL's source or bytecode. `tests/trl/test_trl_compat.py` does,
with TRL's main branch every night. It also finds names that are missing here.

`experimental/async_grpo` has a file of the same name.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ParamSpec

from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn, optim
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

from troll_trl.resilience import CHECKPOINTS, GUARD, PROMPTS, RESUME, TIED

logger = get_logger(__name__)

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

# For each class: the first parameters of a method, all others of which must have defaults; or `None`, for an attribute
# of the class or of its instances
Parts = Mapping[type, Mapping[str, str | None]]


def _of_both(parts: Mapping[str, str | None]) -> dict[type, Mapping[str, str | None]]:
    return {GRPOTrainer: parts, RLOOTrainer: parts}


_METHOD = {
    # Calls `model(**inputs, labels=…, fused_lm_head=True)` and reads `.log_probs`, `.entropy`, `.aux_loss`
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep",
    # Scores the rollout with the model that generated it. Returns the rollout batch, of which `completion_ids`,
    # `completion_mask` and `tool_mask` are read
    "_generate_and_score_completions": "self inputs",
    # Generates if it is time to, and returns a micro-batch. Shuffles and splits the rollout batch, lists included
    "_prepare_inputs": "self generation_batch",
    # The clip range of the loss, which becomes infinite
    "epsilon_low": None,
    "epsilon_high": None,
}
METHOD: Parts = {
    GRPOTrainer: {
        **_METHOD,
        # Called with keyword arguments
        "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask off_policy_threshold",
        "beta": None,  # 0 while the loss runs
    },
    RLOOTrainer: _METHOD,
}
# The parts for `old_policy="engine"`. `_generate` returns the completions' ids second; GRPO's returns the tools' mask
# third and the log-probabilities fifth
ENGINE: Parts = _of_both({"_generate": "self prompts", "vllm_generation": None})

METRICS, EVALUATION = "our changes to TRL's metrics", "evaluations that count each completion once"
_REWARDS = {"reward_funcs": None, "reward_func_names": None}  # the functions are wrapped

# These parts are not in the loss: without them a run trains the same weights, as long as nothing goes wrong
RELIABILITY: dict[str, Parts] = {
    RESUME: {
        **_of_both({"_step": None, "_buffered_inputs": None, "_metrics": None}),  # saved and restored
        Trainer: {
            # Called with keyword arguments
            "_run_epoch": "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
            "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
        },
    },
    CHECKPOINTS: {
        Trainer: {
            "_save_checkpoint": "self model trial",
            "_get_output_dir": "self trial",
            "_push_from_checkpoint": "self checkpoint_folder",
        }
    },
    GUARD: {
        RLOOTrainer: _REWARDS,
        GRPOTrainer: {**_REWARDS, "entropy_coef": None, "_last_world_entropy": None},  # put back after a skipped update
        # Set if an update is skipped: the schedule stays where it is, and the scaler is None for that step
        AcceleratedOptimizer: {"_is_overflow": None, "scaler": None},
    },
    METRICS: _of_both({"_metrics": None}),  # without `clip_ratio/*`
    EVALUATION: _of_both(
        {
            "_metrics": None,  # by mode
            # We count what the two return: ids second and GRPO's tool mask third; the rewards of all ranks
            "_generate": "self prompts",
            "_calculate_rewards": "self inputs prompts completions completion_ids_list",
        }
    ),
    # Calls the model's `generate`
    "rollouts without the sampling options of the model's folder": _of_both({"_generate": "self prompts"}),
    PROMPTS: _of_both({"_tokenize_prompts": "self prompts"}),  # returns the token ids first
    TIED: {Trainer: {"_issue_warnings_after_load": "self load_result"}},  # takes what `load_state_dict` returns
    "the model card's title and paper": _of_both({"_name": None, "_paper": None, "_tag_names": None}),
}

# Attributes that exist only while a training runs: those of a part of reliability, and what the loss reads
RUNNING: dict[str, Parts] = {
    RESUME: {Trainer: {"_tr_loss": None, "_globalstep_last_logged": None}},  # saved and restored
}
# `arithmetic_check.py` reads it at the first loss
METHOD_RUNNING: Parts = {Trainer: {"current_gradient_accumulation_steps": None}}


# No user can act on it: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type = GRPOTrainer, engine: bool = True) -> frozenset[str]:
    """
    Check the methods of all of the above for a trainer of TRL or a subclass. A part of `METHOD`, or of `ENGINE` for an
    `engine`, that has moved is an `ImportError`, which names the part, the library, and its installed and tested
    versions. Parts of `RELIABILITY` that have moved are returned, after a warning.
    """
    for parts in (METHOD, ENGINE) if engine else (METHOD,):
        for owner in trainer_class.__mro__:
            check_methods(owner, parts.get(owner, {}))
    return _switched_off(RELIABILITY, trainer_class.__mro__, _moved_methods)


def check_made(trainer: Any, engine: bool) -> frozenset[str]:
    """[`check_trl`] of the attributes of a `trainer`, when TRL's constructor has just made it."""
    for parts in (METHOD, ENGINE) if engine else (METHOD,):
        for owner in type(trainer).__mro__:
            check_attributes(owner, trainer, parts.get(owner, {}))
    # The trainer makes its own optimizer later
    optimizer = AcceleratedOptimizer(optim.SGD([nn.Parameter()], 1.0), device_placement=False)
    made = lambda owner, parts: _moved_attributes(owner, optimizer if owner is AcceleratedOptimizer else trainer, parts)
    return _switched_off(RELIABILITY, (*type(trainer).__mro__, AcceleratedOptimizer), made)


def check_running(trainer: Any, switched_off: frozenset[str]) -> frozenset[str]:
    """What is `switched_off` when a training runs, with the parts whose attributes in `RUNNING` have moved."""
    running = {name: parts for name, parts in RUNNING.items() if name not in switched_off}
    made = lambda owner, parts: _moved_attributes(owner, trainer, parts)
    return switched_off | _switched_off(running, type(trainer).__mro__, made)


def _switched_off(
    reliability: Mapping[str, Parts], owners: Iterable[type], moved_of: Callable[[type, Mapping], Iterator[str]]
) -> frozenset[str]:
    found = {
        name: moved
        for name, parts in reliability.items()
        for owner in owners
        for moved in moved_of(owner, parts.get(owner, {}))
    }
    warn_of(found)
    return frozenset(found)


def warn_of(moved: Mapping[str, str]) -> None:
    """Warn of the parts that are switched off, by name, with the reason."""
    for name, why in moved.items():
        logger.warning(f"Switched off: {name}. {why} The training continues without it.")


def check_methods(owner: type, parts: Mapping[str, str | None]) -> None:
    """Raise an `ImportError` unless a class has the methods among its `parts`, with these parameters first. The message
    names the part, the library, the installed version and the tested one."""
    for moved in _moved_methods(owner, parts):
        raise ImportError(moved)


def check_attributes(owner: type, instance: Any, parts: Mapping[str, str | None]) -> None:
    """[`check_methods`] of the attributes among the `parts` of a class, which it or an `instance` has."""
    for moved in _moved_attributes(owner, instance, parts):
        raise ImportError(moved)


def _moved_attributes(owner: type, instance: Any, parts: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence for every attribute that neither `owner`, a class of TRL's, nor an instance has."""
    for name, parameters in parts.items():
        if parameters is None and not hasattr(owner, name) and name not in vars(instance):
            yield unsupported(owner, f"`{owner.__name__}.{name}` is gone")


def _moved_methods(owner: type, parts: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence for every method of a class that has moved."""
    for name, parameters in parts.items():
        if parameters is None:
            continue
        method: Any = getattr(owner, name, None)
        if method is None:
            yield unsupported(owner, f"`{owner.__name__}.{name}` is gone")
        else:
            expected, actual = parameters.split(), inspect.signature(method).parameters
            others = [parameter for parameter in actual.values() if parameter.name not in expected]
            needed = [x for x in others if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
            if list(actual)[: len(expected)] != expected or needed:
                given = f"takes ({', '.join(actual)}), expected ({', '.join(expected)}) first, and defaults of others"
                yield unsupported(owner, f"`{owner.__name__}.{name}` {given}")


@contextmanager
def naming_versions() -> Iterator[None]:
    """Around imports of TRL's private names: says which versions have them."""
    try:
        yield
    except ImportError as error:
        raise ImportError(unsupported("trl", str(error))) from error


def unsupported(library: str | type, what: str) -> str:
    """A sentence on what has moved in a library, given by its name or by a class of it."""
    name = library if isinstance(library, str) else library.__module__.partition(".")[0]
    installed, tested = import_module(name).__version__, TESTED[name]
    return (
        f"troll_trl does not support {name} {installed}: {what}. It is tested with {name} {tested}; install that "
        f'with `pip install "{name}=={tested}.*"`, or a newer troll_trl.'
    )


P = ParamSpec("P")


def with_parameters_of(method: Callable[P, None]) -> Callable[[Callable[..., None]], Callable[P, None]]:
    """Decorator for an override that passes all its arguments on. `help` and editors then show the parameters of
    `method`."""

    def keep(override: Any) -> Callable[P, None]:
        # With `functools.wraps`, the API page would resolve the override to TRL's method, and fail to build
        override.__signature__ = inspect.signature(method)
        return override

    return keep


# Imported by this package and those below it. This module comes first, see `trainers/__init__.py`
with naming_versions():
    from trl.trainer.utils import maybe_gather_lm_head_ctx  # noqa: F401

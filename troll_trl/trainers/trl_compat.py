"""
Every private part of TRL, transformers and accelerate that the package uses, in two tiers, and the check that it still
exists.

- `METHOD`, and `ENGINE` with `old_policy="engine"`: without such a part no trainer starts.
  `trainers/arithmetic_check.py` compares what names cannot show.
- `RELIABILITY`: if one of these parts has moved, the trainer warns, switches it off, and trains without it.

`experimental/async_grpo` has a file of the same name. `tests/trl/test_trl_compat.py` checks what the methods do: a
patch release that only rewrites a line stops no run. It also finds names that are missing here.
"""

import dis
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import CodeType
from typing import Any, ParamSpec

from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

logger = get_logger(__name__)

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

# By class: the first parameters of a method, whose others must have defaults; or `None`, for an attribute of the class
# or of its instances
Parts = Mapping[type, Mapping[str, str | None]]


def _of_both(parts: Mapping[str, str | None]) -> dict[type, Mapping[str, str | None]]:
    return {GRPOTrainer: parts, RLOOTrainer: parts}


_METHOD = {
    # Calls `model(**inputs, labels=…, fused_lm_head=True)` and reads `.log_probs`, `.entropy`, `.aux_loss`
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep",
    # Scores the rollout with the current weights before the reference model does. Returns the rollout batch, of which
    # `completion_ids`, `completion_mask` and `tool_mask` are read
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
    Trainer: {"current_gradient_accumulation_steps": None},
}
# Of `old_policy="engine"`: `_generate` returns the completions' ids second; GRPO's also the tools' mask third and the
# log-probabilities fifth
ENGINE: Parts = _of_both({"_generate": "self prompts", "vllm_generation": None})

RESUME, GUARD = "exact resuming inside a rollout batch", "skipping updates that are not finite"
CHECKPOINTS = "complete or absent checkpoints, with the state of a rollout batch"
METRICS, PROMPTS, CARD = "our changes to TRL's metrics", "the check of prompts", "the model card's title and paper"
TIED = "the silence about tied weights"
EVALUATION = "evaluations that count each completion once"
SAMPLING = "rollouts without the sampling options of the model's folder"
_REWARDS = {"reward_funcs": None, "reward_func_names": None}  # the functions are wrapped

# What takes no part in the loss: without it a run trains the same weights, as long as nothing goes wrong
RELIABILITY: dict[str, Parts] = {
    RESUME: {
        **_of_both({"_step": None, "_buffered_inputs": None, "_metrics": None}),  # saved and restored
        Trainer: {
            "_tr_loss": None,  # saved and restored, as the next
            "_globalstep_last_logged": None,
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
            # What the two return is counted: ids second and GRPO's tool mask third; rewards of all ranks
            "_generate": "self prompts",
            "_calculate_rewards": "self inputs prompts completions completion_ids_list",
        }
    ),
    SAMPLING: _of_both({"_generate": "self prompts"}),  # calls the model's `generate`
    PROMPTS: _of_both({"_tokenize_prompts": "self prompts"}),  # returns the token ids first
    TIED: {Trainer: {"_issue_warnings_after_load": "self load_result"}},  # takes what `load_state_dict` returns
    CARD: _of_both({"_name": None, "_paper": None, "_tag_names": None}),
}


# No user can act on it: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type = GRPOTrainer, engine: bool = True) -> frozenset[str]:
    """
    Check all of the above for a trainer of TRL or a subclass. A part of `METHOD`, or of `ENGINE` for an `engine`, that
    has moved is an `ImportError`, which names the part, the library, and its installed and tested versions. Parts of
    `RELIABILITY` that have moved are returned, after a warning.
    """
    owners = (*trainer_class.__mro__, AcceleratedOptimizer)
    for owner in owners:
        check_parts(owner, {**METHOD.get(owner, {}), **(ENGINE.get(owner, {}) if engine else {})})
    found = {
        name: moved
        for name, parts in RELIABILITY.items()
        for owner in owners
        for moved in _moved(owner, parts.get(owner, {}))
    }
    for name, moved in found.items():
        logger.warning(f"Switched off: {name}. {moved} The training continues without it.")
    return frozenset(found)


def check_parts(owner: type, parts: Mapping[str, str | None]) -> None:
    """Raise an `ImportError` unless a class has these methods, with these parameters first, and these attributes. The
    message names the part, the library, the installed version and the tested one."""
    for moved in _moved(owner, parts):
        raise ImportError(moved)


def _moved(owner: type, parts: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence for every part of a class that has moved."""
    for name, parameters in parts.items():
        method: Any = getattr(owner, name, None)
        if method is None if parameters is not None else name not in _attributes_of(owner):
            yield unsupported(owner, f"`{owner.__name__}.{name}` is gone")
        elif parameters is not None:
            expected, actual = parameters.split(), inspect.signature(method).parameters
            others = [parameter for parameter in actual.values() if parameter.name not in expected]
            needed = [x for x in others if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
            if list(actual)[: len(expected)] != expected or needed:
                given = f"takes ({', '.join(actual)}), expected ({', '.join(expected)}) first, and defaults of others"
                yield unsupported(owner, f"`{owner.__name__}.{name}` {given}")


def _attributes_of(owner: type) -> set[str]:
    """The attributes of a class, and those that its methods assign: some exist only while a training runs."""
    functions = [f for base in owner.__mro__ for f in vars(base).values() if inspect.isfunction(f)]
    return set(dir(owner)).union(*(_assigned(inspect.unwrap(f).__code__) for f in functions))


@functools.cache  # by the code, for a test changes methods
def _assigned(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


@contextmanager
def naming_versions(library: str) -> Iterator[None]:
    """Around imports of private names: says which versions have them."""
    try:
        yield
    except ImportError as error:
        raise ImportError(unsupported(library, str(error))) from error


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
with naming_versions("trl"):
    from trl.trainer.utils import maybe_gather_lm_head_ctx  # noqa: F401

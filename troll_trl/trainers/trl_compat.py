"""
Every private part of TRL, transformers and accelerate that the package uses, and the check that it still exists.
`experimental/async_grpo` has a file of the same name. `tests/test_trl_compat.py` checks what the methods do: a patch
release that only rewrites a line stops no run. It also finds names that are missing here.
"""

import dis
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

_METHODS = {
    # Calls `model(**inputs, labels=…, fused_lm_head=True)` and reads `.log_probs`, `.entropy`, `.aux_loss`
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep",
    # Scores the rollout with the current weights before the reference model does. Returns the rollout batch, of which
    # `completion_ids`, `completion_mask` and `tool_mask` are read
    "_generate_and_score_completions": "self inputs",
    # Reads `epsilon_low`, `epsilon_high` and the rollout batch; GRPO's also `beta`. GRPO's batch has
    # `old_per_token_logps`, `ref_per_token_logps` and `num_items_in_batch`
    "_compute_loss": "self model inputs",
    # Calls `reward_funcs` with keyword arguments, and returns the rewards of all ranks
    "_calculate_rewards": "self inputs prompts completions completion_ids_list",
    # Returns the completions' ids second; GRPO's also the tools' mask third and the log-probabilities fifth
    "_generate": "self prompts",
    # Returns the token ids first
    "_tokenize_prompts": "self prompts",
    # Generates if `_step` says so or `_buffered_inputs` is None. Shuffles and splits the rollout batch, lists included
    "_prepare_inputs": "self generation_batch",
    # Returns the sampler of the data, which draws a new order whenever it is iterated
    "_get_train_sampler": "self",
}
# Overridden methods: their first parameters, and what else the package relies on
PARAMETERS: dict[type, dict[str, str]] = {
    GRPOTrainer: {
        **_METHODS,
        # Called with keyword arguments
        "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask",
    },
    RLOOTrainer: _METHODS,
    Trainer: {
        # Called once an update, between the gradient's clip and the optimizer's step
        "_get_grad_norm": "self model grad_norm",
        # Called without keywords. Returns the epochs, and the micro-batches of the next one, that a resumed run skips
        "_init_training_state": "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint",
        # Called with keyword arguments
        "_run_epoch": (
            "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
            "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
        ),
        # How a checkpoint is written, and what is read before the next update
        "_save_checkpoint": "self model trial",
        "_get_output_dir": "self trial",
        "_push_from_checkpoint": "self checkpoint_folder",
        "_save_rng_state": "self output_dir",
        "_load_rng_state": "self checkpoint",
        # Takes what `load_state_dict` returns
        "_issue_warnings_after_load": "self load_result",
    },
}

_ATTRIBUTES = (
    "temperature max_completion_length num_iterations beta reward_func_names _is_vlm "  # read
    "use_vllm vllm_mode vllm_generation "  # read
    "epsilon_low epsilon_high reward_funcs "  # set
    "_step _buffered_inputs _metrics "  # saved and restored; `_metrics` without `clip_ratio/*`
    "_name _paper _tag_names "  # of the model card, overridden
)
# Attributes of a class or of its instances
ATTRIBUTES: dict[type, str] = {
    GRPOTrainer: _ATTRIBUTES
    + "loss_type importance_sampling_level vllm_importance_sampling_correction environment_factories rollout_func "
    "entropy_coef _last_world_entropy",  # put back if an update is skipped
    RLOOTrainer: _ATTRIBUTES,
    Trainer: "current_gradient_accumulation_steps _tr_loss _globalstep_last_logged",  # the last two saved and restored
    # Set if an update is skipped: the schedule stays where it is, and the scaler is None for that step
    AcceleratedOptimizer: "_is_overflow scaler",
}


# No user can act on it: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type = GRPOTrainer) -> None:
    """[`check_parts`] of all of the above, for a trainer of TRL or a subclass."""
    for owner in (*trainer_class.__mro__, AcceleratedOptimizer):
        check_parts(owner, PARAMETERS.get(owner, {}), ATTRIBUTES.get(owner, ""))


def check_parts(owner: type, methods: Mapping[str, str], attributes: str) -> None:
    """Raise an `ImportError` unless a class has these methods, with these parameters first, and these attributes. The
    message names the part, the library, the installed version and the tested one."""
    library = owner.__module__.partition(".")[0]
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise ImportError(_moved(library, f"`{owner.__name__}.{name}` is gone"))
        expected, actual = tuple(parameters.split()), tuple(inspect.signature(method).parameters)
        if actual[: len(expected)] != expected:
            raise ImportError(_moved(library, f"`{owner.__name__}.{name}` takes {actual}, expected {expected} first"))
    for name in attributes.split():
        if name not in _attributes_of(owner):
            raise ImportError(_moved(library, f"`{owner.__name__}.{name}` is gone"))


@functools.cache
def _attributes_of(owner: type) -> set[str]:
    """The attributes of a class, and those that its methods assign: some exist only while a training runs."""
    functions = [f for base in owner.__mro__ for f in vars(base).values() if inspect.isfunction(f)]
    steps = (step for f in functions for step in dis.get_instructions(inspect.unwrap(f)))
    return {*dir(owner), *(step.argval for step in steps if step.opname == "STORE_ATTR")}


@contextmanager
def naming_versions(library: str) -> Iterator[None]:
    """Around imports of private names: says which versions have them."""
    try:
        yield
    except ImportError as error:
        raise ImportError(_moved(library, str(error))) from error


def _moved(library: str, what: str) -> str:
    installed, tested = import_module(library).__version__, TESTED[library]
    return (
        f"troll_trl does not support {library} {installed}: {what}. It is tested with {library} {tested}; install that "
        f'with `pip install "{library}=={tested}.*"`, or a newer troll_trl.'
    )


# Imported by this package and those below it. This module comes first, see `trainers/__init__.py`
with naming_versions("trl"):
    from trl.trainer.utils import get_config_model_id, is_async_callable, maybe_gather_lm_head_ctx  # noqa: F401

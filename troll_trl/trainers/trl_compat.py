"""
Every private part of TRL and of transformers' Trainer that the package uses, and the check that it still exists.
`experimental/async_grpo` has a file of the same name. `tests/test_trl_compat.py` checks what the methods do: a patch
release that only rewrites a line stops no run.

`PARAMETERS` lists the overridden methods with their first parameters, and what else each of them relies on. In use are
also

- of both trainers of TRL: `temperature`, `max_completion_length`, `num_iterations`, `_is_vlm`, `reward_func_names`,
  `beta`; `_metrics`, saved and restored, without `clip_ratio/*`; `completion_ids` and `completion_mask` of the rollout
  batch;
- of GRPOTrainer: `loss_type`, `importance_sampling_level`, `use_vllm`, `vllm_importance_sampling_correction`,
  `current_gradient_accumulation_steps`; `kl` added to `_metrics`; `entropy_coef` and `_last_world_entropy`, put back if
  an update is skipped; `tool_mask`, `num_items_in_batch`, `old_per_token_logps`, `ref_per_token_logps` of the batch;
- of transformers' Trainer: `_tr_loss`, `_globalstep_last_logged`, saved and restored;
- of accelerate's optimizer, if an update is skipped: `_is_overflow` is set, so the schedule stays where it is, and
  `scaler` is None for that step;
- of `trl.trainer.utils`: `is_async_callable`, `maybe_gather_lm_head_ctx`, `get_config_model_id`.
"""

import inspect
import warnings
from collections.abc import Mapping

import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

TESTED_TRL, TESTED_TRANSFORMERS = "1.16", "5.23"

_BOTH = {
    # Calls `model(**inputs, labels=…, fused_lm_head=True)` and reads `.log_probs`, `.entropy`, `.aux_loss`
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep",
    # Returns the rollout batch. Scores it with the current weights before the reference model does
    "_generate_and_score_completions": "self inputs",
    # Reads `epsilon_low`, `epsilon_high` and the rollout batch; GRPO's also `beta`
    "_compute_loss": "self model inputs",
    # Calls `reward_funcs` with keyword arguments, and returns the rewards of all ranks
    "_calculate_rewards": "self inputs prompts completions completion_ids_list",
    # Returns the token ids first
    "_tokenize_prompts": "self prompts",
    # Generates if `_step` says so or `_buffered_inputs` is None, which are saved and restored. Shuffles and splits the
    # lists of the rollout batch with its tensors
    "_prepare_inputs": "self generation_batch",
}
PARAMETERS: dict[type, dict[str, str]] = {
    GRPOTrainer: {
        **_BOTH,
        # Called with keyword arguments
        "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask",
    },
    RLOOTrainer: _BOTH,
    Trainer: {
        # Called once an update, between the gradient's clip and the optimizer's step
        "_get_grad_norm": "self model grad_norm",
        # Called with keyword arguments
        "_run_epoch": "self model epoch train_dataloader steps_in_epoch",
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


def silence_known_warnings() -> None:
    """Hide what no user can act on: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type = GRPOTrainer) -> None:
    """[`check_parameters`] for a trainer of TRL, or a subclass."""
    for known in (known for known in PARAMETERS if issubclass(trainer_class, known)):
        check_parameters(known, PARAMETERS[known])


def check_parameters(owner: type, methods: Mapping[str, str]) -> None:
    """Raise an `ImportError` unless a class has these methods, with these parameters first. The message names the
    method, the library, the installed version and the tested one."""
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise ImportError(_moved(owner, f"`{owner.__name__}.{name}` is gone"))
        expected, actual = tuple(parameters.split()), tuple(inspect.signature(method).parameters)
        if actual[: len(expected)] != expected:
            raise ImportError(_moved(owner, f"`{owner.__name__}.{name}` takes {actual}, expected {expected} first"))


def _moved(owner: type, what: str) -> str:
    library, tested = (transformers, TESTED_TRANSFORMERS) if owner is Trainer else (trl, TESTED_TRL)
    name = library.__name__
    return (
        f"troll_trl does not support {name} {library.__version__}: {what}. It is tested with {name} {tested}; install "
        f'that with `pip install "{name}=={tested}.*"`, or a newer troll_trl.'
    )

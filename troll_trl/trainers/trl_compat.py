"""Every private part of TRL and of transformers' Trainer that the package reaches into, in one place, and the check
that it is still there.

Of GRPOTrainer and RLOOTrainer:
_get_per_token_logps_and_entropies   overridden; calls `model(**inputs, labels=…, fused_lm_head=True)` and reads
                                     `.log_probs`, `.entropy`, `.aux_loss`
_generate_and_score_completions      overridden; its output is the rollout batch; the pass that scores the rollout with
                                     the current weights comes before that of the reference
_compute_loss                        overridden; reads `epsilon_low`, `epsilon_high`, and the rollout batch
_calculate_rewards                   overridden; calls `reward_funcs` with keyword arguments, returns all ranks' rewards
_tokenize_prompts                    overridden; returns the token ids first
_prepare_inputs                      overridden; generates when `_step` says so or `_buffered_inputs` is None: both are
                                     saved and restored; shuffles and splits lists with the tensors of the rollout batch
_metrics                             `clip_ratio/*` removed; saved and restored
attributes                           read: `temperature`, `max_completion_length`, `accelerator`, `num_iterations`,
                                     `_is_vlm`, `reward_func_names`, `beta`
the rollout batch                    read: `completion_ids`, `completion_mask`

Of GRPOTrainer alone:
_compute_loss                        reads `beta`, `inputs["old_per_token_logps"]`, `inputs["ref_per_token_logps"]`
get_off_policy_mask                  overridden; called with keyword arguments
_metrics                             `kl` added
attributes                           read: `loss_type`, `importance_sampling_level`, `use_vllm`,
                                     `vllm_importance_sampling_correction`, `current_gradient_accumulation_steps`;
                                     put back where an update is skipped: `entropy_coef`, `_last_world_entropy`
the rollout batch                    read: `tool_mask`, `num_items_in_batch`, `old_per_token_logps`,
                                     `ref_per_token_logps`

Of transformers' Trainer:
_get_grad_norm                       overridden; called once an update, between the gradients' clip and the step
_run_epoch                           overridden; called with keyword arguments
_save_checkpoint, _get_output_dir, _push_from_checkpoint, _save_rng_state, _load_rng_state
                                     overridden; how a checkpoint is written, and what is read before the next update
_issue_warnings_after_load           overridden; takes what `load_state_dict` returns
_tr_loss, _globalstep_last_logged    saved and restored
AcceleratedOptimizer                 where an update is skipped, `_is_overflow` is set: the schedule then stays where
                                     it is; and `scaler` is None for that step

trl.trainer.utils.is_async_callable              used for reward functions
trl.trainer.utils.maybe_gather_lm_head_ctx       used by `troll_trl.lm_head` under ZeRO-3
trl.trainer.utils.get_config_model_id            used for the default output folder

What `troll_trl.experimental.async_grpo` reaches into is in the file of this name there.
"""

import inspect
import warnings
from collections.abc import Mapping

import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

TESTED_TRL, TESTED_TRANSFORMERS = "1.16", "5.23"

_SCORING_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
_ROLLOUT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("self", "prompts"),
    "_prepare_inputs": ("self", "generation_batch"),
}
PARAMETERS: dict[type, dict[str, tuple[str, ...]]] = {
    GRPOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PARAMETERS,
        "_generate_and_score_completions": ("self", "inputs"),
        "_compute_loss": ("self", "model", "inputs"),
        "get_off_policy_mask": ("advantages", "per_token_logps", "sampling_per_token_logps", "mask"),
        **_ROLLOUT_PARAMETERS,
    },
    RLOOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PARAMETERS,
        "_generate_and_score_completions": ("self", "inputs"),
        "_compute_loss": ("self", "model", "inputs"),
        **_ROLLOUT_PARAMETERS,
    },
    Trainer: {
        "_get_grad_norm": ("self", "model", "grad_norm"),
        "_run_epoch": ("self", "model", "epoch", "train_dataloader", "steps_in_epoch"),
        "_save_checkpoint": ("self", "model", "trial"),
        "_get_output_dir": ("self", "trial"),
        "_push_from_checkpoint": ("self", "checkpoint_folder"),
        "_save_rng_state": ("self", "output_dir"),
        "_load_rng_state": ("self", "checkpoint"),
        "_issue_warnings_after_load": ("self", "load_result"),
    },
}


def silence_known_warnings() -> None:
    """Hide what no user can act on: TRL 1.16 calls methods by names that transformers deprecates, until its 6.0."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type = GRPOTrainer) -> None:
    """
    Check that the installed TRL and transformers still have the methods that the package reaches into, by name and
    parameters, for TRL's trainer or a subclass. The `ImportError` for one that has moved names it, the library, the
    installed version and the tested one.

    What these methods must still say is a test (`tests/test_trl_compat.py`): a line that a patch release has written
    anew must stop no run.
    """
    for known in (known for known in PARAMETERS if issubclass(trainer_class, known)):
        check_parameters(known, PARAMETERS[known])


def check_parameters(owner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raise an `ImportError` unless a class still has these methods with these parameters first."""
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise ImportError(_moved(owner, f"`{owner.__name__}.{name}` is gone"))
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            what = f"`{owner.__name__}.{name}` takes {parameters}, expected {expected} first"
            raise ImportError(_moved(owner, what))


def _moved(owner: type, what: str) -> str:
    library, tested = (transformers, TESTED_TRANSFORMERS) if owner is Trainer else (trl, TESTED_TRL)
    name = library.__name__
    return (
        f"troll_trl does not support {name} {library.__version__}: {what}. It is tested with {name} {tested}; install "
        f'that with `pip install "{name}=={tested}.*"`, or a newer troll_trl.'
    )

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
_prepare_inputs                      generates when `_step` says so or `_buffered_inputs` is None: both are saved and
                                     restored
_metrics                             `clip_ratio/*` removed; saved and restored
attributes                           read: `temperature`, `max_completion_length`, `accelerator`, `num_iterations`,
                                     `_is_vlm`, `reward_func_names`
the rollout batch                    read: `completion_mask`

Of GRPOTrainer alone:
_compute_loss                        reads `beta`, `inputs["old_per_token_logps"]`, `inputs["ref_per_token_logps"]`
get_off_policy_mask                  overridden; called with keyword arguments
_metrics                             `kl` added
attributes                           read: `loss_type`, `importance_sampling_level`, `use_vllm`,
                                     `vllm_importance_sampling_correction`, `current_gradient_accumulation_steps`
the rollout batch                    read: `tool_mask`, `num_items_in_batch`, `old_per_token_logps`,
                                     `ref_per_token_logps`

Of transformers' Trainer:
_get_grad_norm                       overridden; called once an update, between the gradients' clip and the step
_run_epoch                           overridden; called with keyword arguments
_save_checkpoint, _get_output_dir, _push_from_checkpoint, _save_rng_state, _load_rng_state
                                     overridden; how a checkpoint is written, and what is read before the next update
_tr_loss, _globalstep_last_logged    saved and restored
AcceleratedOptimizer._is_overflow    set where an update is skipped: the schedule then stays where it is

trl.trainer.utils.is_async_callable              used for reward functions
trl.trainer.utils.maybe_gather_lm_head_ctx       used by `troll_trl.lm_head` under ZeRO-3
trl.trainer.utils.get_config_model_id            used for the default output folder
"""

import inspect

import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

TESTED_TRL = "1.16"

_SCORING_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
_BUFFER_PHRASES = ("self._step % generate_every == 0 or self._buffered_inputs is None",)
_ROLLOUT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("self", "prompts"),
    "_prepare_inputs": ("self", "generation_batch"),
}
_PARAMETERS: dict[type, dict[str, tuple[str, ...]]] = {
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
    },
}
# What each method must still say for the override to mean what it means
_SCORING_PHRASES = ("model(**model_inputs, labels=labels, fused_lm_head=True)", "outputs.log_probs")
_PHRASES: dict[type, dict[str, tuple[str, ...]]] = {
    GRPOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PHRASES,
        "_generate_and_score_completions": (
            "self.args.gradient_accumulation_steps % generate_every != 0",
            'output["old_per_token_logps"]',
        ),
        "_prepare_inputs": _BUFFER_PHRASES,
        "_compute_loss": (
            "self.epsilon_low",
            "self.epsilon_high",
            "self.beta",
            'inputs.get("old_per_token_logps")',
            "self.get_off_policy_mask(",
            'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        ),
    },
    RLOOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PHRASES,
        "_generate_and_score_completions": (
            "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
            "rewards - self.beta * kl",
        ),
        "_prepare_inputs": _BUFFER_PHRASES,
        "_compute_loss": (
            "self.epsilon_low",
            "self.epsilon_high",
            "logps = (per_token_logps * completion_mask).sum(1)",
            'old_logps = inputs["old_logps"]',
            "loss = per_sequence_loss.mean()",
        ),
    },
    Trainer: {
        "_run_epoch": (
            "self._get_grad_norm(model, grad_norm=grad_norm)",
            "self.accelerator.optimizer_step_was_skipped",
        ),
        "_save_checkpoint": ("self._get_output_dir(trial=trial)", "self._save_rng_state(output_dir)"),
    },
}


def check_trl(trainer_class: type = GRPOTrainer) -> None:
    """
    Check that the installed TRL still has what the package reaches into.

    Args:
        trainer_class (`type`, *optional*, defaults to [`~trl.GRPOTrainer`]):
            TRL's trainer that is extended, or a subclass of it.

    Raises:
        ImportError: a seam has moved; the message names it, the installed version and the tested ones.
    """
    for known in (known for known in _PARAMETERS if issubclass(trainer_class, known)):
        for name, expected in _PARAMETERS[known].items():
            method = getattr(known, name, None)
            if method is None:
                raise ImportError(_moved(f"`{known.__name__}.{name}` is gone"))
            parameters = tuple(inspect.signature(method).parameters)
            if parameters[: len(expected)] != expected:
                raise ImportError(_moved(f"`{known.__name__}.{name}` takes {parameters}, expected {expected} first"))
            source = inspect.getsource(method)
            for phrase in _PHRASES[known].get(name, ()):
                if phrase not in source:
                    raise ImportError(_moved(f"`{known.__name__}.{name}` no longer contains `{phrase}`"))


def _moved(what: str) -> str:
    return (
        f"troll_trl does not support trl {trl.__version__} with transformers {transformers.__version__}: {what}. It is "
        f'tested with trl {TESTED_TRL}; install that with `pip install "trl=={TESTED_TRL}.*"`, or a newer troll_trl.'
    )

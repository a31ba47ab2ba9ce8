"""Every private part of TRL that the package reaches into, in one place, and the check that it is still there.

Of GRPOTrainer and RLOOTrainer:
_get_per_token_logps_and_entropies   overridden; calls `model(**inputs, labels=…, fused_lm_head=True)` and reads
                                     `.log_probs`, `.entropy`, `.aux_loss`
_generate_and_score_completions      overridden; its output is the rollout batch; the pass that scores the rollout with
                                     the current weights comes before that of the reference
_compute_loss                        overridden; reads `epsilon_low`, `epsilon_high`, and the rollout batch
_metrics                             `clip_ratio/*` removed
attributes                           read: `temperature`, `max_completion_length`, `accelerator`
the rollout batch                    read: `completion_mask`

Of GRPOTrainer alone:
_compute_loss                        reads `beta`, `inputs["old_per_token_logps"]`, `inputs["ref_per_token_logps"]`
get_off_policy_mask                  overridden; called with keyword arguments
_metrics                             `kl` added
attributes                           read: `loss_type`, `importance_sampling_level`, `use_vllm`,
                                     `vllm_importance_sampling_correction`, `current_gradient_accumulation_steps`
the rollout batch                    read: `tool_mask`, `num_items_in_batch`, `old_per_token_logps`,
                                     `ref_per_token_logps`

trl.trainer.utils.maybe_gather_lm_head_ctx       used by `troll_trl.lm_head` under ZeRO-3
trl.trainer.utils.get_config_model_id            used for the default output folder
"""

import inspect

import trl
from trl import GRPOTrainer, RLOOTrainer

TESTED_TRL = "1.16"

_SCORING_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
_PARAMETERS: dict[type, dict[str, tuple[str, ...]]] = {
    GRPOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PARAMETERS,
        "_generate_and_score_completions": ("self", "inputs"),
        "_compute_loss": ("self", "model", "inputs"),
        "get_off_policy_mask": ("advantages", "per_token_logps", "sampling_per_token_logps", "mask"),
    },
    RLOOTrainer: {
        "_get_per_token_logps_and_entropies": _SCORING_PARAMETERS,
        "_generate_and_score_completions": ("self", "inputs"),
        "_compute_loss": ("self", "model", "inputs"),
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
        "_compute_loss": (
            "self.epsilon_low",
            "self.epsilon_high",
            "logps = (per_token_logps * completion_mask).sum(1)",
            'old_logps = inputs["old_logps"]',
            "loss = per_sequence_loss.mean()",
        ),
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
    trl_class = next(known for known in _PARAMETERS if issubclass(trainer_class, known))
    for name, expected in _PARAMETERS[trl_class].items():
        method = getattr(trl_class, name, None)
        if method is None:
            raise ImportError(_moved(f"`{trl_class.__name__}.{name}` is gone"))
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            raise ImportError(_moved(f"`{trl_class.__name__}.{name}` takes {parameters}, expected {expected} first"))
        source = inspect.getsource(method)
        for phrase in _PHRASES[trl_class].get(name, ()):
            if phrase not in source:
                raise ImportError(_moved(f"`{trl_class.__name__}.{name}` no longer contains `{phrase}`"))


def _moved(what: str) -> str:
    return (
        f"troll_trl does not support trl {trl.__version__}: {what}. It is tested with trl {TESTED_TRL}; install that "
        f'with `pip install "trl=={TESTED_TRL}.*"`, or a newer troll_trl.'
    )

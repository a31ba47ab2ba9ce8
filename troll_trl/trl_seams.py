"""Every private part of TRL that the package reaches into, in one place, and the check that it is still there.

GRPOTrainer._get_per_token_logps_and_entropies   overridden; calls `model(**inputs, labels=…, fused_lm_head=True)` and
                                                 reads `.log_probs`, `.entropy`, `.aux_loss`
GRPOTrainer._generate_and_score_completions      overridden; its output is the rollout batch
GRPOTrainer._compute_loss                        overridden; reads `epsilon_low`, `epsilon_high`, `beta`,
                                                 `inputs["old_per_token_logps"]`, `inputs["ref_per_token_logps"]`
GRPOTrainer.get_off_policy_mask                  overridden; called with keyword arguments
GRPOTrainer._metrics                             `clip_ratio/*` removed, `kl` added
attributes of GRPOTrainer                        read: `temperature`, `loss_type`, `importance_sampling_level`,
                                                 `max_completion_length`, `use_vllm`,
                                                 `vllm_importance_sampling_correction`,
                                                 `current_gradient_accumulation_steps`
the rollout batch                                read: `completion_mask`, `tool_mask`, `num_items_in_batch`,
                                                 `old_per_token_logps`, `ref_per_token_logps`
trl.trainer.utils.maybe_gather_lm_head_ctx       used by `troll_trl.lm_head` under ZeRO-3
trl.trainer.utils.get_config_model_id            used for the default output folder
"""

import inspect

import trl
from trl import GRPOTrainer

TESTED_TRL = "1.16"

_PARAMETERS = {
    "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_compute_loss": ("self", "model", "inputs"),
    "get_off_policy_mask": ("advantages", "per_token_logps", "sampling_per_token_logps", "mask"),
}
# What each method must still say for the override to mean what it means
_PHRASES = {
    "_get_per_token_logps_and_entropies": (
        "model(**model_inputs, labels=labels, fused_lm_head=True)",
        "outputs.log_probs",
    ),
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
}


def check_trl() -> None:
    """
    Check that the installed TRL still has what the package reaches into.

    Raises:
        ImportError: a seam has moved; the message names it, the installed version and the tested ones.
    """
    for name, expected in _PARAMETERS.items():
        method = getattr(GRPOTrainer, name, None)
        if method is None:
            raise ImportError(_moved(f"`GRPOTrainer.{name}` is gone"))
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            raise ImportError(_moved(f"`GRPOTrainer.{name}` takes {parameters}, expected {expected} first"))
        source = inspect.getsource(method)
        for phrase in _PHRASES.get(name, ()):
            if phrase not in source:
                raise ImportError(_moved(f"`GRPOTrainer.{name}` no longer contains `{phrase}`"))


def _moved(what: str) -> str:
    return (
        f"troll_trl does not support trl {trl.__version__}: {what}. It is tested with trl {TESTED_TRL}; install that "
        f'with `pip install "trl=={TESTED_TRL}.*"`, or a newer troll_trl.'
    )

"""The library versions that the package is tested with, and every private name in them that the trainers use."""

import warnings
from importlib import import_module

from accelerate.logging import get_logger
from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

logger = get_logger(__name__)

TESTED = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}

# Methods that are overridden or called, by class
_OF_BOTH = ("_get_per_token_logps_and_entropies", "_generate_and_score_completions", "_generate", "_compute_loss")
PRIVATE = {
    GRPOTrainer: (*_OF_BOTH, "_calculate_rewards", "get_off_policy_mask"),
    RLOOTrainer: (*_OF_BOTH, "_calculate_rewards"),
    Trainer: ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "_run_epoch"),
}

# These are not attributes of a class, so `check_trl` cannot check them:
# - Attributes of an instance: `_is_vlm`, `_metrics`, `_step`, `_buffered_inputs`, `_last_world_entropy` and
#   `_entropy_window_stats` of TRL's trainers, `_tr_loss` and `_globalstep_last_logged` of the Trainer, `_is_overflow`
#   of accelerate's optimizer, `_tokenizer` and `_last_loaded_step` of TRL's trainers.
# - Attributes of `VLLMGeneration`: `generate`, `generation_kwargs`, `llm`, `logprobs`, `mode`, `vllm_client`. The first
#   four results of `generate` are ids of prompts and completions, log-probabilities and their ids.
# - The first results of `_generate`: ids of prompts and completions and, in GRPO, tool mask, texts and
#   log-probabilities. The first results of the scoring pass: log-probabilities, entropies, MoE loss.
# - The head's contract: the scoring pass calls `model(**inputs, labels=labels, fused_lm_head=True)`, and reads
#   `log_probs`, `entropy` and `aux_loss` of the output.
# - Columns of a rollout batch: `completion_ids`, `completion_mask`, `tool_mask`, `advantages`, `num_items_in_batch`,
#   `old_per_token_logps`, `old_logps` (RLOO), `ref_per_token_logps`, `sampling_per_token_logps`,
#   `importance_sampling_ratio`.
# - Imports: `trl.trainer.utils.maybe_gather_lm_head_ctx`, `trl.generation.vllm_client.VLLMClient`,
#   `trl.cli.accelerate_config.resolve_accelerate_config_argument`, `trl.scripts.env.print_env`,
#   `transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func`. The asynchronous trainer imports
#   `trl.experimental.async_grpo.AsyncGRPOConfig`, `trl.experimental.async_grpo.AsyncGRPOTrainer` and
#   `trl.experimental.async_grpo.async_rollout_worker.AsyncRolloutWorker`.

# TRL 1.16 calls methods by names that transformers deprecates until 6.0. Users cannot act on this warning
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


def check_trl(trainer_class: type) -> None:
    """Raise an `ImportError` if a private method that `trainer_class` needs is missing. Warn about untested
    versions."""
    versions = {name: import_module(name).__version__ for name in TESTED}
    untested = [name for name in TESTED if not versions[name].startswith(f"{TESTED[name]}.")]
    found = ", ".join(f"{name} {versions[name]}" for name in untested or TESTED)
    install = "Install " + " ".join(f"'{name}=={TESTED[name]}.*'" for name in untested or TESTED)
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in PRIVATE.items()
        for name in names
        if issubclass(trainer_class, owner) and not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(f"troll_trl needs {', '.join(missing)}, which is not in {found}. {install}.")
    if untested:
        logger.warning(
            f"troll_trl was not tested with {found}. {install}, or run `troll check`, which compares the loss and the "
            "LM head with TRL's."
        )

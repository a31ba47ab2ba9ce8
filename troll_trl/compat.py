"""
The library versions that the package is tested with, and every private name in them that it uses, as data.

`PRIVATE` lists, for each of our classes, what it calls, overrides and reads in TRL, transformers and accelerate. A
trainer checks its entries twice: `check_class` at its start, and `check_instance` after TRL's constructor. This module
imports nothing of the package.

Only the order of results cannot be checked: `_generate` and `VLLMGeneration.generate` begin with the ids of prompts
and completions, and the scoring pass returns log-probabilities, entropies and the MoE loss. Of vLLM, `EnginePolicy`
reads `llm_engine.model_config.max_logprobs` at its start, and the lists of `FlatLogprobs` if an answer has them.
"""

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import MISSING, fields
from importlib import import_module
from pkgutil import resolve_name
from types import CodeType
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from transformers import TrainingArguments

logger = get_logger(__name__)

TESTED = {"trl": ["1.16"], "transformers": ["5.23", "5.24"], "accelerate": ["1.15"]}

# TRL 1.16 calls methods by names that transformers deprecates until 6.0. Users cannot act on this warning
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)


# -- Kinds of entries -------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A function or method that we call, with the names of its arguments."""

    path: str
    names: str = ""

    def missing(self, instance: Any) -> list[str]:
        return _refused(self.path, inspect.Signature.bind, self.names)


class Override(NamedTuple):
    """A method that we override or wrap, with the names of the arguments that we read. We pass on all others."""

    path: str
    names: str = ""

    def missing(self, instance: Any) -> list[str]:
        return _refused(self.path, inspect.Signature.bind_partial, self.names)


class Code(NamedTuple):
    """What the code of a method names: columns of a batch, keywords of a call, attributes of its results."""

    path: str
    names: str

    def missing(self, instance: Any) -> list[str]:
        function = inspect.unwrap(resolve_name(self.path))
        if function.__module__.partition(".")[0] not in TESTED:  # a user's patch, not another version
            logger.warning_once(
                f"{function.__module__} has replaced {self.path}, so troll_trl cannot check that it still uses "
                f"{', '.join(self.names.split())}. If the new function calls the old one, apply `functools.wraps`."
            )
            return []
        found = _names_in(function.__code__)
        return [f"`{name}` in {self.path}" for name in self.names.split() if name not in found]


class Attributes(NamedTuple):
    """Attributes that an instance has after TRL's constructor."""

    names: str

    def missing(self, instance: Any) -> list[str]:
        if instance is None:
            return []
        return [f"{type(instance).__name__}.{name}" for name in self.names.split() if not hasattr(instance, name)]


Entry = Call | Override | Code | Attributes


def _refused(path: str, bind: Any, names: str) -> list[str]:
    """Describe why the function at `path` does not take arguments with these `names`, in a list that is empty if it
    does."""
    signature = inspect.signature(resolve_name(path))
    arguments = [*names.split(), *({"self"} & signature.parameters.keys())]
    try:
        bind(signature, **dict.fromkeys(arguments))
    except TypeError as error:
        return [f"{path} ({error})"]
    return []


def _names_in(code: CodeType) -> set[str]:
    """Return all attributes, strings and keywords in `code`. The keywords of a call are a tuple."""
    constants = (x for constant in code.co_consts for x in (constant if isinstance(constant, tuple) else [constant]))
    return {*code.co_names, *(x for x in constants if isinstance(x, str))}


# -- The entries ------------------------------------------------------------------------------------------------------

_COLUMNS = "completion_ids completion_mask advantages"  # of a rollout batch
_GRPO_COLUMNS = f"{_COLUMNS} tool_mask num_items_in_batch old_per_token_logps ref_per_token_logps"
_GRPO_COLUMNS += " sampling_per_token_logps"


def _of_both(trainer: str, columns: str, in_loss: str = "") -> tuple[Entry, ...]:
    """What we use of either trainer. `columns` are those that its rollout writes, and its loss reads. `in_loss` are
    further names in its loss."""
    return (
        Override(f"{trainer}._generate"),
        Override(f"{trainer}._generate_and_score_completions"),
        Override(f"{trainer}._get_per_token_logps_and_entropies", "model input_ids attention_mask logits_to_keep"),
        Call(f"{trainer}._compute_loss", "model inputs"),
        Override(f"{trainer}._calculate_rewards"),
        Code(f"{trainer}.__init__", "vllm_generation generation_config _last_loaded_step"),
        Code(f"{trainer}._generate_and_score_completions", columns),
        Code(f"{trainer}._compute_loss", f"{columns} epsilon_low epsilon_high {in_loss}"),  # we set the clip range
        # The contract of the LM head
        Code(f"{trainer}._get_per_token_logps_and_entropies", "labels fused_lm_head log_probs entropy aux_loss"),
    )


_ASYNC = "trl.experimental.async_grpo"
# The keys are names of our classes, and of two parts of the command line
PRIVATE: dict[str, tuple[Entry, ...]] = {
    "TrollTrainer": (
        Call("trl.trainer.utils.maybe_gather_lm_head_ctx"),  # of the head, as the next one
        Call(
            "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func",
            "gate_logits num_experts top_k attention_mask",
        ),
        Attributes("_is_vlm _metrics _step epsilon_low epsilon_high num_iterations use_vllm"),
        Override("transformers.Trainer.create_accelerator_and_postprocess"),
        Override("trl.generation.vllm_client.VLLMClient", "connection_timeout"),
        Call("trl.generation.vllm_client.VLLMClient.get_server_info"),
        Code("trl.trainer.base_trainer._BaseTrainer.create_model_card", "_name _paper _tag_names"),
    ),
    "TrustRegionGRPO": (
        *_of_both("trl.GRPOTrainer", _GRPO_COLUMNS, "get_off_policy_mask"),
        Override("trl.GRPOTrainer.get_off_policy_mask", "per_token_logps advantages sampling_per_token_logps"),
        Code("trl.GRPOTrainer.__init__", "rollout_func"),
        Attributes("importance_sampling_level vllm_importance_sampling_correction"),
    ),
    "TrustRegionRLOO": _of_both("trl.RLOOTrainer", f"{_COLUMNS} old_logps"),
    "EnginePolicy": (
        Override("trl.generation.vllm_generation.VLLMGeneration.generate"),
        Code("trl.generation.vllm_generation.VLLMGeneration.__init__", "mode logprobs generation_kwargs"),
        Code("trl.generation.vllm_generation.VLLMGeneration._init_vllm", "llm vllm_client"),
    ),
    "MendedTRL": (Attributes("_tokenizer num_generations num_generations_eval reward_weights is_fsdp_enabled"),),
    "GuardedTrainer": (
        Attributes("reward_funcs reward_func_names"),
        Code("accelerate.optimizer.AcceleratedOptimizer.step", "_is_overflow scaler"),
    ),
    "TrollGRPOTrainer": (Attributes("entropy_coef _last_world_entropy _entropy_window_stats"),),  # for the guard
    "CheckpointedTrainer": (
        Override("transformers.Trainer._save_checkpoint", "model trial"),
        Call("transformers.Trainer._get_output_dir", "trial"),
        Call("transformers.Trainer._push_from_checkpoint", "checkpoint_folder"),
        Override(
            "transformers.Trainer._run_epoch",
            "train_dataloader epoch steps_in_epoch epochs_trained steps_trained_in_current_epoch "
            "resume_from_checkpoint",
        ),
        Code("transformers.Trainer._run_epoch", "_tr_loss _globalstep_last_logged"),
        Call(
            "transformers.trainer_utils.rotate_checkpoints",
            "output_dir save_total_limit best_model_checkpoint use_mtime",
        ),
        Override("transformers.trainer_jit_checkpoint.JITCheckpointCallback"),
        Attributes("_step _buffered_inputs _metrics is_deepspeed_enabled"),
    ),
    "AsyncTrollGRPOTrainer": (
        Override(f"{_ASYNC}.AsyncGRPOTrainer.compute_loss", "model inputs return_outputs num_items_in_batch"),
        Code(
            f"{_ASYNC}.AsyncGRPOTrainer.compute_loss",
            "token_index old_log_probs advantages global_n_tokens fused_lm_head log_probs entropy epsilon_low "
            "epsilon_high current_gradient_accumulation_steps",
        ),
        Override("transformers.Trainer.create_accelerator_and_postprocess"),
        Override(f"{_ASYNC}.async_grpo_config.AsyncGRPOConfig", "min_p"),
        Override(f"{_ASYNC}.async_rollout_worker.AsyncRolloutWorker"),
        Call(f"{_ASYNC}.vllm_client.VLLMClient.wait_for_server_ready"),
        Call(f"{_ASYNC}.vllm_client.VLLMClient.get_server_info"),
        Attributes("_metrics epsilon_low epsilon_high rollout_worker vllm_client"),
    ),
    "check": (Call("trl.scripts.env.print_env"),),
    "launch": (Call("trl.cli.accelerate_config.resolve_accelerate_config_argument", "launch_args"),),
}

# The options that TRL's configs add to transformers'
_OF_BOTH_CONFIGS = """
beta cache_implementation chat_template_kwargs disable_dropout ds3_gather_for_generation epsilon epsilon_high
generation_batch_size generation_kwargs log_completions log_multimodal log_unique_prompts mask_truncated_completions
max_completion_length min_p model_init_kwargs num_completions_to_print num_generations num_generations_eval
num_iterations pad_to_multiple_of ref_model_mixup_alpha ref_model_sync_steps repetition_penalty reward_weights
router_aux_loss_coef shuffle_dataset steps_per_generation sync_ref_model temperature top_k top_p
transformers_continuous_batching_config trust_remote_code use_transformers_continuous_batching use_transformers_paged
use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode
vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_structured_outputs_regex vllm_tensor_parallel_size
"""
_OF_GRPO = """
cast_lm_head_to_fp32 delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
importance_sampling_level log_completions_hub_repo loss_type max_tool_calling_iterations multi_objective_aggregation
off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos scale_rewards top_entropy_quantile
use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode
"""
KNOWN_OPTIONS = {
    "GRPOConfig": {*_OF_BOTH_CONFIGS.split(), *_OF_GRPO.split()},
    "RLOOConfig": {*_OF_BOTH_CONFIGS.split(), "normalize_advantages", "reward_clip_range"},
}


# -- The checks -------------------------------------------------------------------------------------------------------


def untested(*names: str) -> dict[str, str]:
    """Return the installed versions, by name, of the given libraries, if they were not tested."""
    versions = {name: import_module(name).__version__ for name in names}
    is_tested = lambda name, version: any(version.startswith(f"{tested}.") for tested in TESTED[name])
    return {name: version for name, version in versions.items() if not is_tested(name, version)}


def install(*names: str) -> str:
    """Return a sentence that tells how to install the newest tested versions of these libraries."""
    return "Install " + " ".join(f"'{name}=={TESTED[name][-1]}.*'" for name in names)


def refuse_missing(classes: Iterable[str], instance: Any = None) -> None:
    """Raise an `ImportError` that names what the entries of these `classes`, keys of `PRIVATE`, do not find."""
    missing: list[str] = []
    for entry in [entry for name in classes for entry in PRIVATE.get(name, ())]:
        try:
            missing += entry.missing(instance)
        except (AttributeError, ImportError) as error:
            missing.append(f"{entry[0]} ({error})")
    if missing:
        versions = untested(*TESTED) or {name: import_module(name).__version__ for name in TESTED}
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        names = ", ".join(dict.fromkeys(missing))  # two classes may need one attribute
        raise ImportError(f"troll_trl needs {names}, which is not in {found}. {install(*versions)}.")


def check_class(trainer_class: type) -> None:
    """Raise an `ImportError` if TRL, transformers or accelerate lack what `trainer_class` uses. Warn about untested
    versions."""
    refuse_missing([cls.__name__ for cls in trainer_class.__mro__])
    if versions := untested(*TESTED):
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        logger.warning(
            f"troll_trl was not tested with {found}. {install(*versions)}, or run `troll check`, which compares the "
            "loss and the LM head with TRL's."
        )


def check_instance(trainer: Any) -> None:
    """Raise an `ImportError` if TRL's constructor has not set an attribute that the `trainer` uses. Warn about options
    that are set and that the tested TRL does not have."""
    refuse_missing([cls.__name__ for cls in type(trainer).__mro__], trainer)
    if new := new_options(trainer.args):
        logger.warning(
            f"troll_trl does not know these options of TRL: {', '.join(new)}. If they change the loss, they act on the "
            f"bounded policy and on advantages that include the regression. Leave them out. {install('trl')}."
        )


def new_options(args: Any) -> list[str]:
    """List the options of TRL's config, with their values, that `KNOWN_OPTIONS` lacks and that differ from their
    defaults."""
    inherited = {field.name for field in fields(TrainingArguments)}
    default = lambda field: field.default if field.default_factory is MISSING else field.default_factory()
    return [
        f"{field.name}={value!r}"
        for config in type(args).__mro__
        if config.__name__ in KNOWN_OPTIONS
        for field in fields(config)
        if field.name not in KNOWN_OPTIONS[config.__name__] | inherited
        and (value := getattr(args, field.name)) != default(field)
    ]

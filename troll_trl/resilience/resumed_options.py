"""What a resumed run is told about options that differ from its checkpoint's."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers.trainer_utils import has_length

logger = get_logger(__name__)

OPTIONS = "options.json"  # a file of each checkpoint

# Options on which an unfinished rollout batch depends: they cut it into updates, or its numbers come from them
BATCH_OPTIONS = (
    *("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "temperature", "cast_lm_head_to_fp32", "bf16", "fp16", "use_vllm", "old_policy"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"),
    *("vllm_importance_sampling_clip_min", "trust_region", "divergence_type", "support_size", "tail_mass"),
    "reference model",
)
# What follows if these options differ from the checkpoint's
_CONSEQUENCES = {
    "An unfinished rollout batch cannot be continued with them.": BATCH_OPTIONS,
    "The checkpoint's values act: the optimizer's state has them. To train with the new ones, start a new run from the "
    "checkpoint's weights.": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "The new schedule acts from the checkpoint's step on, with the checkpoint's learning rate.": (
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    ),
    "The run takes up the data at another position or in another order: other prompts follow.": (
        *("seed", "data_seed", "shuffle_dataset", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("steps_per_generation", "num_generations", "num_iterations", "training rows", "processes"),
    ),
    "TRL loads the reference model from the new one, so `beta` holds the policy near other weights.": ("model",),
}
# Options that say where and how a run is logged, evaluated, saved or distributed. Any other is named.
_SILENT = (
    *("output_dir", "log", "report_to", "run_name", "project", "trackio", "disable_tqdm", "num_completions_to_print"),
    *("eval", "per_device_eval", "num_generations_eval", "prediction_", "include_", "batch_eval", "do_", "debug"),
    *("save_", "push_", "hub_", "resume_", "load_best", "metric_for_best", "greater_is", "enable_jit", "max_skipped"),
    *("dataloader_", "ddp_", "fsdp", "deepspeed", "local_rank", "use_cpu", "skip_memory", "generation_batch_size"),
    *("vllm_server", "vllm_group_port", "vllm_gpu", "torch_empty_cache", "ignore_data_skip", "restore_callback"),
)


def options_of(trainer: Any) -> dict[str, Any]:
    """Collect what a resumed run is compared with, as JSON holds it: the config's fields, without tokens, and what else
    decides the course of a run."""
    args, model, dataset = trainer.args, trainer.model, trainer.train_dataset
    options = {f.name: getattr(args, f.name) for f in fields(args) if f.init and not f.name.endswith("_token")}
    options |= {"model": model.config.name_or_path, "reference model": getattr(args, "beta", 0.0) != 0.0}
    options |= {"processes": args.world_size, "training rows": len(dataset) if has_length(dataset) else None}
    if is_peft_model(model):
        adapter = model.peft_config[model.active_adapter].to_dict()
        options |= {f"peft_config.{name}": value for name, value in adapter.items()}
    text = lambda value: sorted(value) if isinstance(value, set) else type(value).__name__
    return json.loads(json.dumps(options, default=text))


def compare_options(now: dict[str, Any], checkpoint: Path) -> dict[str, str]:
    """Warn of the options that differ from those that a `checkpoint` was made with, and return them by name, with both
    values."""
    file, model = checkpoint / OPTIONS, Path(now["model"])
    then = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else dict(now)
    if model.is_dir() and model.samefile(checkpoint) and then["model"] == now["model"]:
        then["model"] = "another"
    pairs = {name: (then.get(name, value), value) for name, value in now.items()}
    changed = {name: f"{name} ({before}, now {value})" for name, (before, value) in pairs.items() if before != value}
    if not now["reference model"]:
        changed.pop("model", None)
    others = set(changed)
    for consequence, names in _CONSEQUENCES.items():
        others -= {*names}
        if shown := [changed[name] for name in names if name in changed]:
            logger.warning(f"Resuming with other options: {', '.join(shown)}. {consequence}")
    if shown := [changed[name] for name in sorted(others) if not name.startswith(_SILENT)]:
        logger.warning(f"Resuming with other options: {', '.join(shown)}. They act from here on.")
    return changed


def check_adapter(model: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint that lacks weights of the model's adapter: PEFT would leave them at their start."""
    if not is_peft_model(model):
        return
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    name = model.active_adapter
    files = [folder / "adapter_model.safetensors" for folder in (checkpoint, checkpoint / name)]
    if (file := next((file for file in files if file.is_file()), None)) is None:
        return
    with safe_open(file, "pt") as saved:
        missing = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).keys() - saved.keys()
    if missing:
        raise ValueError(
            f"The adapter in {checkpoint} lacks {len(missing)} weights of this run's, such as {min(missing)}. Give the "
            "trainer the `peft_config` with which the checkpoint was made."
        )

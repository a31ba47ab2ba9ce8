"""What a resumed run compares with its checkpoint: options, weights and optimizer."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from safetensors import safe_open
from transformers.trainer_utils import has_length

logger = get_logger(__name__)

OPTIONS = "options.json"  # a file of each checkpoint

# Options on which an unfinished rollout batch depends: they split it into updates, or determine its numbers
BATCH_OPTIONS = (
    "steps_per_generation",
    "num_iterations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "temperature",
    "cast_lm_head_to_fp32",
    "bf16",
    "fp16",
    "use_vllm",
    "old_policy",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "trust_region",
    "divergence_type",
    "support_size",
    "tail_mass",
    "reference model",
)


def options_of(trainer: Any) -> dict[str, Any]:
    """Collect what a resumed run is compared with, as JSON values: the config's fields, without tokens, and what else
    determines the course of a run."""
    args = trainer.args
    model = trainer.model
    dataset = trainer.train_dataset
    options = {f.name: getattr(args, f.name) for f in fields(args) if f.init and not f.name.endswith("_token")}
    options |= {"model": model.config.name_or_path, "reference model": getattr(args, "beta", 0.0) != 0.0}
    options |= {"processes": args.world_size, "training rows": len(dataset) if has_length(dataset) else None}
    if is_peft_model(model):
        adapter = model.peft_config[model.active_adapter].to_dict()
        options |= {f"peft_config.{name}": value for name, value in adapter.items()}
    text = lambda value: sorted(value) if isinstance(value, set) else type(value).__name__
    return json.loads(json.dumps(options, default=text))


def compare_options(now: dict[str, Any], checkpoint: Path) -> dict[str, str]:
    """Warn about options that differ from the options of a `checkpoint`, and return these by name, with both
    values."""
    file = checkpoint / OPTIONS
    model = Path(now["model"])
    then = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else dict(now)
    if model.is_dir() and model.samefile(checkpoint) and then["model"] == now["model"]:
        then["model"] = "another"
    pairs = {name: (then.get(name, value), value) for name, value in now.items()}
    changed = {name: f"{name} ({before}, now {value})" for name, (before, value) in pairs.items() if before != value}
    changed.pop("resume_from_checkpoint", None)
    if not now["reference model"]:
        changed.pop("model", None)
    if changed:
        logger.warning(
            f"Resuming with other options: {', '.join(changed.values())}. The checkpoint's learning rate, weight "
            "decay, betas and epsilon stay. The others apply from here on: docs/reliability.md names the consequences."
        )
    return changed


def check_weights(model: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint of another model or adapter. PEFT would leave missing weights at their initial values, and
    the Trainer would fail while it loads the checkpoint."""
    if not is_peft_model(model):
        if any(checkpoint.glob("**/adapter_model.safetensors")):
            raise ValueError(f"{checkpoint} has an adapter, but this run trains without one. Set `use_peft`.")
        _check_depth(model.config.get_text_config(), checkpoint)
        _check_shapes(model.state_dict(), _shapes([*checkpoint.glob("model*.safetensors")]), checkpoint)
        return
    from peft import get_peft_model_state_dict

    name = model.active_adapter
    saved = _shapes([folder / "adapter_model.safetensors" for folder in (checkpoint, checkpoint / name)])
    if not saved and any(checkpoint.glob("model*.safetensors")):
        raise ValueError(f"{checkpoint} has a whole model, but this run trains an adapter. Leave out `use_peft`.")
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if saved and (missing := own.keys() - saved.keys()):
        raise ValueError(
            f"The adapter in {checkpoint} lacks {len(missing)} weights of this run's adapter, such as {min(missing)}. "
            "Give the trainer the `peft_config` with which the checkpoint was made."
        )
    _check_shapes(own, saved, checkpoint)


def _check_depth(config: Any, checkpoint: Path) -> None:
    if not (file := checkpoint / "config.json").is_file():
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    then, now = (saved.get("text_config") or saved).get("num_hidden_layers"), getattr(config, "num_hidden_layers", None)
    if then is not None and then != now:
        raise ValueError(
            f"{checkpoint} belongs to another model: it has {then} layers, but this run's model has {now}. Use the "
            "model with which the checkpoint was made."
        )


def _shapes(files: list[Path]) -> dict[str, list[int]]:
    """Read the shapes of the weights in all `files` that exist."""
    shapes: dict[str, list[int]] = {}
    for file in files:
        if file.is_file():
            with safe_open(file, "pt") as weights:
                shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    return shapes


def _check_shapes(own: dict[str, Any], saved: dict[str, list[int]], checkpoint: Path) -> None:
    # With DeepSpeed's ZeRO-3, the weights are empty here
    pairs = {name: (shape, [*own[name].shape]) for name, shape in saved.items() if name in own and own[name].numel()}
    for name, (then, now) in pairs.items():
        if then != now:
            raise ValueError(
                f"{checkpoint} belongs to another model or adapter: its {name} is {then}, but this run's is {now}. Use "
                "the model and the adapter's settings with which the checkpoint was made."
            )


def warn_of_a_fresh_optimizer(trainer: Any, checkpoint: Path) -> None:
    """Warn if a `checkpoint` has no optimizer: the `trainer` would silently start with a new one."""
    if trainer.is_deepspeed_enabled:  # its files have other names, and it fails without them
        return
    if not (any(checkpoint.glob("optimizer*")) and (checkpoint / "scheduler.pt").is_file()):
        logger.warning(
            f"{checkpoint} lacks optimizer or schedule, as with `save_only_model`: moments and warm-up start anew."
        )

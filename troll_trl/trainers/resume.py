"""What a checkpoint holds of a trainer next to TRL's own files, and how a resumed run continues with it."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from troll_trl.resilience import rollout_state

logger = get_logger(__name__)

# What a saved rollout batch must agree with: its cut into updates, and what its log-probabilities were computed by.
# RLOO has not all of them.
_LAYOUT = (
    *("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "temperature", "cast_lm_head_to_fp32", "bf16", "fp16", "use_vllm"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)


def save_state(trainer: Any, folder: str) -> None:
    """Write the state of this rank into a checkpoint: counters and, between the updates of a rollout batch, the
    batch."""
    unfinished = _is_unfinished(trainer)
    info = {
        "step": trainer._step,
        "unfinished": unfinished,
        "layout": _layout(trainer),
        "trust_region": trainer._trust_region_options(),
        "support": trainer.trust_region.needs_support,
        "loss": trainer._tr_loss.item(),
        "metrics": dict(trainer._metrics["train"]),
        "last_logged": trainer._globalstep_last_logged,
        "counters": {name: counter.state_dict() for name, counter in trainer._counters().items()},
    }
    batches = trainer._buffered_inputs if unfinished and trainer.args.save_rollouts else None
    rollout_state.save(_file(trainer, folder), info, batches)


def load_state(trainer: Any, folder: str) -> None:
    """Continue from what [`save_state`] wrote, if every rank has such a file. Every rank must call this."""
    # A rank alone with its file would generate when others do not, or not when they do
    path = _file(trainer, folder)
    found = torch.tensor([path.is_file()], device=trainer.accelerator.device)
    if not trainer.accelerator.gather(found).all():
        others = ", ".join(sorted(file.name for file in Path(folder).glob("rollout-state-*")))
        seen = f" It has {others}." if others else ""
        _warn_of_a_fresh_batch(trainer, f"{path.name} is not in {folder} for every rank.{seen}")
        return
    if getattr(trainer.args, "sync_ref_model", False):
        logger.warning(
            "`sync_ref_model`: no checkpoint holds the reference model; it starts over as the initial model."
        )
    info, batches = rollout_state.load(path, trainer.accelerator.device)
    trainer._tr_loss.fill_(info["loss"])
    trainer._metrics["train"].update(info["metrics"])
    trainer._globalstep_last_logged = info["last_logged"]
    for name, counter in trainer._counters().items():
        counter.load_state_dict(info["counters"][name])
    then, now = info["trust_region"], trainer._trust_region_options()
    pairs = {name: (then.get(name, "unused"), now.get(name, "unused")) for name in then | now}
    if changed := [f"`{name}` {a} (now {b})" for name, (a, b) in pairs.items() if a != b]:
        logger.warning(f"The checkpoint was made with another trust region: {', '.join(changed)}.")
    if changed := [name for name, value in _layout(trainer).items() if info["layout"].get(name) != value]:
        _warn_of_a_fresh_batch(trainer, f"The checkpoint was made with another {', '.join(changed)}.")
    elif info["unfinished"] and batches is None:
        _warn_of_a_fresh_batch(trainer, "The checkpoint was made with `save_rollouts=False`.")
    elif info["unfinished"] and trainer.trust_region.needs_support and not info["support"]:
        _warn_of_a_fresh_batch(trainer, "The checkpoint keeps no support, which this trust region needs.")
    else:
        trainer._step, trainer._buffered_inputs = info["step"], batches


def _warn_of_a_fresh_batch(trainer: Any, reason: str) -> None:
    if _is_unfinished(trainer):
        reason += (
            " The unfinished rollout batch cannot be continued: a fresh one is generated for its prompts, and serves "
            "the updates that were left. The run will differ from one that was not interrupted."
        )
    logger.warning(reason)


def _is_unfinished(trainer: Any) -> bool:
    """Whether a rollout batch has served some of its updates."""
    return trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0


def _layout(trainer: Any) -> dict[str, Any]:
    layout = {name: getattr(trainer.args, name) for name in _LAYOUT if hasattr(trainer.args, name)}
    return layout | {"beta": trainer.beta != 0}  # without it there is no reference log-probability


def _file(trainer: Any, folder: str) -> Path:
    return Path(folder, rollout_state.file_name(trainer.args.process_index, trainer.args.world_size))

"""What a checkpoint holds of a trainer next to TRL's own files, and how a resumed run continues with it.

The file of every rank holds counters and, if the checkpoint was taken between the updates of a rollout batch, the batch
with its old policy. A token with k kept ones takes 8·k + 8 bytes of the old policy and, padding included, 24 to 32 of
ids, mask and log-probabilities.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import has_length

from troll_trl.trust_region.ragged import RaggedDistribution

logger = get_logger(__name__)

# A run continues a saved rollout batch only if these options are as they were, and those of the old policy's support.
# Some cut the batch into updates; on the others its log-probabilities depend. RLOO lacks some of them.
_LAYOUT = (
    *("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "temperature", "cast_lm_head_to_fp32", "bf16", "fp16", "use_vllm", "old_policy"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)


def save_state(trainer: Any, folder: Path) -> None:
    """Write the state of this rank into a checkpoint: counters and, between the updates of a rollout batch, the
    batch."""
    unfinished = _is_unfinished(trainer)
    info = {
        "step": trainer._step,
        "unfinished": unfinished,
        "trust_region": _trust_region(trainer),
        "layout": _layout(trainer),
        "loss": trainer._tr_loss.item(),
        "metrics": dict(trainer._metrics["train"]),
        "last_logged": trainer._globalstep_last_logged,
        "counters": {name: counter.state_dict() for name, counter in trainer._counters().items()},
    }
    batches = None
    if unfinished and trainer.args.save_rollouts:
        batches = [{name: _plain(value) for name, value in batch.items()} for batch in trainer._buffered_inputs]
    # JSON, since a safe load refuses the numbers of other libraries
    torch.save({"info": json.dumps(info), "batches": batches}, _file(trainer, folder))


def load_state(trainer: Any, folder: str) -> None:
    """Continue from what [`save_state`] wrote, if every rank has such a file. Every rank must call this."""
    # A rank alone with its file would generate when others do not, or not when they do
    path, device = _file(trainer, folder), trainer.accelerator.device
    if not trainer.accelerator.gather(torch.tensor([path.is_file()], device=device)).all():
        _warn_of_a_fresh_batch(trainer, f"{path.name} is not in {folder} for every rank.")
        return
    with torch.serialization.safe_globals([RaggedDistribution]):
        state = torch.load(path, map_location="cpu", weights_only=True)
    info, batches = json.loads(state["info"]), state["batches"]
    trainer._tr_loss.fill_(info["loss"])
    trainer._metrics["train"].update(info["metrics"])
    trainer._globalstep_last_logged = info["last_logged"]
    for name, counter in trainer._counters().items():
        counter.load_state_dict(info["counters"][name])
    if changed := _changed(info["trust_region"], _trust_region(trainer)):
        logger.warning(f"The checkpoint was made with another trust region: {changed}.")
    if changed := _changed(info["layout"], _layout(trainer)):
        _warn_of_a_fresh_batch(trainer, f"The checkpoint was made with another {changed}.")
    elif info["unfinished"] and batches is None:
        _warn_of_a_fresh_batch(trainer, "The checkpoint was made with `save_rollouts=False`.")
    else:
        for batch in batches or ():
            for name, value in batch.items():
                if isinstance(value, RaggedDistribution):
                    batch[name] = value.to_host_of(device)
                elif isinstance(value, torch.Tensor):
                    batch[name] = value.to(device)
        trainer._step, trainer._buffered_inputs = info["step"], batches


def epochs_of_stream(trainer: Any, checkpoint: str) -> tuple[int, int] | None:
    """The epochs that a run had finished at a checkpoint, and the micro-batches of the next one. A stream has no
    length, so the Trainer counts all its epochs as the first. `None` if the Trainer counts right."""
    file = Path(checkpoint, TRAINER_STATE_NAME)
    if has_length(trainer.train_dataset) or trainer.args.ignore_data_skip or not file.is_file():
        return None
    state = TrainerState.load_from_json(str(file))  # it has the `max_steps` of that run
    epochs = int(state.epoch)  # a stream's epoch ends before `max_steps` updates, of which `state.epoch` is a share
    return epochs, round((state.epoch - epochs) * state.max_steps) * trainer.args.gradient_accumulation_steps


def _plain(value: Any) -> Any:
    """A column of a rollout batch as a safe load takes it. What a safe load would refuse fails here, and not at a
    resume."""
    if isinstance(value, (torch.Tensor, RaggedDistribution)):
        return value
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        error.add_note(
            "A column of the rollout batch cannot be saved with a checkpoint: it is neither a tensor nor JSON. Make it "
            "one, or set `save_rollouts=False`."
        )
        raise


def _warn_of_a_fresh_batch(trainer: Any, reason: str) -> None:
    if _is_unfinished(trainer):
        reason += (
            " The unfinished rollout batch cannot be continued: a fresh one is generated for its prompts, and serves "
            "the updates that were left. The run will differ from one that was not interrupted."
        )
    logger.warning(reason)


def _is_unfinished(trainer: Any) -> bool:
    """Whether a rollout batch has served some of its updates."""
    return trainer._step % (trainer.args.steps_per_generation * trainer.args.num_iterations) != 0


def _trust_region(trainer: Any) -> dict[str, Any]:
    return trainer.args.trust_region_options() | {"trust_region": trainer.trust_region.describe()}


def _layout(trainer: Any) -> dict[str, Any]:
    names = _LAYOUT + (("support_size", "tail_mass") if trainer.trust_region.needs_support else ())
    layout = {name: getattr(trainer.args, name) for name in names if hasattr(trainer.args, name)}
    return layout | {"beta": trainer.args.beta != 0}  # without it there is no reference log-probability


def _changed(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words, with its value now and then; empty if nothing does."""
    names = sorted(name for name in then | now if then.get(name) != now.get(name))
    return ", ".join(f"{name} ({then.get(name)}, now {now.get(name)})" for name in names)


def _file(trainer: Any, folder: str | Path) -> Path:
    return Path(folder, f"rollout-state-{trainer.args.process_index}-of-{trainer.args.world_size}.pt")

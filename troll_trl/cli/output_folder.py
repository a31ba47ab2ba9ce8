"""The folder of a training run: its checkpoints, and the settings it was trained with."""

import logging
from pathlib import Path
from typing import Any

import yaml
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from math_answers.whole_files import write_text
from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.fields import without_secrets
from troll_trl.resilience.checkpoint_folder import checkpoints
from troll_trl.trainers.troll_trainer import TrollTrainer

logger = logging.getLogger(__name__)

SETTINGS = "config.yaml"
_SECRET = ("env", "hub_token")  # they may hold secrets, and a push may upload the folder
# A checkpoint's optimizer has these, and a resumed run takes them from there
_OF_THE_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_NOT_OF_A_RUN = ("resume", "resume_from_checkpoint", "output_dir", *_SECRET)  # they say how and where it continues


def check_output_dir(script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig) -> None:
    """Before anything is loaded, refuse to resume without a checkpoint, to replace another run in the folder, and to
    resume what another trainer trained. Warn of changed settings."""
    own, checkpoint = Path(args.output_dir), args.resume_from_checkpoint
    saved = saved_checkpoints(own)
    if checkpoint and not (saved if checkpoint is True else Path(checkpoint).is_dir()):
        folder = own if checkpoint is True else checkpoint
        raise ValueError(f"`resume_from_checkpoint` is {checkpoint!r}, but there is no checkpoint in {folder}.")
    resumed = own if script_args.resume or checkpoint is True else None
    if isinstance(checkpoint, str):  # a checkpoint that is still in `_saving` is this folder's, too
        resumed = own if own.resolve() in Path(checkpoint).resolve().parents else Path(checkpoint).parent
    if resumed != own and saved:
        raise ValueError(
            f"`output_dir` {own} holds a run, up to {saved[-1].name}, which this one would replace. Continue it with "
            "`--resume`, name another folder, or remove this one."
        )
    if resumed is None or not (resumed / SETTINGS).is_file():
        return
    before = _read_settings(resumed / SETTINGS)
    for name in ("algorithm", "method"):
        then = before.get(name, getattr(TrollScriptArguments, name))  # a default is in no file
        if (now := getattr(script_args, name)) != then:
            raise ValueError(
                f"`{name}` is {now}, but the run in {resumed} was made with {then}. Name another `output_dir` to start "
                "a new run."
            )
    if (changed := _changed(before, script_args.settings)) and args.process_index == 0:
        shown = "; ".join(f"`{name}` {then!r} → {now!r}" for name, (then, now) in changed.items())
        logger.warning(
            f"The run in {resumed} continues with other settings: {shown}. If the data have changed, it continues at "
            "the same position in the new data."
        )
        if kept := [f"`{name}`" for name in _OF_THE_OPTIMIZER if name in changed]:
            logger.warning(
                f"The checkpoint's optimizer keeps its {', '.join(kept)}: the new value has no effect. To train with "
                "it, start a new run from the checkpoint's weights: --model_name_or_path CHECKPOINT --output_dir NEW"
            )


def _read_settings(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Collect the settings in which two runs differ, with the value before and now. `None` means that it is not set."""
    before, now = without_secrets(before), without_secrets(now)  # a file has no secrets
    both = {name: (before.get(name), now.get(name)) for name in {**before, **now} if name not in _NOT_OF_A_RUN}
    return {name: (then, now) for name, (then, now) in both.items() if then != now}


def saved_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the checkpoints in a folder, the newest last. A checkpoint without the file that the Trainer writes last is
    left out."""
    return [folder for folder in checkpoints(Path(output_dir)) if (folder / TRAINER_STATE_NAME).is_file()]


def find_checkpoint(trainer: GRPOTrainer | RLOOTrainer, resume: bool) -> str | None:
    """Return the checkpoint to resume from. With `resume`, it is the newest complete one, if there is one."""
    args = trainer.args
    if isinstance(trainer, TrollTrainer):
        return trainer.find_checkpoint("newest" if resume else args.resume_from_checkpoint)
    if resume or args.resume_from_checkpoint is True:  # TRL's own trainer would take the newest, whole or not
        saved = saved_checkpoints(args.output_dir)
        return str(saved[-1]) if saved else None
    return args.resume_from_checkpoint or None


def save_settings(settings: dict, output_dir: str, checkpoint: str | None = None) -> None:
    """Write the settings. If a run resumes from `checkpoint` with others, keep the earlier ones in another file."""
    shown = without_secrets({name: value for name, value in settings.items() if name not in _SECRET})
    text = "# All settings of the files and flags of this run, except `env`, tokens and passwords.\n"
    text += yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    file = Path(output_dir, SETTINGS)
    file.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint is not None and file.is_file() and _changed(_read_settings(file), settings):
        earlier = file.with_stem(f"{file.stem}-until-{Path(checkpoint).name}")
        if not earlier.exists():
            file.rename(earlier)
    write_text(file, text)


def name_local_model(output_dir: str, base_model: str) -> None:
    """Write paths into a model card where TRL writes `None`: it names models on the hub alone."""
    card = Path(output_dir, "README.md")
    text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{base_model}`")
    write_text(card, text.replace('model="None"', f'model="{output_dir}"'))

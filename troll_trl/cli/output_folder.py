"""The folder of a training run: its checkpoints, and the settings it was trained with."""

import logging
from pathlib import Path
from typing import Any

import yaml
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.resilience.checkpoint_folder import checkpoints
from troll_trl.trainers.troll_trainer import TrollTrainer

logger = logging.getLogger(__name__)

SETTINGS = "config.yaml"
_SECRET = ("env", "hub_token")  # may hold secrets, and the folder may be uploaded
_NOT_OF_A_RUN = ("resume", "resume_from_checkpoint", "output_dir", *_SECRET)  # where it is, and how it is gone on with


def check_checkpoint(resume: str | bool | None, output_dir: str):
    """Before the model is loaded: whether there is anything to resume from."""
    folder = output_dir if resume is True else resume
    if folder and not (Path(folder).is_dir() and (resume is not True or saved_checkpoints(folder))):
        raise ValueError(f"`resume_from_checkpoint` is {resume!r}, but there is no checkpoint in {folder}.")


def check_output_dir(script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig):
    """Before anything is loaded: refuse a folder that already contains a run, unless this run resumes it, and to resume
    what another trainer trained."""
    own, checkpoint = Path(args.output_dir), args.resume_from_checkpoint
    resumed = own if script_args.resume or checkpoint is True else None
    if isinstance(checkpoint, str):  # one that was not yet moved out of `_saving` is this folder's too
        resumed = own if own.resolve() in Path(checkpoint).resolve().parents else Path(checkpoint).parent
    if resumed != own and (saved := saved_checkpoints(args.output_dir)):
        raise ValueError(
            f"`output_dir` {args.output_dir} holds a run, up to {saved[-1].name}, which this one would "
            "replace. Go on with it by `--resume`, name another folder, or remove this one."
        )
    if resumed is None or not (settings_file := resumed / SETTINGS).is_file():
        return
    before = read_settings(settings_file)
    for name in ("algorithm", "method"):
        then = before.get(name, getattr(TrollScriptArguments, name))  # a default is in no file
        if (now := getattr(script_args, name)) != then:
            raise ValueError(
                f"`{name}` is {now}, but the run in {settings_file.parent} was made with {then}. Name another "
                "`output_dir`, in which the run starts anew."
            )
    if (changed := changed_settings(before, script_args.settings)) and args.process_index == 0:
        said = "; ".join(f"`{name}` {then!r} → {now!r}" for name, (then, now) in changed.items())
        logger.warning(
            f"The run in {settings_file.parent} goes on with other settings: {said}. Where the data have changed, its "
            "place in them is that of the old."
        )


def read_settings(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two runs were trained with that differs, by name: its value before and now, `None` where it is not set."""
    both = {name: (before.get(name), now.get(name)) for name in {**before, **now} if name not in _NOT_OF_A_RUN}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def saved_checkpoints(output_dir: str) -> list[Path]:
    """The checkpoints in a folder, the newest last, except those without the file that the Trainer writes last."""
    return [folder for folder in checkpoints(Path(output_dir)) if (folder / TRAINER_STATE_NAME).is_file()]


def find_checkpoint(trainer: GRPOTrainer | RLOOTrainer, resume: bool) -> str | None:
    """The checkpoint to resume from. With `resume`, the newest complete one, if any."""
    args = trainer.args
    if isinstance(trainer, TrollTrainer):
        return trainer.find_checkpoint("newest" if resume else args.resume_from_checkpoint)
    if resume or args.resume_from_checkpoint is True:  # TRL's own trainer takes the newest, whole or not
        saved = saved_checkpoints(args.output_dir)
        return str(saved[-1]) if saved else None
    return args.resume_from_checkpoint or None


def save_settings(settings: dict, output_dir: str, checkpoint: str | None = None):
    """Write the settings. If a run resumes from `checkpoint` with others, its earlier ones stay in a file of their
    own."""
    shown = {name: value for name, value in settings.items() if name not in _SECRET}
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    text = "# All settings of the files and flags of this run, but for `env` and `hub_token`.\n" + yaml.safe_dump(
        shown, sort_keys=False, allow_unicode=True
    )
    file = Path(output_dir, SETTINGS)
    if checkpoint is not None and file.is_file() and changed_settings(read_settings(file), settings):
        earlier = file.with_stem(f"{file.stem}-until-{Path(checkpoint).name}")
        if not earlier.exists():
            file.rename(earlier)
    file.write_text(text, encoding="utf-8")

"""The folder of a training run: its checkpoints, and the options it was trained with."""

from pathlib import Path
from typing import Any

import yaml
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from math_answers.whole_files import write_text
from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.resilience.checkpoints import checkpoints
from troll_trl.trainers.troll_trainer import TrollTrainer

OPTIONS = "config.yaml"


def check_output_dir(script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig) -> None:
    """Before anything is loaded, refuse to resume without a checkpoint, to replace another run in the folder, and to
    resume what another trainer trained."""
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
    if resumed is None or not (resumed / OPTIONS).is_file():
        return
    before = yaml.safe_load((resumed / OPTIONS).read_text(encoding="utf-8")) or {}
    for name in ("algorithm", "method"):
        then = before.get(name, getattr(TrollScriptArguments, name))  # a default is in no file
        if (now := getattr(script_args, name)) != then:
            raise ValueError(
                f"`{name}` is {now}, but the run in {resumed} was made with {then}. Name another `output_dir` to start "
                "a new run."
            )


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


def save_options(options: dict[str, Any], args: GRPOConfig | RLOOConfig) -> None:
    """Write the options that files and flags set. With this file as `--config`, the run can be repeated."""
    text = "# All options that files and flags set, except `env` and `hub_token`\n"
    text += yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    write_text(Path(args.output_dir, OPTIONS), text)

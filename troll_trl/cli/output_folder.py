"""The folder of a training run: its checkpoints, and the options it was trained with."""

from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer

from troll_trl.cli.arguments import TrollScriptArguments
from troll_trl.cli.command_line import read_config
from troll_trl.evaluation.whole_files import write_text
from troll_trl.resilience.checkpoint_folders import SAVING, checkpoints, why_incomplete, why_unreadable
from troll_trl.resilience.resumed_options import check_weights, warn_of_a_fresh_optimizer
from troll_trl.trainers.troll_trainer import TrollTrainer

OPTIONS = "config.yaml"
COMPLETIONS = "completions"  # TRL's tables, from the first log line on
# What a run leaves next to its checkpoints: its log and a model or an adapter at its end, and completions
_OF_A_RUN = (TRAINER_STATE_NAME, "config.json", "adapter_config.json", COMPLETIONS)


def check_output_dir(script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig, model_args: ModelConfig) -> None:
    """Before anything is loaded, refuse to write over what the run reads, to resume without a checkpoint, to replace
    another run in the folder, and to resume what another trainer trained."""
    if not args.output_dir:
        raise ValueError("`output_dir` is empty. Name a folder.")
    own, checkpoint = Path(args.output_dir), args.resume_from_checkpoint
    _check_sources(own, script_args, model_args)
    unnamed = [folder for folder in checkpoints(own / SAVING) if why_incomplete(folder) is None]
    saved = [*saved_checkpoints(own), *unnamed]
    if checkpoint and not (saved if checkpoint is True else Path(checkpoint).is_dir()):
        folder = own if checkpoint is True else checkpoint
        raise ValueError(f"`resume_from_checkpoint` is {checkpoint!r}, but there is no checkpoint in {folder}.")
    resumed = own if script_args.resume or checkpoint is True else None
    if isinstance(checkpoint, str):  # a checkpoint that is still in `_saving` is this folder's, too
        resumed = own if own.resolve() in Path(checkpoint).resolve().parents else Path(checkpoint).parent
    left = [name for name in _OF_A_RUN if (own / name).exists()]
    if resumed != own and (saved or left):
        raise ValueError(
            f"`output_dir` {own} holds a run ({saved[-1].name if saved else left[0]}), which this one would replace. "
            f"{'Continue it with `--resume`, name' if saved else 'Name'} another folder, or remove the old one."
        )
    if script_args.resume and not saved and {*left} - {COMPLETIONS}:
        raise ValueError(
            f"`output_dir` {own} holds a run that has ended ({left[0]}), and no checkpoint to resume from. Name "
            "another folder, or remove this one."
        )
    if resumed is not None and (resumed / OPTIONS).is_file():
        _check_trainer(resumed, script_args, args)


def _check_trainer(resumed: Path, script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig) -> None:
    """Refuse to resume a run in the folder `resumed` with another algorithm, method or optimizer."""
    before = read_config(resumed / OPTIONS)
    optimizer = str(getattr(args.optim, "value", args.optim))
    options = {"algorithm": script_args.algorithm, "method": script_args.method, "optim": optimizer}
    for name, now in options.items():
        kind = type(args) if name == "optim" else TrollScriptArguments
        then = before.get(name, getattr(kind, name))  # files omit defaults
        if now.removesuffix("_fused") != then.removesuffix("_fused"):  # these have the same state
            raise ValueError(
                f"`{name}` is {now}, but the run in {resumed} was made with {then}. Name another `output_dir` to start "
                "a new run."
            )


def _check_sources(own: Path, script_args: TrollScriptArguments, model_args: ModelConfig) -> None:
    """Refuse an output folder that is the folder of a model or of data."""
    sources = {"model_name_or_path": model_args.model_name_or_path}
    names = ("reward_model_name_or_path", "dataset_name", "eval_dataset_name")
    sources |= {name: getattr(script_args, name) for name in names}
    for option, source in sources.items():
        if source and own.is_dir() and (folder := Path(source).expanduser()).is_dir() and own.samefile(folder):
            raise ValueError(
                f"`output_dir` and `{option}` are the same folder, {source}, which the run would overwrite. Name "
                "another `output_dir`."
            )


def saved_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the checkpoints in a folder, the newest last. A checkpoint without the file that the Trainer writes last is
    left out."""
    return [folder for folder in checkpoints(Path(output_dir)) if (folder / TRAINER_STATE_NAME).is_file()]


def find_checkpoint(trainer: GRPOTrainer | RLOOTrainer, resume: bool) -> str | None:
    """Return the checkpoint to resume from. With `resume`, it is the newest complete one, if there is one. Refuse a
    checkpoint of another model or adapter."""
    args = trainer.args
    checkpoint = args.resume_from_checkpoint or None
    if isinstance(trainer, TrollTrainer):
        checkpoint = trainer.find_checkpoint("newest" if resume else checkpoint)
    elif resume or checkpoint is True:  # TRL's own trainer would take the newest, complete or not
        saved = saved_checkpoints(args.output_dir)
        checkpoint = next((str(folder) for folder in reversed(saved) if why_unreadable(folder) is None), None)
        if saved and checkpoint is None:
            raise ValueError(f"No checkpoint in {args.output_dir} can be read: {why_unreadable(saved[-1])}.")
    elif checkpoint and (reason := why_unreadable(Path(checkpoint))):
        raise ValueError(f"The checkpoint {checkpoint} is damaged: {reason}. Name another one.")
    if checkpoint:
        check_weights(trainer.model, Path(checkpoint))
        if not isinstance(trainer, TrollTrainer):  # a `TrollTrainer` warns itself
            warn_of_a_fresh_optimizer(trainer, Path(checkpoint))
    return checkpoint


class SaveOptions(TrainerCallback):
    """
    Writes the options that files and flags set, after the first update: a failed resume must not overwrite the run's
    own options. To repeat the run, pass this file as `--config`.
    """

    def __init__(self, options: dict[str, Any]):
        self.text = "# All options that files and flags set, except `env` and `hub_token`\n"
        self.text += yaml.safe_dump(options, sort_keys=False, allow_unicode=True)

    def on_step_end(self, args, state, control, **kwargs):
        if self.text and state.is_world_process_zero:
            write_text(Path(args.output_dir, OPTIONS), self.text)
        self.text = ""

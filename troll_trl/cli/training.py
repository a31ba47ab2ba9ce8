"""A training run from its settings to the saved model: rewards and data, the trainer, checkpoints, what is printed."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, ProgressCallback, Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import is_liger_kernel_available
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

from troll_trl import TrollGRPOTrainer, TrollRLOOTrainer
from troll_trl.cli.memory import PeakMemory
from troll_trl.cli.progress import ProgressLine
from troll_trl.cli.reward_functions import check_columns, load_reward_functions
from troll_trl.cli.settings.arguments import TrollScriptArguments
from troll_trl.cli.settings.command import Command, stop
from troll_trl.cli.settings.parser import parse_training_command
from troll_trl.cli.training_data import load_datasets
from troll_trl.resilience.checkpoint import CheckpointMixin
from troll_trl.resilience.checkpoint_folder import checkpoints
from troll_trl.trainers.sharding import ReshardInEvaluation
from troll_trl.trainers.trl_compat import silence_known_warnings

logger = logging.getLogger(__name__)

SETTINGS = "config.yaml"
_SECRET = ("env", "hub_token")  # may hold secrets, and the folder may be uploaded
_NOT_OF_A_RUN = ("resume", "resume_from_checkpoint", "output_dir", *_SECRET)  # where it is, and how it is gone on with
# Of each `algorithm` and `method`
TRAINERS = {
    ("grpo", "troll"): TrollGRPOTrainer,
    ("grpo", "clip"): GRPOTrainer,
    ("rloo", "troll"): TrollRLOOTrainer,
    ("rloo", "clip"): RLOOTrainer,
}


def check_model(name: str, revision: str | None, trust_remote_code: bool, key: str = "model_name_or_path"):
    """Before the data are loaded: whether there is a model. A folder that is missing would be looked for on the hub."""
    if Path(name).is_dir():
        return
    said = f"`{key}`: there is no folder {name} (working folder: {os.getcwd()})"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{said}.")
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{said}, and the hub gives no model of this name: {reason}") from None


def check_checkpoint(resume: str | bool | None, output_dir: str):
    """Before the model is loaded: whether there is anything to resume from."""
    folder = output_dir if resume is True else resume
    if folder and not (Path(folder).is_dir() and (resume is not True or saved_checkpoints(folder))):
        raise ValueError(f"`resume_from_checkpoint` is {resume!r}, but there is no checkpoint in {folder}.")


def check_output_dir(script_args: TrollScriptArguments, args: GRPOConfig | RLOOConfig):
    """Before anything is loaded: no run replaces the checkpoints of another, nor goes on with what it did not train."""
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
    """The checkpoints in a folder, the newest last, but for those without the file that the Trainer writes last."""
    return [folder for folder in checkpoints(Path(output_dir)) if (folder / TRAINER_STATE_NAME).is_file()]


def check_trainer_settings(args: GRPOConfig | RLOOConfig):
    """Before anything is loaded: what the Trainer fails on after that, of folders, packages and of the schedule."""
    if Path(args.output_dir).is_file():
        raise FileExistsError(f"`output_dir` is a file: {args.output_dir}. Name a folder, which need not exist.")
    if args.use_vllm and not is_vllm_available():
        completions = args.generation_batch_size // args.world_size
        raise ImportError(
            "`use_vllm` is true, but vLLM is not installed: pip install 'troll-trl[vllm]', without constraints.txt (it "
            f"has its own torch). With `use_vllm: false` a process generates {completions} completions at once, "
            "and holds keys and values of all: then lower `generation_batch_size` as well."
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("`use_liger_kernel` is true, but liger-kernel is missing: pip install it, or set false.")
    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except RuntimeError as error:
        raise ImportError(f"`report_to`: {error} Or leave it out.") from None
    with suppress(ValueError):  # of an optimizer that asks for the model
        Trainer.get_optimizer_cls_and_kwargs(args)
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 1, args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`lr_scheduler_type: {args.lr_scheduler_type.value}` does not go with `lr_scheduler_kwargs: "
            f"{args.lr_scheduler_kwargs}`: {error}."
        ) from None


def find_checkpoint(trainer: GRPOTrainer | RLOOTrainer, resume: bool) -> str | None:
    """The checkpoint to go on from. With `resume`, the newest complete one, if any."""
    args = trainer.args
    if isinstance(trainer, CheckpointMixin):
        return trainer.find_checkpoint("newest" if resume else args.resume_from_checkpoint)
    if resume or args.resume_from_checkpoint is True:  # TRL's own trainer takes the newest, whole or not
        saved = saved_checkpoints(args.output_dir)
        return str(saved[-1]) if saved else None
    return args.resume_from_checkpoint or None


def save_settings(settings: dict, output_dir: str, checkpoint: str | None = None):
    """With the `checkpoint` that a run goes on from, other settings that it had until there are kept beside."""
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


def make_trainer(
    script_args: TrollScriptArguments, training_args: GRPOConfig | RLOOConfig, model_args: ModelConfig
) -> GRPOTrainer | RLOOTrainer:
    check_model(model_args.model_name_or_path, model_args.model_revision, training_args.trust_remote_code)
    check_checkpoint(training_args.resume_from_checkpoint, training_args.output_dir)
    reward_funcs: list[Any] = [*load_reward_functions(script_args.reward_funcs)]
    if script_args.reward_model_name_or_path is not None:
        check_model(
            script_args.reward_model_name_or_path, None, training_args.trust_remote_code, "reward_model_name_or_path"
        )
        reward_funcs.insert(0, script_args.reward_model_name_or_path)
    train_dataset, eval_dataset = load_datasets(script_args, training_args, model_args)
    for data, dataset in (("the training data", train_dataset), ("the evaluation data", eval_dataset)):
        for function in reward_funcs:
            if callable(function) and dataset is not None and dataset.column_names:
                check_columns(function, dataset.column_names, data)
    prompts = training_args.generation_batch_size // training_args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:
        raise ValueError(
            f"The training data have {len(train_dataset)} prompts, and a rollout batch takes {prompts} "
            f"(`generation_batch_size` {training_args.generation_batch_size} over `num_generations` "
            f"{training_args.num_generations}): nothing would be trained. Give more data, or make the batch smaller."
        )
    # As in TRL's scripts/grpo.py
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return TRAINERS[script_args.algorithm, script_args.method](
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def run(command: Command) -> None:
    """Train as the command says, and save the model."""
    silence_known_warnings()
    script_args, training_args, model_args = parse_training_command(command)
    try:
        check_trainer_settings(training_args)
        check_output_dir(script_args, training_args)
        trainer = make_trainer(script_args, training_args, model_args)
        checkpoint = find_checkpoint(trainer, script_args.resume)
    except (ValueError, OSError, ImportError) as error:  # what a user can set right, without a traceback
        stop(command.program, error)
    if command.launcher and "TROLL_LAUNCHED" not in os.environ and training_args.process_index == 0:
        said = ", ".join(f"`{name}`" for name in command.launcher)
        logger.warning("%s unused: only the commands `troll grpo` and `troll rloo` start processes.", said)
    if training_args.process_index == 0:
        save_settings(script_args.settings, training_args.output_dir, checkpoint)
    trainer.add_callback(PeakMemory)
    trainer.add_callback(ReshardInEvaluation)
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressLine)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except (FloatingPointError, ConnectionError) as error:  # what was not finite, and where; or a vLLM server is lost
        stop(command.program, error, code=1)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    # Also where no checkpoint was saved, with which TRL writes it. A local file has no page to link to.
    dataset = None if Path(str(script_args.dataset_name)).exists() else script_args.dataset_name
    trainer.create_model_card(dataset_name=dataset)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    trainer.end()

"""
`troll grpo` and `troll rloo`: train a language model with TROLL, or with TRL's clip.

    troll grpo --config qwen3-0.6b/gsm8k --learning_rate 2e-6
    troll grpo --config qwen3-8b/dapo --accelerate_config fsdp2 --num_processes 8
    accelerate launch --num_processes 8 -m troll_trl.cli.train --config qwen3-0.6b/gsm8k --method clip --output_dir out

The first two start `accelerate launch`, as the `trl` command does. `--accelerate_config` and the options of
`accelerate launch` go to the launcher, all others to the run. A file may hold both.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from troll_trl.cli.settings.command import Command, read_training_command, show_warnings_plainly, stop
from troll_trl.cli.settings.layers import configs_folder
from troll_trl.cli.settings.names import find_package, is_flag, launcher_names, name_of

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Train, in this process. Ends with code 2 and one message for a mistake of the user; with code 1 if numbers were
    not finite, or a vLLM server was lost."""
    show_warnings_plainly()
    command = read_training_command(argv, program)
    _refuse_half_precision_without_a_gpu(command)
    # Here, because they load torch, transformers and TRL: seconds, after which a mistyped name would be refused
    from transformers import ProgressCallback

    from troll_trl.cli.make_trainer import make_trainer
    from troll_trl.cli.output_folder import check_output_dir, find_checkpoint, name_local_model, save_settings
    from troll_trl.cli.progress import PeakMemory, ProgressLine
    from troll_trl.cli.settings.parser import parse_training_command
    from troll_trl.trainers.sharding import ReshardInEvaluation

    script_args, training_args, model_args = parse_training_command(command)
    try:
        check_output_dir(script_args, training_args)
        trainer = make_trainer(script_args, training_args, model_args)
        checkpoint = find_checkpoint(trainer, script_args.resume)
    except (ValueError, OSError, ImportError) as error:  # a mistake of the user needs no traceback
        stop(command.program, error)
    if command.launcher and "TROLL_LAUNCHED" not in os.environ and training_args.process_index == 0:
        said = ", ".join(f"`{name}`" for name in command.launcher)
        logger.warning(f"The run ignores {said}: only `troll grpo` and `troll rloo` start processes.")
    if training_args.process_index == 0:
        save_settings(script_args.settings, training_args.output_dir, checkpoint)
    trainer.add_callback(PeakMemory)
    trainer.add_callback(ReshardInEvaluation)
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressLine)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except (FloatingPointError, ConnectionError) as error:
        stop(command.program, error, code=1)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    # TRL writes a card with a checkpoint, and there may be none. A local file has no page to link to.
    dataset = None if Path(str(script_args.dataset_name)).exists() else script_args.dataset_name
    trainer.create_model_card(Path(training_args.output_dir).resolve().name, dataset)
    if training_args.process_index == 0:
        name_local_model(training_args.output_dir, str(model_args.model_name_or_path))
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    trainer.end()


def _refuse_half_precision_without_a_gpu(command: Command) -> None:
    """As transformers does, of which the import alone takes many seconds, and with a cure for it."""
    no = ("no", "false", "f", "n", "0", "none")
    on = {name: str(command.last(name)).lower() not in no for name in ("use_cpu", "bf16", "fp16")}
    bf16 = on["bf16"] if command.last("bf16") is not None else not on["fp16"]  # TRL's default
    if on["use_cpu"] or not (bf16 or on["fp16"]):
        return
    import torch

    if not torch.accelerator.is_available() and find_spec("torch_xla") is None:
        stop(
            command.program,
            f"torch {torch.__version__} finds no GPU on this machine, and `{'bf16' if bf16 else 'fp16'}` needs one. To "
            "train on the CPU, which takes long for all but small models: --use_cpu true --bf16 false --fp16 false",
        )


# -- The launcher -----------------------------------------------------------------------------------------------------


def launch(argv: Sequence[str], program: str) -> None:
    """Train in as many processes as the launcher's flags say; `program` is `troll grpo` or `troll rloo`. Ends with
    code 2 and one message for a mistake of the user, else with the code of the run."""
    algorithm = program.split()[-1]
    names = launcher_names(algorithm)
    flags: dict[bool, list[str]] = {True: [], False: []}  # the launcher's, and the run's
    of_launcher = False
    for word in argv:
        if is_flag(word):
            of_launcher = name_of(word) in names
        flags[of_launcher].append(word)
    run_flags = ["--algorithm", algorithm, *flags[False]]
    # Reads the files and checks all names before any process starts
    command = read_training_command(run_flags, program, names)
    if (said := replace(command, flags=flags[False]).last("algorithm")) not in (None, algorithm):
        stop(program, f"`algorithm` is {said}, but this is `{program}`. Remove `algorithm`, or run the other command.")
    _refuse_half_precision_without_a_gpu(command)
    launcher_flags = [*(f"--{name}={value}" for name, value in command.launcher.items()), *flags[True]]
    if not launcher_flags and _one_process_is_enough():
        main(run_flags, program)
    else:
        _launch(_with_config_file(launcher_flags, program), run_flags, program)


def _one_process_is_enough() -> bool:
    """Whether `accelerate launch` without flags would start one process: then this process trains."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not Path(default_config_file).is_file()


def _with_config_file(flags: Sequence[str], program: str) -> list[str]:
    """The launcher's flags with its own `--config_file` in place of `--accelerate_config`, a path or a name."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False, add_help=False)
    parser.add_argument("--accelerate_config", "--accelerate-config", default=None)
    options, others = parser.parse_known_args(flags)
    if options.accelerate_config is None:
        return others
    name = options.accelerate_config
    folders = (configs_folder() / "accelerate", find_package("trl") / "accelerate_configs")
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            return ["--config_file", str(path), *others]
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    stop(program, f"--accelerate_config: {name!r} is neither a file nor one of {', '.join(names)}.")


def _launch(launcher_flags: list[str], run_flags: list[str], program: str) -> None:
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["TROLL_LAUNCHED"] = "1"  # the launcher's settings in the files have been read
    # After SIGTERM the launcher kills its processes when this time is over. The default of 30 seconds is too short for
    # a large model to finish its update and save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    parser, words = launch_command_parser(), []
    switches = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    for flag in launcher_flags:  # a switch takes no value, and a file has one
        name, _, value = flag.partition("=")
        if name in switches and (value := value.lower()) not in ("", "true", "false"):
            stop(program, f"`{name.lstrip('-')}` must be true or false, got {value!r}.")
        words += [flag] if name not in switches else [name] * (value != "false")
    options = parser.parse_args([*words, "-m", "troll_trl.cli.train", *run_flags])
    _warn_if_one_process_starts(options, program)
    try:
        launch_command(options)
    except CalledProcessError as error:  # the run has printed its error
        raise SystemExit(error.returncode) from None
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None
    except ValueError as error:  # flags that do not go together
        stop(program, error)


def _warn_if_one_process_starts(options: argparse.Namespace, program: str) -> None:
    """Unless its flags say how to start several, accelerate silently starts one process on fewer than two devices."""
    told_how = ("config_file", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "mpirun_hostfile")
    several = (options.num_processes or 1) > 1 and not any(vars(options).get(name) for name in told_how)
    if several and _one_process_is_enough():
        print(
            f"{program}: warning: `num_processes` is {options.num_processes}, but with fewer than two devices "
            "accelerate starts one process. `--multi_gpu` starts as many as you ask for, on CPUs too: "
            f"`{program} … --num_processes {options.num_processes} --multi_gpu`.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()

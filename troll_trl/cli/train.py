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
from pathlib import Path

from troll_trl.cli.settings.command import CommandParser, show_warnings_plainly, stop
from troll_trl.cli.settings.layers import configs_folder, read_command, read_mapping

logger = logging.getLogger(__name__)

_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "troll"  # to Python, any text switches the variable on


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Train, in this process. Ends with code 2 and one message for a mistake of the user; with code 1 if numbers were
    not finite, or a vLLM server was lost."""
    if os.environ.get(_SAFE_PATH) == _OURS:  # a program that a reward starts gets the path that it expects
        del os.environ[_SAFE_PATH]
    show_warnings_plainly()
    command = read_command(argv, program)
    # These load torch, transformers and TRL, which read the variables under the files' `env`
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
        said = ", ".join(f"`{flag[2:].partition('=')[0]}`" for flag in command.launcher)
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


# -- The launcher -----------------------------------------------------------------------------------------------------


def launch(argv: Sequence[str], program: str) -> None:
    """Train in as many processes as the launcher's flags say; `program` is `troll grpo` or `troll rloo`. Ends with
    code 2 and one message for a mistake of the user, else with the code of the run."""
    command, algorithm = read_command(argv, program), program.split()[-1]
    if (named := command.algorithm()) not in (None, algorithm):
        said = f"`algorithm` is {named}, but this is `{program}`."
        stop(program, f"{said} Remove `algorithm`, or run the other command.")
    from troll_trl.cli.settings.parser import training_settings  # it imports torch, as `main` does

    training_settings(command, algorithm, launches=True)  # refuses wrong names and values before any process starts
    run_flags = ["--algorithm", algorithm]
    for config in command.configs:
        run_flags += ["--config", config]
    run_flags += command.flags
    if not command.launcher and _one_process_is_enough():
        main(run_flags, program)
    else:
        _launch(command.launcher, run_flags, program)


def _one_process_is_enough() -> bool:
    """Return whether `accelerate launch` without flags would start one process. Then this process trains."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not Path(default_config_file).is_file()


def _launch(launcher_flags: list[str], run_flags: list[str], program: str) -> None:
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["TROLL_LAUNCHED"] = "1"  # the launcher's settings in the files have been read
    # Without it `python -m` looks for every module in the working directory first, and runs a file wandb.py there
    if Path(__file__).parents[2] != Path.cwd():  # a clone that is not installed is found there alone
        os.environ.setdefault(_SAFE_PATH, _OURS)
    # After SIGTERM the launcher kills its processes when this time is over. The default of 30 seconds is too short for
    # a large model to finish its update and save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    options = _launcher_options(launcher_flags, run_flags, program)
    _warn_if_one_process_starts(options, program)
    try:
        launch_command(options)
    except CalledProcessError as error:  # the run has printed its error
        raise SystemExit(error.returncode) from None
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None
    except ValueError as error:  # the flags do not go together
        stop(program, error)


def _launcher_options(launcher_flags: list[str], run_flags: list[str], program: str) -> argparse.Namespace:
    """Parse the launcher's flags as accelerate does. The file of TRL's `--accelerate_config` becomes `config_file`."""
    from accelerate.commands.launch import launch_command_parser

    parser = CommandParser(prog=program, parents=[launch_command_parser()], add_help=False)
    parser.add_argument("--accelerate_config", "--accelerate-config")
    switches = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    words = []
    for flag in launcher_flags:  # a switch takes no value, and a file has one
        name, _, value = flag.partition("=")
        if name not in switches:
            words.append(flag)
        elif (value := value.lower()) not in ("", "true", "false"):
            stop(program, f"`{name.lstrip('-')}` must be true or false, got {value!r}.")
        elif value != "false":
            words.append(name)
    options, _ = parser.parse_known_args([*words, "-m", "troll_trl.cli.train", *run_flags])
    if options.training_script != "troll_trl.cli.train":
        stop(program, f"unrecognized arguments: {options.training_script}")
    for name in ("num_processes", "num_machines"):
        if (number := getattr(options, name)) is not None and number < 1:  # accelerate would start one in silence
            stop(program, f"`{name}` must be at least 1, got {number}.")
    if options.config_file and options.accelerate_config:
        stop(program, "`config_file` and `accelerate_config` are both set. Give one of them.")
    for flag in ("config_file", "accelerate_config"):
        if name := getattr(options, flag):
            options.config_file = _accelerate_file(name, flag, program)
    return options


def _accelerate_file(name: str, flag: str, program: str) -> str:
    """Find the file for `accelerate launch` that `flag` names: by its path, or by the name of a file of ours, such as
    `fsdp2`, or of TRL's."""
    import trl

    folders = (configs_folder() / "accelerate", Path(str(trl.__file__)).parent / "accelerate_configs")
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            try:
                read_mapping(path)
            except ValueError as error:  # accelerate's answer to a file that is no YAML mapping is a traceback
                stop(program, f"--{flag}: {error}")
            return str(path)
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    stop(program, f"--{flag}: {name!r} is neither a file nor one of {', '.join(names)}.")


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
    if not sys.flags.safe_path:  # `-m` has put the working directory first
        sys.path.append(sys.path.pop(0))
    main()

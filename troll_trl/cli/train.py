"""
`troll grpo` and `troll rloo`: train a language model with TROLL, or with TRL's clip.

    troll grpo --config qwen3-0.6b/gsm8k --learning_rate 2e-6
    troll grpo --config qwen3-8b/dapo --accelerate_config fsdp2 --num_processes 8
    accelerate launch --num_processes 8 -m troll_trl.cli.train --config qwen3-0.6b/gsm8k --method clip --output_dir out

The first two commands start `accelerate launch`, as the `trl` command does, with the flags that only the launcher has.
All other flags, and all keys of a file, are options of the run.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from troll_trl.cli.command_line import CommandParser, configs_folder, name_of, read_command, stop


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> None:
    """Train in this process. Ends with code 2 and one message after a user's mistake, and with code 1 if numbers were
    not finite, a checkpoint could not be written, or a vLLM server was lost."""
    _train_or_stop(read_options(argv, program), program)


def read_options(argv: Sequence[str] | None, program: str) -> dict[str, Any]:
    """Return the options that the files and flags of a command line set. A mistake ends the process with code 2 and
    one message."""
    values, _, flags = read_command(argv, program)
    return _checked(values, flags, _algorithm(values, flags, program) or "grpo", program)


def _checked(values: Mapping[str, Any], flags: Sequence[str], algorithm: str, program: str) -> dict[str, Any]:
    from troll_trl.cli.arguments import training_options, training_parser  # torch reads variables under `env`

    return training_options(training_parser(algorithm, program), {**values, "algorithm": algorithm}, flags)


def train(values: Mapping[str, Any]) -> Any:
    """Train in this process with the options `values`, given as in a file. Returns the trainer."""
    with ExitStack() as run:
        return _finish(*_prepare(_checked(values, [], values.get("algorithm", "grpo"), "train"), run))


def _train_or_stop(options: dict[str, Any], program: str) -> None:
    from troll_trl.resilience.checkpoints import CheckpointError

    with ExitStack() as run:
        prepared = None
        try:
            prepared = _prepare(options, run)
            _finish(*prepared)
        except (FloatingPointError, ConnectionError, CheckpointError) as error:
            stop(program, error, code=2 if prepared is None else 1)
        except KeyboardInterrupt:
            stop(program, "interrupted. `--resume` continues from the newest checkpoint, if there is one.", code=130)
        except (ValueError, OSError, ImportError) as error:
            if prepared is None:  # a wrong option, or a file that is missing
                stop(program, error)
            raise


def _prepare(options: dict[str, Any], run: ExitStack) -> tuple[Any, Any, str | None]:
    """Lock the output folder until the end of the `run`, and make the trainer. Returns the trainer, the script's
    arguments and the checkpoint to resume from."""
    from transformers import ProgressCallback

    from troll_trl.cli.arguments import make_arguments
    from troll_trl.cli.folder_lock import locked
    from troll_trl.cli.make_trainer import make_trainer
    from troll_trl.cli.output_folder import SaveOptions, check_output_dir, find_checkpoint
    from troll_trl.cli.progress import ProgressLine

    script_args, training_args, model_args = make_arguments(options)
    if "kl_bound" in options and hasattr(training_args, "kl_bound"):
        options = {**options, "kl_bound": training_args.kl_bound}  # a number, also for 'auto'
    check_output_dir(script_args, training_args, model_args)
    if training_args.process_index == 0:
        run.enter_context(locked(Path(training_args.output_dir)))
        check_output_dir(script_args, training_args, model_args)  # again: a run may have ended in between
    trainer = make_trainer(script_args, training_args, model_args)
    checkpoint = find_checkpoint(trainer, script_args.resume)
    trainer.add_callback(SaveOptions(options))
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressLine)
    return trainer, script_args, checkpoint


def _finish(trainer: Any, script_args: Any, checkpoint: str | None) -> Any:
    """Train, and save the model with its card."""
    args = trainer.args
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_state()
    trainer.save_model(args.output_dir)
    # TRL writes a card with a checkpoint, and there may be none. A local file has no page to link to.
    dataset = None if Path(str(script_args.dataset_name)).exists() else script_args.dataset_name
    trainer.create_model_card(Path(args.output_dir).resolve().name, dataset)
    trainer.accelerator.print(f"Model saved to {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)
    trainer.end()
    return trainer


def _algorithm(values: Mapping[str, Any], flags: Sequence[str], program: str) -> Any:
    """Return the algorithm that a flag or a file names, or `None`. The set of options depends on it."""
    parser = CommandParser(prog=program, add_help=False)
    parser.add_argument("--algorithm", default=values.get("algorithm"))
    return parser.parse_known_args(flags)[0].algorithm


# -- The launcher -----------------------------------------------------------------------------------------------------


def launch(argv: Sequence[str], program: str) -> None:
    """Train in as many processes as the launcher's flags say; `program` is `troll grpo` or `troll rloo`. Ends with code
    2 and one message after a user's mistake, else with the code of the run."""
    values, configs, words = read_command(argv, program)
    algorithm = program.split()[-1]
    if (named := _algorithm(values, words, program)) not in (None, algorithm):
        stop(program, f"`algorithm` is {named}, but this is `{program}`.")
    from troll_trl.cli.arguments import launcher_parser, training_options, training_parser

    parser = training_parser(algorithm, program)
    taken: dict[str, list[str]] = {"run": [], "launcher": [], "token": []}
    taker = "run"
    for word in words:
        if word.startswith("--"):
            name = name_of(word)
            taker = "launcher" if name in parser.only_launcher else "token" if name == "hub_token" else "run"
        taken[taker].append(word)
    # A mistake is refused before any process starts
    options = training_options(parser, {**values, "algorithm": algorithm}, [*taken["run"], *taken["token"]])
    if not taken["launcher"] and _one_process_is_enough():
        _train_or_stop(options, program)
        return
    # Omit the token, which is in the environment: trackers record a process's flags
    run = [*(word for config in configs for word in ("--config", config)), *taken["run"]]
    _launch(launcher_parser(program), taken["launcher"], ["--algorithm", algorithm, *run], program)


def _one_process_is_enough() -> bool:
    """Return whether `accelerate launch` without flags would start one process. If so, this process trains: it starts
    in half the time, and receives SIGTERM itself."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not Path(default_config_file).is_file()


def _launch(parser: CommandParser, flags: list[str], run: list[str], program: str) -> None:
    """Start `accelerate launch` with its `flags`, and processes with the flags in `run`. Ends with the code of the
    run."""
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from troll_trl.compat import refuse_missing

    refuse_missing(["launch"])
    script = "troll_trl.cli.train"
    options = parser.parse_args([*flags, "--module", script])
    if options.training_script != script:
        stop(program, f"unrecognized arguments: {options.training_script}")
    options.training_script_args = run
    # The launcher kills its processes this many seconds after SIGTERM. The default of 30 is too short for a large model
    # to finish its update and save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    try:
        if name := options.accelerate_config:  # a file, the name of one of ours, or of TRL's
            ours = configs_folder() / "accelerate" / f"{name}.yaml"
            options.config_file = (
                str(ours) if ours.is_file() else resolve_accelerate_config_argument(["--accelerate_config", name])[1]
            )
        launch_command(options)
    except CalledProcessError as error:  # the run has printed its error
        raise SystemExit(error.returncode) from None
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None
    except SignalException as error:  # the processes have ended
        raise SystemExit(128 + error.sigval) from None
    except (ValueError, OSError) as error:  # flags that do not go together, or a file that is missing
        stop(program, error)


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # `-m` puts the working directory first, which may have a wandb.py
    main()

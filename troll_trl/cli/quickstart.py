"""Train a small Qwen3 model on sums, three times from equally many completions: twice with TRL, once with TROLL.

This runs on the CPU, without a model or dataset hub:

1. write sums such as "What is 37 + 48?" as JSON lines, and hold some of them out;
2. take the package's small Qwen3 model (0.5 MB), which solved over a third of the sums in its warm-up. `--warm_up`
   makes the model again, by supervised training on the other sums;
3. train it on 3,072 completions, in three runs at the same time:
   - with TRL's trainer, which uses each completion once by default: 24 updates of 128;
   - with TRL's trainer and its clip of 0.2, using each completion four times: 96 updates;
   - with TROLL, using each completion four times: `troll grpo --config quickstart --num_iterations 4`;
4. print the success on the held-out sums before and after, and draw the runs against the completions that they have
   generated, as `troll plot --x completions` does.
"""

import argparse
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from troll_trl.cli.command_line import CommandParser, configs_folder, read_config, stop
from troll_trl.cli.folder_lock import locked
from troll_trl.cli.plot import plot, read_log

if TYPE_CHECKING:
    import pandas as pd

CONFIG = configs_folder() / "quickstart.yaml"

# `--warm_up` made it with seed 0. On another machine, the weights would differ in their last digits
START = Path(__file__).with_name("quickstart_start")
HELD_OUT = 512  # the standard error of the success rate is then at most 2.2 points
# Updates that use each completion 4 times, 32 per rollout batch of 1,024: 3,072 completions
UPDATES = 96
_REUSE = ("--num_iterations", "4")
# By folder: the name of a run, its flags, and its learning rate, which falls linearly to 0. Each rate has the largest
# mean success on two other seeds of the training (11 and 12), after 3,072 completions, in percent:
#
#                          1e-4   2e-4   4e-4   8e-4   1.6e-3
#   TRL's default          48.9   49.1   47.8   47.8   27.8
#   TRL's clip, reuse             53.8   58.7   60.4   50.4
#   TROLL, reuse                  53.1   59.5   63.8   59.2
RUNS = {
    "run": ("TROLL, each completion used 4 times", _REUSE, 8e-4),
    "trl": ("TRL's default, each used once", ("--method", "clip", "--steps_per_generation", "1"), 2e-4),
    "trl-reuse": ("TRL's clip, each used 4 times", ("--method", "clip", *_REUSE), 8e-4),
}
START_SUCCESS = 0.35
REQUIRED_RISE = 0.05
WARM_UP = 0.16  # share of the updates: 4 of 24, 16 of 96
# A small model gains little from a second thread, and on a busy machine threads wait for each other
THREADS = 1


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Shuffle all sums of two numbers below 100. Returns the sums to train on, and `HELD_OUT` others."""
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def make_start(folder: Path, problems: list[dict[str, str]], seed: int, success: float) -> None:
    """Warm up a model until its success rate is `success`, and write the model and its tokenizer into `folder`."""
    import torch  # takes seconds, so flags are checked first

    from troll_trl import small_models

    print(f"Warm-up: supervised training of a small Qwen3 model, until it solves {success:.0%}")
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    tokenizer = small_models.make_tokenizer()
    model = small_models.make_model(tokenizer)
    small_models.warm_up(model, *small_models.encode(tokenizer, problems), success)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_trainings(output: Path, seed: int, updates: int | None) -> None:
    """Train the `RUNS` at the same time, each into its own folder. Only TROLL's lines are shown; the others' go to
    files. The runs of an earlier quickstart are replaced."""
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    others: dict[str, subprocess.Popen] = {}
    commands = {folder: _command(output, folder, seed, updates) for folder in RUNS}
    for folder in RUNS:
        _remove_own_run(output / folder, output / "start")
    try:
        for folder in ("trl", "trl-reuse"):
            with (output / f"{folder}.log").open("wb") as log:
                others[folder] = subprocess.Popen(commands[folder], env=environment, stdout=log, stderr=log)
        print("Training with TROLL:", shlex.join(commands["run"]))
        print(f"Training at the same time with TRL's trainer, which logs to {output}/trl*.log", flush=True)
        if subprocess.run(commands["run"], env=environment).returncode != 0:
            sys.exit("The training failed; its error is above.")
        for folder, other in others.items():
            if other.wait() != 0:
                sys.exit(f"The training with TRL's trainer failed; its error is in {output / folder}.log.")
    finally:
        for other in others.values():
            other.kill()
            other.wait()


def _command(output: Path, folder: str, seed: int, updates: int | None) -> list[str]:
    """The command of a run. All runs generate equally many completions."""
    _, flags, rate = RUNS[folder]
    total = updates or UPDATES
    if folder == "trl":  # a rollout batch of 1,024 completions serves 32 updates of the other runs, and 8 here
        total = 8 * math.ceil(total / 32)
    command = [sys.executable, "-m", "troll_trl.cli.train", "--config", str(CONFIG), "--seed", str(seed), *flags]
    command += ["--model_name_or_path", str(output / "start"), "--dataset_name", str(output / "data")]
    command += ["--learning_rate", str(rate), "--max_steps", str(total), "--warmup_steps", str(WARM_UP)]
    command += ["--eval_steps", str(total if updates else total // 4), "--output_dir", str(output / folder)]
    return command


def _remove_own_run(run: Path, start: Path) -> None:
    """Remove a run that a quickstart made from `start`. `troll grpo` refuses to replace any other."""
    config = run / "config.yaml"
    if config.is_file() and read_config(config).get("model_name_or_path") == str(start):
        with locked(run):
            shutil.rmtree(run)


def missed_goals(log: "pd.DataFrame", kl_bound: float) -> list[str]:
    """Name the goals that a training run with this log did not reach."""
    success = log["eval_reward"].dropna()
    goals = {
        f"the success rate rose by less than {100 * REQUIRED_RISE:.0f} points": (
            success.iloc[-1] - success.iloc[0] >= REQUIRED_RISE
        ),
        "no token was projected": log["troll/projected_fraction"].max() > 0,
        "the KL after the projection exceeds its bound": log["troll/kl_max"].max() <= kl_bound * 1.001,
    }
    return [missed for missed, reached in goals.items() if not reached]


def _train(output: Path, options: argparse.Namespace) -> None:
    """Write the problems and the initial model, and train."""
    from troll_trl.small_models import write_problems

    # The package's model was warmed up on the problems of seed 0 that are not held out
    train, test = make_problems(options.seed if options.warm_up else 0)
    write_problems(output / "data", train, test)
    if options.warm_up:
        make_start(output / "start", train, options.seed, START_SUCCESS)
    else:
        shutil.copytree(START, output / "start", dirs_exist_ok=True)
    run_trainings(output, options.seed, options.updates)


def main(argv: Sequence[str] | None = None, program: str = "quickstart.py") -> None:
    """Run the quickstart. Ends with code 1 if the training failed, or did not reach its goal. On Ctrl-C or SIGTERM,
    stops all runs and ends with code 130 or 143."""
    parser = CommandParser(prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--seed", type=int, default=0, help="seed of the training and, with --warm_up, of the problems (default 0)")
    flag("--output", type=Path, default="outputs/quickstart", help="folder to write to (default outputs/quickstart)")
    flag("--updates", type=int, help=f"number of updates (default {UPDATES}); if given, the result is not judged")
    flag("--warm_up", action="store_true", help="make the initial model, instead of using the package's")
    options = parser.parse_args(argv)
    if options.updates is not None and options.updates < 1:
        parser.error(f"--updates must be at least 1, got {options.updates}.")
    start_time = time.monotonic()
    output = options.output.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by default, the runs would continue
    try:
        with locked(output):
            _train(output, options)
    except (ValueError, OSError) as error:
        stop(program, error)
    except KeyboardInterrupt:
        stop(program, "interrupted.", code=130)
    for folder, (name, *_) in RUNS.items():
        success = read_log(output / folder)["eval_reward"].dropna()
        before, after = f"{success.iloc[0]:.1%}", f"{success.iloc[-1]:.1%}"
        print(f"{name:>35}: {before} of the held-out sums before the training, {after} after it")
    runs = [Path(os.path.relpath(output / folder)) for folder in RUNS]
    plot(runs, None, output / "curves.png", "completions")
    print(f"Model:  {output / 'run'}, after {time.monotonic() - start_time:.0f} s")
    # The model was trained only on sums, without an instruction to answer in a box
    evaluation = ["troll", "eval", "--model", str(output / "run"), "--benchmarks", f"sums={output / 'data'}"]
    evaluation += ["--instruction", "", "--max_new_tokens", "8", "--output", str(output / "evaluation")]
    print("Evaluate it greedily:", shlex.join(evaluation))
    missed = missed_goals(read_log(output / "run"), read_config(output / "run" / "config.yaml")["kl_bound"])
    if options.updates is None and missed:
        sys.exit("The quickstart did not reach its goal: " + "; ".join(missed) + ".")

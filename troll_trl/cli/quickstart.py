"""Train a small Qwen3 model on sums at too high a learning rate: with TROLL and, on a second core, with TRL's clip.

This runs on the CPU, without a model or dataset hub:

1. write sums such as "What is 37 + 48?" as JSON lines, and hold some of them out;
2. warm up a small Qwen3 model on the others, by supervised training, until it solves about a third;
3. train it with TROLL, like any model, by `troll grpo --config quickstart` at four times the config's learning rate;
   and with TRL's own trainer at the same time: the same with `--method clip`;
4. report, as `troll report` does: the success rate on the held-out sums before and after, and both curves.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troll_trl.cli.report import write_report
from troll_trl.cli.settings.command import CommandParser
from troll_trl.cli.settings.layers import configs_folder, read_layers

CONFIG = configs_folder() / "quickstart.yaml"

HELD_OUT = 512  # problems, for a standard error of the success rate of at most 2.2 points
# Four times the config's rate, which shows what a trust region is for: a clip collapses here. At half of it, both ended
# at 62 % from one start.
LEARNING_RATE, UPDATES = 3.2e-3, 200
REQUIRED_RISE = 0.05
# A small model gains little from a second thread, and on a busy machine threads wait for each other
THREADS = 1


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and `HELD_OUT` others."""
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def make_start(folder: Path, problems: list[dict[str, str]], seed: int, success: float) -> None:
    """Write the warmed-up model and its tokenizer into `folder`."""
    import torch  # seconds, after which a mistyped flag would be refused

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
    """Train with TROLL into `run` and with the clip into `clip`, at the same time. The clip's lines go to a file."""
    command = [sys.executable, "-m", "troll_trl.cli.train", "--config", str(CONFIG), "--seed", str(seed)]
    command += ["--model_name_or_path", str(output / "start"), "--dataset_name", str(output / "data")]
    command += ["--learning_rate", str(LEARNING_RATE), "--max_steps", str(updates or UPDATES)]
    command += ["--eval_steps", str(updates or UPDATES // 4)]
    troll = [*command, "--output_dir", str(output / "run")]
    clip = [*command, "--output_dir", str(output / "clip"), "--method", "clip"]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    print("Training with TROLL:", shlex.join(troll))
    print(f"At the same time with TRL's clip, whose lines are in {output / 'clip.log'}", flush=True)
    with (output / "clip.log").open("wb") as log:
        other = subprocess.Popen(clip, env=environment, stdout=log, stderr=log)
        try:
            if subprocess.run(troll, env=environment).returncode != 0:
                sys.exit("The training failed; its error is above.")
            print("Waiting for the clip's run.", flush=True)
            if other.wait() != 0:
                sys.exit(f"The training with TRL's clip failed; its error is in {output / 'clip.log'}.")
        finally:
            other.kill()


def read_log(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def values_of(log: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in log if name in line]


def missed_goals(log: list[dict[str, Any]], kl_bound: float) -> list[str]:
    """What a training run with these log lines did not reach."""
    success, projected, kl = (
        values_of(log, name) for name in ("eval_reward", "troll/projected_fraction", "troll/kl_max")
    )
    rise = success[-1] - success[0]
    goals = {
        f"the success rate rose by less than {100 * REQUIRED_RISE:.0f} points": rise >= REQUIRED_RISE,
        "no token was projected": max(projected) > 0,
        "the KL after the projection exceeds its bound": max(kl) <= kl_bound * 1.001,
    }
    return [missed for missed, reached in goals.items() if not reached]


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the quickstart. Ends with code 1 if the training failed, or did not reach its goal."""
    parser = CommandParser(prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--seed", type=int, default=0, help="seed of problems, warm-up and training (default 0)")
    flag("--output", type=Path, default="outputs/quickstart", help="folder to write to (default outputs/quickstart)")
    flag("--updates", type=int, help=f"number of updates (default {UPDATES}); if given, the result is not judged")
    flag("--start_success", type=float, default=0.35, help="success rate that ends the warm-up (default 0.35)")
    options = parser.parse_args(argv)
    from troll_trl.small_models import write_problems

    start_time = time.monotonic()
    output = options.output.resolve()
    train, test = make_problems(options.seed)
    write_problems(output / "data", train, test)
    make_start(output / "start", train, options.seed, options.start_success)
    run_trainings(output, options.seed, options.updates)
    write_report([str(output / "run"), str(output / "clip")], None, output / "report")
    log = read_log(output / "run")
    before, *_, after = values_of(log, "eval_reward")
    *_, with_clip = values_of(read_log(output / "clip"), "eval_reward")
    print(f"Model:  {output / 'run'}, after {time.monotonic() - start_time:.0f} s")
    print(f"Success rate on held-out sums: {before:.1%} before, {after:.1%} with TROLL, {with_clip:.1%} with the clip")
    # The model knows sums alone, and no instruction to answer in a box
    evaluation = ["troll", "eval", "--model", str(output / "run"), "--benchmarks", f"sums={output / 'data'}"]
    evaluation += ["--instruction", "", "--max_new_tokens", "8", "--output", str(output / "evaluation")]
    print("Evaluate it greedily:", shlex.join(evaluation))
    missed = missed_goals(log, kl_bound=float(read_layers(CONFIG)[-1].values["kl_bound"]))
    if options.updates is None and missed:
        sys.exit("The quickstart did not reach its goal: " + "; ".join(missed) + ".")

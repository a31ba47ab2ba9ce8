"""Train a small Qwen3 model on sums with TROLL, until it solves most of them.

This runs on the CPU, without a model or dataset hub:

1. write sums such as "What is 37 + 48?" as JSON lines, and hold some of them out;
2. warm up a small Qwen3 model on the others, by supervised training, until it solves about a third;
3. train it with TROLL, like any model: `troll grpo --config quickstart`;
4. print the success rate on the held-out sums before and after, and draw the curves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from troll_trl.cli.settings.command import stop
from troll_trl.cli.settings.layers import read_layers
from troll_trl.cli.settings.shipped import configs_folder

# Functions import torch and other large packages: seconds, after which a mistyped flag would be refused
if TYPE_CHECKING:
    import pandas as pd

CONFIG = configs_folder() / "quickstart.yaml"

HELD_OUT = 512  # problems, for a standard error of the success rate of at most 2.2 points
REQUIRED_RISE = 0.20
# A small model gains little from a second thread, and on a busy machine threads wait for each other
THREADS = 1


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and `HELD_OUT` others."""
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def make_start(folder: Path, problems: list[dict[str, str]], seed: int, success: float) -> None:
    """Write the warmed-up model and its tokenizer into `folder`, unless they are there already."""
    import tokenizers
    import torch
    import transformers

    from troll_trl import small_models

    # The start depends on these files, the seed, the success rate and the libraries
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    sources = [Path(file).read_text() for file in (__file__, small_models.__file__)]
    key = hashlib.sha256(repr((sources, seed, success, versions)).encode()).hexdigest()
    key_file = folder / "cache_key.txt"
    if key_file.exists() and key_file.read_text() == key:
        print(f"Warm-up: using the model in {folder}")
        return
    print(f"Warm-up: supervised training of a small Qwen3 model, until it solves {success:.0%}")
    key_file.unlink(missing_ok=True)
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    tokenizer = small_models.make_tokenizer()
    model = small_models.make_model(tokenizer)
    small_models.warm_up(model, *small_models.encode(tokenizer, problems), success)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    key_file.write_text(key)  # last: an interrupted warm-up does not count


def run_training(output: Path, seed: int, updates: int | None) -> None:
    command = [sys.executable, "-m", "troll_trl.cli.train", "--config", str(CONFIG)]
    command += ["--model_name_or_path", str(output / "start"), "--dataset_name", str(output / "data")]
    command += ["--output_dir", str(output / "run"), "--seed", str(seed)]
    if updates is not None:
        command += ["--max_steps", str(updates), "--eval_steps", str(updates)]
    print("Training with TROLL:", " ".join(command), flush=True)
    if subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(THREADS)}).returncode != 0:
        sys.exit("The training failed; its error is above.")


def judge(log: pd.DataFrame, kl_bound: float) -> tuple[list[tuple[str, str]], list[str]]:
    """The rows of the final table, and what a training run with this log did not reach."""
    success = log["eval_reward"].dropna()
    before, after = success.iloc[0], success.iloc[-1]
    projected, kl = log["troll/projected_fraction"].mean(), log["troll/kl_max"].max()
    rows = [
        ("success rate before", f"{before:.1%}"),
        ("success rate after", f"{after:.1%}  ({100 * (after - before):+.1f} points)"),
        ("tokens projected", f"{projected:.1%}"),
        ("largest KL before the projection", f"{log['troll/policy_kl_max'].max():.4f}"),
        ("largest KL after the projection", f"{kl:.4f}  (bound {kl_bound:g})"),
    ]
    failures = {
        f"the success rate rose by less than {100 * REQUIRED_RISE:.0f} points": after - before < REQUIRED_RISE,
        "no token was projected": projected == 0,
        "the KL after the projection exceeds its bound": kl > kl_bound * 1.001,
    }
    return rows, [failure for failure, found in failures.items() if found]


def draw_curves(log: pd.DataFrame, kl_bound: float, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    success, projected, kl = figure.subplots(1, 3)
    for axes, name, style, label in (
        (success, "reward", "C0", "training problems"),
        (success, "eval_reward", "o-C3", "held out"),
        (projected, "troll/projected_fraction", "C0", ""),
        (kl, "troll/policy_kl_max", "C1", "before the projection, largest"),
        (kl, "troll/policy_kl_mean", ":C1", "before the projection, mean"),
        (kl, "troll/kl_max", "C0", "after the projection, largest"),
        (kl, "troll/kl_mean", ":C0", "after the projection, mean"),
    ):
        curve = log.set_index("step")[name].dropna()
        axes.plot(curve.index, curve, style, label=label, alpha=0.5 if name == "reward" else 1.0)
    success.set(title="Success rate", ylim=(0, 1))
    success.legend(loc="lower right")
    projected.set(title="Fraction of tokens projected", ylim=(0, None))
    kl.axhline(kl_bound, color="black", linestyle="--", linewidth=1, label=f"bound {kl_bound:g}")
    kl.set(title="KL from the old policy, per token (nats)", yscale="log")
    kl.legend(fontsize="small")
    for axes in (success, projected, kl):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def parse_args(argv: Sequence[str] | None, program: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flag = parser.add_argument
    flag("--seed", type=int, default=0, help="seed of problems, warm-up and training (default 0)")
    flag("--output", type=Path, default="outputs/quickstart", help="folder to write to (default outputs/quickstart)")
    flag("--updates", type=int, help="number of updates (default 400); if given, the result is not judged")
    flag("--start_success", type=float, default=0.35, help="success rate that ends the warm-up (default 0.35)")
    options = parser.parse_args(argv)
    if options.updates is not None and options.updates < 1:
        stop(parser.prog, f"--updates must be at least 1, got {options.updates}.")
    if not 0 < options.start_success < 1:
        stop(parser.prog, f"--start_success must be between 0 and 1, got {options.start_success}.")
    return options


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the quickstart. Ends with code 1 if the training failed, or did not reach its goal."""
    options = parse_args(argv, program)
    import pandas as pd

    from troll_trl.small_models import write_problems

    start_time = time.monotonic()
    output = options.output.resolve()
    kl_bound = float(read_layers(CONFIG)[-1].values["kl_bound"].text)
    train, test = make_problems(options.seed)
    write_problems(output / "data", train, test)
    make_start(output / "start", train, options.seed, options.start_success)

    run_training(output, options.seed, options.updates)
    log = pd.DataFrame(json.loads((output / "run" / "trainer_state.json").read_text())["log_history"])
    draw_curves(log, kl_bound, output / "curves.png")
    rows, failures = judge(log, kl_bound)
    print("\n" + "\n".join(f"{name:<34}{value}" for name, value in rows))
    print(f"{'time':<34}{time.monotonic() - start_time:.0f} s")
    print(f"\nCurves: {output / 'curves.png'}\nModel:  {output / 'run'}")
    if options.updates is None and failures:
        sys.exit("The quickstart did not reach its goal: " + "; ".join(failures) + ".")


if __name__ == "__main__":
    main()

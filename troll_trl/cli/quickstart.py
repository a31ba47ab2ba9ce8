"""Quickstart: a small Qwen3 model that solves some sums is trained with TROLL until it solves most of them.

Everything happens on the CPU, without a model or dataset hub:

1. write sums such as "What is 37 + 48?" as JSON lines, some of them held out;
2. warm a small Qwen3 model up on the others, by supervised training, until it solves about a third of them;
3. train it with TROLL: `troll grpo --config quickstart`, as one trains any model;
4. print the success rate on the held-out sums before and after, and draw the curves.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from matplotlib.figure import Figure

from troll_trl import small_models
from troll_trl.cli.settings.command import stop
from troll_trl.cli.settings.layers import read_layers
from troll_trl.cli.settings.shipped import configs_folder
from troll_trl.small_models import WARM_UP_SUCCESS, encode, make_model, make_tokenizer, warm_up, write_problems

CONFIG = configs_folder() / "quickstart.yaml"

HELD_OUT = 512  # the success rate on so many problems has a standard error of at most 2.2 points
REQUIRED_RISE = 0.20
# So small a model gains little from a second thread, and threads that wait for each other lose much on a busy machine
THREADS = 1


# -- Problems ---------------------------------------------------------------------------------------------------------


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and `HELD_OUT` others."""
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


# -- The start: a small model that solves some ------------------------------------------------------------------------


def make_start(folder: Path, problems: list[dict[str, str]], seed: int, success: float = WARM_UP_SUCCESS) -> None:
    """Write the warmed-up model and its tokenizer into `folder`, unless they are there already."""
    # The start depends on these files, the seed, what is asked for and the libraries
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    sources = [Path(file).read_text() for file in (__file__, small_models.__file__)]
    key = hashlib.sha256(repr((sources, seed, success, versions)).encode()).hexdigest()
    key_file = folder / "cache_key.txt"
    if key_file.exists() and key_file.read_text() == key:
        print(f"Warm-up: using the model in {folder}")
        return
    print(f"Warm-up: supervised training of a small Qwen3 model, until it solves {success:.0%}")
    key_file.unlink(missing_ok=True)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, *encode(tokenizer, problems), success)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    key_file.write_text(key)  # last: a warm-up that was interrupted does not count


def run_training(output: Path, seed: int, updates: int | None) -> None:
    command = [sys.executable, "-m", "troll_trl.cli.train", "--config", str(CONFIG)]
    command += ["--model_name_or_path", str(output / "start"), "--dataset_name", str(output / "data")]
    command += ["--output_dir", str(output / "run"), "--seed", str(seed)]
    if updates is not None:
        command += ["--max_steps", str(updates), "--eval_steps", str(updates)]
    print("Training with TROLL:", " ".join(command), flush=True)
    if subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(THREADS)}).returncode != 0:
        sys.exit("The training failed; its error is above.")


# -- The result -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a training run reached, from the `log_history` of its trainer."""

    success_before: float
    success_after: float
    projected_fraction: float
    policy_kl_max: float
    kl_max: float
    kl_bound: float

    @classmethod
    def of(cls, log_history: list[dict[str, float]], kl_bound: float) -> "Result":
        success = [line["eval_reward"] for line in log_history if "eval_reward" in line]
        updates = [line for line in log_history if "troll/kl_max" in line]
        return cls(
            success_before=success[0],
            success_after=success[-1],
            projected_fraction=sum(line["troll/projected_fraction"] for line in updates) / len(updates),
            policy_kl_max=max(line["troll/policy_kl_max"] for line in updates),
            kl_max=max(line["troll/kl_max"] for line in updates),
            kl_bound=kl_bound,
        )

    def table(self, seconds: float) -> str:
        rise = self.success_after - self.success_before
        rows = [
            ("success rate before", f"{self.success_before:.1%}"),
            ("success rate after", f"{self.success_after:.1%}  ({100 * rise:+.1f} points)"),
            ("tokens projected", f"{self.projected_fraction:.1%}"),
            ("largest KL before the projection", f"{self.policy_kl_max:.4f}"),
            ("largest KL after the projection", f"{self.kl_max:.4f}  (bound {self.kl_bound:g})"),
            ("time", f"{seconds:.0f} s"),
        ]
        return "\n".join(f"{name:<34}{value}" for name, value in rows)

    def failures(self) -> list[str]:
        failures = []
        if self.success_after - self.success_before < REQUIRED_RISE:
            failures.append(f"the success rate rose by less than {100 * REQUIRED_RISE:.0f} points")
        if self.projected_fraction == 0:
            failures.append("no token was projected")
        if self.kl_max > self.kl_bound * 1.001:
            failures.append("the KL after the projection exceeds its bound")
        return failures


def draw_curves(log_history: list[dict[str, float]], kl_bound: float, file: Path) -> None:
    evaluations = [line for line in log_history if "eval_reward" in line]
    updates = [line for line in log_history if "troll/kl_max" in line]
    steps = [line["step"] for line in updates]

    def curve(name: str) -> list[float]:
        return [line[name] for line in updates]

    figure = Figure(figsize=(13, 4), layout="constrained")
    success, projected, kl = figure.subplots(1, 3)
    success.plot(steps, curve("reward"), color="C0", alpha=0.5, label="training problems")
    success.plot(
        [line["step"] for line in evaluations], [line["eval_reward"] for line in evaluations], "o-C3", label="held out"
    )
    success.set(title="Success rate", ylim=(0, 1))
    success.legend(loc="lower right")
    projected.plot(steps, curve("troll/projected_fraction"), color="C0")
    projected.set(title="Fraction of tokens projected", ylim=(0, None))
    kl.plot(steps, curve("troll/policy_kl_max"), color="C1", label="before the projection, largest")
    kl.plot(steps, curve("troll/policy_kl_mean"), color="C1", linestyle=":", label="before the projection, mean")
    kl.plot(steps, curve("troll/kl_max"), color="C0", label="after the projection, largest")
    kl.plot(steps, curve("troll/kl_mean"), color="C0", linestyle=":", label="after the projection, mean")
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
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the warm-up and the training (default 0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/quickstart"),
        help="folder to write to (default outputs/quickstart)",
    )
    parser.add_argument(
        "--updates", type=int, help="train for so many updates only (default 400), and do not judge the result"
    )
    parser.add_argument(
        "--start_success", type=float, default=WARM_UP_SUCCESS, help="success that ends the warm-up (default 0.35)"
    )
    options = parser.parse_args(argv)
    if options.updates is not None and options.updates < 1:
        stop(parser.prog, f"--updates must be at least 1, got {options.updates}.")
    if not 0 < options.start_success < 1:
        stop(parser.prog, f"--start_success must lie between 0 and 1, got {options.start_success}.")
    return options


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the quickstart. Ends with code 1 where the training failed, or did not reach its goal."""
    options = parse_args(argv, program)
    output = options.output.resolve()
    kl_bound = float(read_layers(CONFIG)[-1].values["kl_bound"].text)

    start_time = time.monotonic()
    torch.set_num_threads(THREADS)
    train, test = make_problems(options.seed)
    write_problems(output / "data", train, test)
    make_start(output / "start", train, options.seed, options.start_success)

    run_training(output, options.seed, options.updates)
    log_history = json.loads((output / "run" / "trainer_state.json").read_text())["log_history"]
    result = Result.of(log_history, kl_bound)
    draw_curves(log_history, kl_bound, output / "curves.png")
    print("\n" + result.table(time.monotonic() - start_time))
    print(f"\nCurves: {output / 'curves.png'}\nModel:  {output / 'run'}")
    if options.updates is None and (failures := result.failures()):
        sys.exit("The quickstart did not reach its goal: " + "; ".join(failures) + ".")


if __name__ == "__main__":
    main()

"""Quickstart: a small Qwen3 model that solves some sums is trained with TROLL until it solves most of them.

Everything happens on the CPU, without a model or dataset hub:

1. write sums such as "What is 37 + 48?" as JSON lines, some of them held out;
2. warm a small Qwen3 model up on the others, by supervised training, until it solves about a third of them;
3. train it with TROLL: scripts/train.py with configs/quickstart.yaml, as one trains any model;
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
import yaml
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs" / "quickstart.yaml"

HELD_OUT = 512  # the success rate on so many problems has a standard error of at most 2.2 points
WARM_UP_SUCCESS = 0.35  # solved often enough for every group of completions to hold right ones and wrong ones
WARM_UP_BATCH = 256
MAX_WARM_UP_STEPS = 1500  # it takes 200 to 450
REQUIRED_RISE = 0.20
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
# So small a model gains little from a second thread, and threads that wait for each other lose much on a busy machine
THREADS = 1

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


# -- Problems ---------------------------------------------------------------------------------------------------------


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and `HELD_OUT` others."""
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def write_problems(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))


# -- The start: a small model that solves some ------------------------------------------------------------------------


def make_tokenizer(phrases: Sequence[str] = ("What is ",)) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Qwen3's chat marks, and one token for each of `phrases` and what every chat holds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["user\n", "assistant\n", *phrases, "Answer: "])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, architecture: type[PreTrainedConfig] = Qwen3Config, **sizes: int
) -> PreTrainedModel:
    """A model of `architecture` with new weights; `sizes` replace those of the quickstart."""
    config = architecture(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES | sizes,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Token ids and labels `(problems, length)`; labels are −100 but for the solution, which is what is learnt. It is the
    answer, unless a problem has one of its own.
    """
    chats = [[{"role": "user", "content": row["problem"]}] for row in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    answers = [row.get("solution", f"Answer: {row['answer']}") + tokenizer.eos_token for row in problems]
    prompt_ids, answer_ids = tokenizer(prompts).input_ids, tokenizer(answers).input_ids
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompt_ids, answer_ids, strict=True))
    input_ids = torch.full((len(problems), length), tokenizer.pad_token_id)
    labels = torch.full((len(problems), length), -100)
    for row, (prompt, answer) in enumerate(zip(prompt_ids, answer_ids, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


def warm_up(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    target: float = WARM_UP_SUCCESS,
    learning_rate: float = 4e-3,
) -> None:
    """Supervised training until a sampled answer is right with probability `target`, on average."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    success = 0.0
    for step in range(1, MAX_WARM_UP_STEPS + 1):
        rows = torch.randint(len(input_ids), (WARM_UP_BATCH,))
        logits = model(input_ids=input_ids[rows]).logits[:, :-1]
        targets = labels[rows, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # 0 at −100
        (losses.sum() / (targets != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # What sampling at temperature 1 would solve: the probability of the right answer, averaged over some batches
        success = 0.8 * success + 0.2 * losses.detach().sum(1).neg().exp().mean().item()
        if step % 50 == 0 or success >= target:
            print(f"  step {step}: solves {success:.0%}", flush=True)
        if success >= target:
            return
    raise RuntimeError(
        f"The warm-up reached a success rate of {success:.0%} in {MAX_WARM_UP_STEPS} steps, not {target:.0%}. "
        "Try another --seed."
    )


def make_start(folder: Path, problems: list[dict[str, str]], seed: int) -> None:
    """Write the warmed-up model and its tokenizer into `folder`, unless they are there already."""
    # The start depends on this file, the seed and the libraries
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    key = hashlib.sha256(repr((Path(__file__).read_text(), seed, versions)).encode()).hexdigest()
    key_file = folder / "cache_key.txt"
    if key_file.exists() and key_file.read_text() == key:
        print(f"Warm-up: using the model in {folder}")
        return
    print("Warm-up: supervised training of a small Qwen3 model")
    key_file.unlink(missing_ok=True)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, *encode(tokenizer, problems))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    key_file.write_text(key)  # last: a warm-up that was interrupted does not count


def run_training(output: Path, seed: int) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "train.py"), "--config", str(CONFIG)]
    command += ["--model_name_or_path", str(output / "start"), "--dataset_name", str(output / "data")]
    command += ["--output_dir", str(output / "run"), "--seed", str(seed)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the warm-up and the training (default 0)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "outputs" / "quickstart", help="folder to write to")
    options = parser.parse_args()
    output = options.output.resolve()
    config = yaml.safe_load(CONFIG.read_text())

    start_time = time.monotonic()
    torch.set_num_threads(THREADS)
    train, test = make_problems(options.seed)
    write_problems(output / "data", train, test)
    make_start(output / "start", train, options.seed)

    run_training(output, options.seed)
    log_history = json.loads((output / "run" / "trainer_state.json").read_text())["log_history"]
    result = Result.of(log_history, config["kl_bound"])
    draw_curves(log_history, config["kl_bound"], output / "curves.png")
    print("\n" + result.table(time.monotonic() - start_time))
    print(f"\nCurves: {output / 'curves.png'}\nModel:  {output / 'run'}")
    if failures := result.failures():
        sys.exit("The quickstart did not reach its goal: " + "; ".join(failures) + ".")


if __name__ == "__main__":
    main()

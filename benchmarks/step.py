"""A whole training step of TROLL against TRL's clip: same model, same batch, stored completions for the rollout.

    python benchmarks/step.py                          # the sizes of this device
    python benchmarks/step.py --shape qwen3-0.6b --completion 2048 --completions 4
    python benchmarks/step.py --trust_region projection mask     # both, next to the same runs of the clip
    python benchmarks/step.py --completion 512 2048 8192 --vocabulary 32000 151936     # how the cost grows

Each figure is the time of a run's second rollout batch: the pass that scores the batch with the current weights (TROLL
also selects the supports in it), then 8 updates with AdamW. The first one is a warm-up, in which TROLL checks its
kernels and its head. Runs of the trainers alternate, and each starts from the same weights. Peak memory is the
allocator's over such a run. After each pair, the file of results has its row with the pairs so far. The weights are
random, because only shapes and vocabulary matter. Temperature 0.05 makes the distributions as peaked as a trained
model's. "projected" is the share of tokens outside of the bound over the 8 updates.

Floor: 2 FLOPs per weight and token in the scoring pass, 6 in an update (8 with recomputed activations).
"""

import argparse
import contextlib
import gc
import io
import itertools
import statistics
import tempfile
import time
import warnings
from functools import partial

import torch
from common import MIB, Floor, Report, parser, peak_bytes, ratio, synchronize
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

UPDATES = 8
GENERATIONS = 2
# Hidden and intermediate size, layers, heads, key-value heads, size of a head
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128),
    "small": (256, 768, 4, 4, 2, 64),
}
PROMPT = 16  # tokens
TRUST_REGIONS = {
    "projection": {},
    "mask": {"trust_region": "mask"},
    "penalty": {"trust_region": "penalty", "divergence_type": "topk_kl"},
    "binary-penalty": {"trust_region": "penalty", "divergence_type": "binary_kl"},
}
ON_A_SUPPORT = ("projection", "penalty")


def make_model(shape: str, vocabulary: int, device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    hidden, intermediate, layers, heads, kv_heads, head_dim = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.device(device):  # on a CPU, random numbers for billions of weights take minutes
        return Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def stored_rollout(prompts, trainer, vocabulary: int, completion: int) -> dict:
    """Random tokens, the same for the same prompt and sample."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(3, vocabulary, (len(prompts), length), generator=generator).tolist()
    return {"prompt_ids": draw(PROMPT), "completion_ids": draw(completion), "logprobs": None}


def alternating_reward(completions, **kwargs) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


class SecondBatch(TrainerCallback):
    """Starts the clock when the first rollout batch ends."""

    start = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == UPDATES:
            synchronize(args.device.type)
            self.start = time.perf_counter()


class Trainers:
    """One model and what trains it, by name: the trust regions that are asked for, and TRL's clip."""

    def __init__(self, args: argparse.Namespace, shape: str, completion: int, vocabulary: int, folder: str):
        self.device = args.device
        self.shape = shape
        self.completion = completion
        self.model = make_model(shape, vocabulary, args.device)
        self.initial = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        self.rollout = partial(stored_rollout, vocabulary=vocabulary, completion=completion)
        self.projected: float | None = None
        options = {
            "output_dir": folder,
            "use_cpu": args.device == "cpu",
            "bf16": args.device == "cuda",
            "gradient_checkpointing": args.device == "cuda",
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": UPDATES,  # one line, over all updates
            "per_device_train_batch_size": args.completions,
            "num_generations": GENERATIONS,
            "max_completion_length": completion,
            "steps_per_generation": UPDATES,
            "learning_rate": 1e-4,
            "temperature": 0.05,
            "max_steps": 2 * UPDATES,
        }
        self.make = {}
        for name in args.trust_region:
            support = {"support_size": args.support} if name in ON_A_SUPPORT else {}
            config = TrollGRPOConfig(**options, **TRUST_REGIONS[name], **support)
            self.make[name] = partial(self._trainer, TrollGRPOTrainer, config)
        self.make["clip"] = partial(self._trainer, GRPOTrainer, GRPOConfig(**options))

    def _trainer(self, trainer_class, config):
        self.model.__dict__.pop("forward", None)  # each trainer patches it anew
        self.model.load_state_dict(self.initial)
        self.model.zero_grad(set_to_none=True)
        return trainer_class(
            model=self.model,
            reward_funcs=alternating_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["<unk>"] * 64}),
            processing_class=make_tokenizer(),
            rollout_func=self.rollout,
        )

    def run(self, name: str) -> float:
        """Seconds of the second rollout batch."""
        second = SecondBatch()
        with contextlib.redirect_stdout(io.StringIO()):  # the trainers' own lines would break the table
            trainer = self.make[name]()
            trainer.add_callback(second)
            trainer.train()
            synchronize(self.device)
            seconds = time.perf_counter() - second.start
        if name == "projection":
            logged = [line for line in trainer.state.log_history if "troll/projected_fraction" in line]
            self.projected = logged[-1]["troll/projected_fraction"]
        trainer.accelerator.free_memory()
        del trainer
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # a trainer is a cycle; its optimizer's state must not be freed in another run's measurement
        return seconds


def floor_seconds(floor: Floor, trainers: Trainers, args: argparse.Namespace) -> float:
    weights = sum(x.numel() for x in trainers.model.parameters())
    tokens = args.completions * (PROMPT + trainers.completion)
    per_update = 8 if args.device == "cuda" else 6
    # AdamW reads weight, gradient and two moments and writes three of them
    moved = 7 * weights * (2 if args.device == "cuda" else 4) * UPDATES
    return floor.seconds((2 + per_update) * weights * tokens * UPDATES, moved)


def measure(report: Report, floor: Floor, args: argparse.Namespace, trainers: Trainers) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in trainers.make}
    trainers.run("clip")  # allocates what stays: cuBLAS's workspace, and on a CPU memory of the process
    memory: dict[str, int] = {}
    least = floor_seconds(floor, trainers, args)
    if args.device == "cpu":  # in runs of their own, since the profiler takes time; a GPU's allocator counts anyway
        memory = {name: peak_bytes(partial(trainers.run, name), "cpu") for name in seconds}
    for i in range(args.repeats):
        for name in seconds if i % 2 else reversed(seconds):
            run = partial(lambda name: seconds[name].append(trainers.run(name)), name)
            if args.device == "cpu":
                run()
            else:
                memory[name] = max(memory.get(name, 0), peak_bytes(run, args.device))
        for name in args.trust_region:
            add_row(report, trainers, name, seconds, memory, least)


def add_row(report: Report, trainers: Trainers, name: str, seconds, memory, least: float) -> None:
    """The row of a trust region with the pairs so far: `seconds` and `memory` have its runs and the clip's."""
    ours, clip = (statistics.median(seconds[run]) for run in (name, "clip"))
    pairs = ratio(seconds[name], seconds["clip"])
    report.add(
        **{"shape": trainers.shape, "tokens": trainers.completion, "V": trainers.model.config.vocab_size},
        **{"trust region": name, "pairs": len(seconds[name]), "time/clip": pairs["ratio"], **pairs},
        **{"memory/clip": memory[name] / memory["clip"], "ours s": ours, "clip s": clip, "floor s": least},
        **{"ours/floor": ours / least, "ours MiB": memory[name] / MIB},
        **({"projected": trainers.projected} if name == "projection" else {}),
        seconds={run: seconds[run] for run in (name, "clip")},
        peak_bytes={run: memory[run] for run in (name, "clip")},
    )


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # of an option that old and new versions have
    warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES)
    options.add_argument("--vocabulary", type=int, nargs="+", default=[151_936])
    options.add_argument("--completion", type=int, nargs="+", help="tokens of a completion")
    options.add_argument("--completions", type=int, default=2, help="completions of an update, two of each prompt")
    options.add_argument("--support", type=int, default=64)
    options.add_argument("--trust_region", choices=TRUST_REGIONS, nargs="+", default=["projection"])
    args = options.parse_args()
    shapes = [args.shape] if args.shape else ["qwen3-0.6b", "qwen3-4b"] if args.device == "cuda" else ["small"]
    lengths = args.completion or [2048 if args.device == "cuda" else 96]
    columns = {"shape": "", "tokens": ",", "V": ",", "trust region": "", "pairs": "", "time/clip": ".3f"}
    columns |= {"ratio_min": ".3f", "ratio_max": ".3f", "memory/clip": ".3f", "ours s": ".2f", "clip s": ".2f"}
    columns |= {"floor s": ".2f", "ours/floor": ".2f", "ours MiB": ".0f", "projected": ".0%"}
    report = Report("step", args, columns, key=("shape", "tokens", "V", "trust region"))
    floor = Floor(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    report.start(f"{floor}. {UPDATES} updates of {args.completions} completions.")
    for shape, length, vocabulary in itertools.product(shapes, lengths, args.vocabulary):
        with tempfile.TemporaryDirectory() as folder:
            measure(report, floor, args, Trainers(args, shape, length, vocabulary, folder))
    report.save()


if __name__ == "__main__":
    main()

"""A whole training step of TROLL against TRL's clip: same model, same batch, stored completions for the rollout.

    python benchmarks/step.py                          # the sizes of this device
    python benchmarks/step.py --shape qwen3-0.6b --completion 2048 --completions 4
    python benchmarks/step.py --trust_region mask     # DPPO's, of a binary divergence, in place of the projection
    python benchmarks/step.py --trust_region projection mask     # both, next to the same runs of the clip; or penalties
    python benchmarks/step.py --old_policy engine     # as with vLLM, whose numbers are stored like the completions

One figure is a run's second rollout batch: the pass that scores it with the current weights (TROLL also selects the
supports in it), then 8 updates with AdamW. The first one is a warm-up, in which TROLL checks its kernels and its head.
Runs of the trainers alternate, and each starts from the same weights. Peak memory is the allocator's over such a run.
After each pair, the file of results has its row with the pairs so far. The weights are random, because only shapes and
vocabulary matter. Temperature 0.05 makes the distributions as peaked as a trained model's. "projected" is the share of
tokens outside of the bound over the 8 updates. "projection share" is the part of the time that `project` takes, forward
and backward, timed alone with half of the tokens outside.

With `--old_policy engine` both trainers train as with vLLM. TRL's clip scores the rollout for its importance-sampling
correction. TROLL takes the engine's numbers, and reading its lists is in its time.

Floor: 2 FLOPs per weight and token in the scoring pass, 6 in an update (8 with recomputed activations).
"""

import contextlib
import gc
import io
import statistics
import tempfile
import time
import warnings
from functools import partial
from unittest import mock

import torch
import trl.trainer.grpo_trainer
from common import MIB, Floor, Report, parser, peak_bytes, ratio, synchronize
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.trainers.old_policy import LOG_PROBS, OLD_POLICY_KEY, with_dense
from troll_trl.trust_region.projection import project

UPDATES, GENERATIONS = 8, 2
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
    "penalty": {"trust_region": "penalty"},
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
    with torch.device(device):  # random numbers for billions of weights take a CPU minutes
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


class StoredEngine:
    """In place of TRL's `VLLMGeneration`: stored completions, and the numbers of the model before its first update."""

    mode, server_url = "server", "stored"
    stored: tuple[list, list, list]  # completions; at each position ids and log-probabilities

    def __init__(self, logprobs, **_):
        self.logprobs, self.vllm_client = logprobs, self

    def sync_weights(self): ...

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}}

    def generate(self, prompts, *_, **__):
        completions, ids, log_probs = self.stored
        count = 1 + self.logprobs  # the sampled token comes first
        cut = [[[values[:count] for values in row] for row in lists] for lists in (ids, log_probs)]
        return prompts, completions, cut[1], cut[0]


@torch.no_grad()
def store_answers(model, temperature: float, completion: int, sequences: int, likely: int) -> None:
    """Have [`StoredEngine`] answer with random completions, with what the model says of them and of `likely` others."""
    vocabulary = model.config.vocab_size
    rollout = stored_rollout([None] * sequences, None, vocabulary, completion)
    ids, log_probs = [], []
    for tokens in rollout["completion_ids"]:
        context = torch.tensor([[2, *tokens]], device=model.device)  # the prompt is one token
        rows = (model(context).logits[0, :-1].float() / temperature).log_softmax(-1)
        values, listed = rows.topk(likely)
        sampled = torch.tensor(tokens, device=model.device).unsqueeze(1)
        ids.append(torch.cat([sampled, listed], 1).tolist())
        log_probs.append(torch.cat([rows.gather(1, sampled), values], 1).tolist())
    StoredEngine.stored = (rollout["completion_ids"], ids, log_probs)


def alternating_reward(completions, **kwargs) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


class SecondBatch(TrainerCallback):
    """Notes when a run's first rollout batch ends."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == UPDATES:
            synchronize(args.device.type)
            self.start = time.perf_counter()


class Trainers:
    """Both trainers on one model; a run restores its weights first."""

    def __init__(self, args, vocabulary: int, folder: str):
        self.model = make_model(args.shape, vocabulary, args.device)
        self.initial = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
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
            "max_completion_length": args.completion,
            "steps_per_generation": UPDATES,
            "learning_rate": 1e-4,
            "temperature": 0.05,
            "max_steps": 2 * UPDATES,
        }
        engine = args.old_policy == "engine"
        if engine:
            options |= {"use_vllm": True, "vllm_mode": "server"}
            sequences = UPDATES * args.completions
            store_answers(self.model, options["temperature"], args.completion, sequences, likely=19)
            trl.trainer.grpo_trainer.VLLMGeneration = StoredEngine
            mock.patch("troll_trl.trainers.troll_trainer.check_vllm").start()
        self.make = {}
        for name in args.trust_region:
            ours = TRUST_REGIONS[name] | ({"old_policy": "engine"} if engine else {})
            if name in ON_A_SUPPORT:
                ours |= {"support_size": 20 if engine else args.support}
            self.make[name] = partial(self._trainer, TrollGRPOTrainer, TrollGRPOConfig(**options, **ours))
        self.make["clip"] = partial(self._trainer, GRPOTrainer, GRPOConfig(**options))
        self.rollout = None if engine else partial(stored_rollout, vocabulary=vocabulary, completion=args.completion)
        self.cache_bytes = self.projection_seconds = self.projected = 0.0
        self.device = args.device

    def _trainer(self, trainer_class, config):
        model = self.model
        model.__dict__.pop("forward", None)  # each trainer patches it anew
        model.load_state_dict(self.initial)
        model.zero_grad(set_to_none=True)
        trainer = trainer_class(
            model=model,
            reward_funcs=alternating_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["<unk>"] * 64}),
            processing_class=make_tokenizer(),
            rollout_func=self.rollout,
        )
        return trainer

    def run(self, name: str) -> float:
        """Seconds of the second rollout batch."""
        second = SecondBatch()
        with contextlib.redirect_stdout(io.StringIO()):  # the trainers' own lines would break the table
            trainer = self.make[name]()
            trainer.add_callback(second)
            trainer.train()
            synchronize(self.device)
            seconds = time.perf_counter() - second.start
        if name == "projection" and OLD_POLICY_KEY in trainer._buffered_inputs[0]:
            batch = trainer._buffered_inputs[0]
            old = batch[OLD_POLICY_KEY]
            self.projected = next(
                line["troll/projected_fraction"]
                for line in reversed(trainer.state.log_history)
                if "troll/projected_fraction" in line
            )
            self.cache_bytes = old.nbytes / int(batch["completion_mask"].sum())
            dense = with_dense(batch, old.to(self.device))
            self.projection_seconds = UPDATES * self.time_projection(dense[LOG_PROBS])
        trainer.accelerator.free_memory()
        del trainer
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # a trainer is a cycle; its optimiser's state must not be freed in another run's measurement
        return seconds

    def time_projection(self, old: torch.Tensor) -> float:
        """Seconds of `project` forward and backward for one update's tokens, with every second row outside."""
        moved = old + torch.randn_like(old) * (torch.arange(old.shape[1], device=old.device) % 2).view(1, -1, 1)
        leaf = moved.log_softmax(-1).requires_grad_()
        synchronize(self.device)
        start = time.perf_counter()
        log_probs = project(leaf, old, 0.05).log_probs
        log_probs.masked_fill(log_probs == -torch.inf, 0.0).sum().backward()
        synchronize(self.device)
        return time.perf_counter() - start


def floor_seconds(floor: Floor, trainers: Trainers, args) -> float:
    weights = sum(x.numel() for x in trainers.model.parameters())
    tokens = args.completions * (PROMPT + args.completion)
    per_update = 8 if args.device == "cuda" else 6
    # AdamW reads weight, gradient and two moments and writes three of them
    moved = 7 * weights * (2 if args.device == "cuda" else 4) * UPDATES
    return floor.seconds((2 + per_update) * weights * tokens * UPDATES, moved)


def measure(report: Report, floor: Floor, args, trainers: Trainers) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in trainers.make}
    trainers.run("clip")  # takes what stays: cuBLAS's workspace, and on a CPU memory of the process
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
            add_row(report, trainers, args.shape, name, seconds, memory, least)


def add_row(report: Report, trainers: Trainers, shape: str, name: str, seconds, memory, least: float) -> None:
    """The row of a trust region with the pairs so far: `seconds` and `memory` have its runs and the clip's."""
    ours, clip = (statistics.median(seconds[run]) for run in (name, "clip"))
    pairs = ratio(seconds[name], seconds["clip"])
    projected = {}
    if name == "projection" and trainers.cache_bytes:  # a binary divergence keeps no old policy
        projected = {"cache B/token": trainers.cache_bytes, "projected": trainers.projected}
        projected |= {"projection share": trainers.projection_seconds / ours}
    report.add(
        **{"shape": shape, "trust region": name, "pairs": len(seconds[name]), "time/clip": pairs["ratio"], **pairs},
        **{"memory/clip": memory[name] / memory["clip"], "ours s": ours, "clip s": clip, "floor s": least},
        **{"ours/floor": ours / least, "ours MiB": memory[name] / MIB, **projected},
        seconds={run: seconds[run] for run in (name, "clip")},
        peak_bytes={run: memory[run] for run in (name, "clip")},
    )


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # of an option that old and new versions both know
    warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES)
    options.add_argument("--vocabulary", type=int, default=151_936)
    options.add_argument("--completion", type=int, help="tokens of a completion")
    options.add_argument("--completions", type=int, default=2, help="completions of an update, two of each prompt")
    options.add_argument("--support", type=int, default=64)
    options.add_argument("--trust_region", choices=TRUST_REGIONS, nargs="+", default=["projection"])
    options.add_argument("--old_policy", choices=("trainer", "engine"), default="trainer")
    args = options.parse_args()
    shapes = [args.shape] if args.shape else ["qwen3-0.6b", "qwen3-4b"] if args.device == "cuda" else ["small"]
    args.completion = args.completion or (2048 if args.device == "cuda" else 96)
    columns = {"shape": "", "trust region": "", "pairs": "", "time/clip": ".3f", "ratio_min": ".3f", "ratio_max": ".3f"}
    columns |= {"memory/clip": ".3f", "ours s": ".2f", "clip s": ".2f", "floor s": ".2f", "ours/floor": ".2f"}
    columns |= {"ours MiB": ".0f", "cache B/token": ".0f", "projected": ".0%", "projection share": ".2%"}
    report = Report("step", args, columns, key=("shape", "trust region"))
    floor = Floor(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    report.start(f"{floor}. {UPDATES} updates of {args.completions} x {args.completion} tokens.")
    for shape in shapes:
        args.shape = shape
        with tempfile.TemporaryDirectory() as folder:
            measure(report, floor, args, Trainers(args, args.vocabulary, folder))
    report.save()


if __name__ == "__main__":
    main()

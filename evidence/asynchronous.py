"""
Run the study async.yaml, with the flags of `evidence.run`: TRL's asynchronous GRPO on a CPU, with samples of a given
age.

    python -m evidence.asynchronous evidence/async.yaml --resume
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from evidence.engine import Engine, make_cpu_trainer
from evidence.grid import Run, content_of
from evidence.results import describe, mean_height, mean_logged
from evidence.run import Runner, main
from math_answers import math_accuracy_reward
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer, sample_log_probs

CLASSES: dict[str, tuple[type[AsyncGRPOTrainer], type[AsyncGRPOConfig]]] = {
    "troll": (AsyncTrollGRPOTrainer, AsyncTrollGRPOConfig),
    "clip": (AsyncGRPOTrainer, AsyncGRPOConfig),
}
# Of a method's tokens. A penalty logs the last share, too
LIMITED = (
    "troll/projected_fraction",
    "troll/masked_fraction",
    "troll/penalized_fraction",
    "clip_ratio/region_mean",
)


class Problems:
    """The prompts of a start's problems, `train` or `test`, and the rewards of completions."""

    def __init__(self, start: Path, split: str):
        self.rows = [json.loads(line) for line in (start / "data" / f"{split}.jsonl").read_text().splitlines()]
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(start / "model")
        chats = [[{"role": "user", "content": row["problem"]}] for row in self.rows]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        self.prompts: list[list[int]] = tokenizer(texts).input_ids

    def rewards(self, places: list[int], completions: list[list[int]]) -> np.ndarray:
        """`(completions,)`, each of the problem at its place."""
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return np.array(math_accuracy_reward(texts, [self.rows[place]["answer"] for place in places]), dtype=float)


@torch.no_grad()
def complete(
    model: PreTrainedModel, prompts: list[list[int]], length: int, generator: torch.Generator | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """
    A completion of each prompt, of at most `length` tokens, the end-of-sequence token included. Without a generator
    every token is the most likely one.

    Returns:
        The completions, and the log-probabilities `(completions, length, V)` at their tokens.
    """
    width, end = max(map(len, prompts)), model.config.eos_token_id
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions, cache, tokens, rows = (mask.cumsum(1) - 1).clamp(min=0), None, ids[:, :0], []
    while tokens.shape[1] < length and not (tokens == end).any(1).all():
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        cache = output.past_key_values
        rows.append(output.logits[:, -1].log_softmax(-1))
        likely = rows[-1].argmax(-1, keepdim=True)
        ids = likely if generator is None else torch.multinomial(rows[-1].exp(), 1, generator=generator)
        tokens, mask, positions = torch.cat([tokens, ids], 1), torch.cat([mask, ids * 0 + 1], 1), positions[:, -1:] + 1
    cut = [row[: row.index(end) + 1] if end in row else row for row in tokens.tolist()]
    return cut, torch.stack(rows, 1)


class ProblemEngine(Engine):
    """
    Completions of the problems of a start, in the order of its file, an update's at a time.

    Args:
        start (`Path`): of `evidence.starts`.
        age (`int`), support_size (`int`, *optional*): as of [`Engine`].
        config (`AsyncGRPOConfig`): of the run.
    """

    def __init__(self, start: Path, age: int, support_size: int | None, config: AsyncGRPOConfig):
        super().__init__(start / "model", age, support_size)
        self.problems = Problems(start, "train")
        self.config, self.groups = config, 0
        self.generator = torch.Generator().manual_seed(config.seed)

    def group(self) -> list[RolloutSample]:
        version, copies = self.load_weights(), self.config.num_generations
        count = self.config.per_device_train_batch_size // copies
        first = self.groups * count
        places = [place % len(self.problems.rows) for place in range(first, first + count) for _ in range(copies)]
        prompts = [self.problems.prompts[place] for place in places]
        completions, log_probs = complete(self.model, prompts, self.config.max_completion_length, self.generator)
        rewards = self.problems.rewards(places, completions)
        groups = rewards.reshape(-1, copies)
        advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-8)  # as TRL's worker
        self.groups += 1
        columns = (prompts, completions, log_probs, advantages.flatten().tolist(), rewards.tolist())
        samples = []
        for i, (prompt, completion, rows, advantage, reward) in enumerate(zip(*columns, strict=True)):
            mask = [0] * len(prompt) + [1] * len(completion)
            sample = RolloutSample(
                prompt=[], completion=[], input_ids=np.array(prompt + completion), completion_mask=np.array(mask),
                old_log_probs=self.old_log_probs(mask, completion, rows), advantage=advantage, model_version=version,
                group_id=first + i // copies, metrics={"reward": reward}, enqueued_at=time.time(),
            )  # fmt: skip
            samples.append(sample)
        return samples

    def old_log_probs(self, mask: list[int], completion: list[int], rows: torch.Tensor) -> np.ndarray:
        """A sample's log-probabilities, `(tokens,)` or `(tokens, 2K)`, from `rows` `(length, V)` of its completion."""
        unknown = len(mask) - len(completion)
        log_probs = [0.0] * unknown + rows[range(len(completion)), completion].tolist()
        if self.support_size is None:
            return np.array(log_probs, dtype=np.float32)
        likely = rows[: len(completion)].topk(self.support_size)
        others: list[dict[int, float]] = [{}] * unknown
        for token, ids, values in zip(completion, likely.indices.tolist(), likely.values.tolist(), strict=True):
            pairs = [pair for pair in zip(ids, values, strict=True) if pair[0] != token]
            others.append(dict(pairs[: self.support_size - 1]))
        return sample_log_probs(mask, log_probs, others, self.support_size)


class HeldOut(TrainerCallback):
    """
    Curves of success on the held-out problems, pairs of update and success: of `greedy` completions, and of one
    `sampled` completion each. They need a `model` to load the weights into: the trainer's has no cache.
    """

    def __init__(self, model: PreTrainedModel, problems: Problems):
        self.model, self.problems = model, problems
        self.curves: dict[str, list[tuple[int, float]]] = {"greedy": [], "sampled": []}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.model.load_state_dict(model.state_dict())
        for curve, generator in (("greedy", None), ("sampled", torch.Generator().manual_seed(args.seed))):
            completions, _ = complete(self.model, self.problems.prompts, args.max_completion_length, generator)
            success = self.problems.rewards(list(range(len(completions))), completions).mean()
            self.curves[curve].append((state.global_step, float(success)))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.eval_steps == 0:
            self.on_train_begin(args, state, control, **kwargs)


class AsyncRunner(Runner):
    """Of the settings `versions_old` is the age of the samples at the loss, and `method` a key of [`CLASSES`]."""

    def train_and_evaluate(self, run: Run, start: Path, folder: Path) -> dict[str, Any]:
        settings = content_of(self.grid.training)[0] | self.grid.settings(run)
        trainer_class, config_class = CLASSES[settings.pop("method", "troll")]
        age = settings.pop("versions_old")
        config = config_class(output_dir=str(folder), **settings)
        needed = isinstance(config, AsyncTrollGRPOConfig) and config.make_trust_region().needs_support
        engine = ProblemEngine(start, age - 1, config.support_size if needed else None, config)
        held_out = HeldOut(engine.model, Problems(start, "test"))
        # The data set and the rewards are the engine's; TRL's trainer asks for the first
        trainer = make_cpu_trainer(
            trainer_class, start / "model", config, engine, callbacks=[held_out], train_dataset=[]
        )
        trainer.train()
        trainer.save_state()  # for the report pages
        return describe(run) | make_async_record(held_out.curves, trainer.state.log_history)


def make_async_record(curves: dict[str, list[tuple[int, float]]], log: list[dict[str, float]]) -> dict[str, Any]:
    """
    Returns:
        `dict`: `curve`, `area`, `start` and `success` of greedy decoding; of one sampled completion each `sampled`,
        another such curve, and `sampled_area`; `limited`, the mean share of tokens that the trust region or the clip
        acts on; `staleness_max`, the versions when TRL takes a sample from the queue.
    """
    curve, sampled = curves["greedy"], curves["sampled"]
    limited = [mean_logged(log, name) for name in LIMITED]
    return {
        "curve": curve,
        "area": mean_height(curve),
        "start": curve[0][1],
        "success": curve[-1][1],
        "sampled": sampled,
        "sampled_area": mean_height(sampled),
        "limited": next((share for share in limited if share is not None), None),
        "staleness_max": max(line.get("sample/staleness_max", 0) for line in log),
    }


if __name__ == "__main__":
    main(AsyncRunner)

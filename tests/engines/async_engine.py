"""
Asynchronous GRPO on a CPU with the engine of `cpu_engine`, whose samples here are conversations of two turns. It
gives the K most likely tokens as vLLM does.
"""

import os
import sys
import time
from pathlib import Path

import cpu_engine
import numpy as np
import torch
from accelerate import DistributedType, PartialState
from ranks import leave_together
from tiny import padded_logits, sample_tokens, tiny_prompts, tiny_tokenizer
from torch.distributed.tensor import DTensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer, sample_log_probs

GENERATIONS = 4


def likely_tokens(log_probs: torch.Tensor, token: int, support_size: int) -> dict[int, float]:
    """The K − 1 most likely tokens of a distribution `(V,)` beside the sampled one."""
    order = [other for other in log_probs.argsort(descending=True).tolist() if other != token]
    return {other: log_probs[other].item() for other in order[: support_size - 1]}


class Engine(cpu_engine.Engine):
    """
    Args:
        folder (`str`), age (`int`), support_size (`int`, *optional*): as of [`cpu_engine.Engine`].
        reward (`Callable`): of the trained tokens of a conversation.
        noise (`float`): largest error of a log-probability that the engine gives.
    """

    def __init__(self, folder, age=0, support_size=None, reward=None, noise=0.0):
        super().__init__(folder, age, support_size)
        self.noise = noise
        self.reward = reward or (lambda ids: sum((7 * token) % 13 for token in ids) / (13 * len(ids)))
        self.prompts = tiny_tokenizer()(list(tiny_prompts()["prompt"])).input_ids
        self.generator = torch.Generator().manual_seed(0)
        self.groups = 0

    def group(self):
        """Two turns around a tool's answer, one of a single token; a conversation that was rewritten, hence forked."""
        version = self.load_weights()
        prompt = self.prompts[self.groups % len(self.prompts)]
        firsts = self.sample([prompt] * GENERATIONS, [1] + [4] * (GENERATIONS - 1))
        answers = torch.randint(3, 100, (GENERATIONS, 2), generator=self.generator).tolist()
        rewritten = [*firsts[1][:2], 7]
        rows = [prompt + first + answer for first, answer in zip(firsts, answers, strict=True)]
        *seconds, forked = self.sample([*rows, prompt + rewritten], [3] * (GENERATIONS + 1))
        conversations = []
        for number, (first, answer, second) in enumerate(zip(firsts, answers, seconds, strict=True)):
            rows = [([prompt, first, answer, second], [0, 1, 0, 1])]
            if number == 1:
                rows.append(([prompt, rewritten, forked], [0, 0, 1]))
            conversations.append((rows, self.reward(first + second)))
        rewards = np.array([reward for _, reward in conversations])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        self.groups += 1
        return [
            self.make_sample(parts, masks, advantage, version, reward)
            for (rows, reward), advantage in zip(conversations, advantages, strict=True)
            for parts, masks in rows
        ]

    def sample(self, rows, counts):
        """As many tokens as `counts` says after each of the `rows`."""
        logits = lambda rows, _: padded_logits(self.model, rows)
        return sample_tokens(logits, rows, counts, self.generator)

    @torch.no_grad()
    def make_sample(self, parts, masks, advantage, version, reward):
        ids = [token for part in parts for token in part]
        mask = [value for part, value in zip(parts, masks, strict=True) for _ in part]
        log_probs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1).roll(1, 0)  # of each token
        error = (2 * torch.rand(log_probs.shape, generator=self.generator) - 1) * self.noise
        log_probs = log_probs + error
        sampled = log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        if self.support_size is None:
            old = np.where(mask, sampled, 0.0).astype(np.float32)
        else:
            likely = [likely_tokens(row, token, self.support_size) for row, token in zip(log_probs, ids, strict=True)]
            old = sample_log_probs(mask, sampled, likely, self.support_size)
        return RolloutSample(
            prompt=[], completion=[], input_ids=np.array(ids), completion_mask=np.array(mask), old_log_probs=old,
            advantage=float(advantage), model_version=version, group_id=self.groups,
            metrics={"reward": float(reward)}, enqueued_at=time.time(),
        )  # fmt: skip


def make_trainer(
    folder, output, engine, trainer_class=AsyncTrollGRPOTrainer, config_class=AsyncTrollGRPOConfig, **options
):
    options = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 10,
        "num_generations": GENERATIONS,
        "max_completion_length": 8,
        "max_steps": 5,
        "learning_rate": 5e-3,
        "token_budget": 0,
        "max_staleness": 10,
        "seed": 3,
        **options,
    }
    arguments = {
        "rollout_worker": engine,
        "reward_funcs": [no_reward],
        "processing_class": tiny_tokenizer(),
        "train_dataset": tiny_prompts(),
        "peft_config": None,
    }
    arguments = {name: options.pop(name, value) for name, value in arguments.items()}
    config = config_class(**options)
    if os.environ.get("FORCE_FSDP"):  # accelerate turns it on for accelerators only
        assert config.device.type == "cpu"  # creates the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return cpu_engine.make_cpu_trainer(trainer_class, folder, config, engine, **arguments)


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


def old_policy_rows(inputs):
    """What a rank was given: the rows `(M, 2K)` of its tokens."""
    return inputs["old_log_probs"][inputs["token_index"] >= 0]


def main(folder, output):
    """A rank of several: keeps what it was given, and, on the first rank, what the engine had sampled."""
    received = []

    class Recording(AsyncTrollGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            received.append(old_policy_rows(inputs).clone())
            return super().compute_loss(model, inputs, *args, **kwargs)

    engine = Engine(folder, age=1, support_size=6)
    trainer = make_trainer(folder, output, engine, Recording, support_size=6, max_steps=4, kl_bound=1e-3)
    trainer.train()
    rank = trainer.accelerator.process_index
    whole = lambda p: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert any(isinstance(p, DTensor) for p in model.parameters()) == bool(os.environ.get("FORCE_FSDP"))
    weights = {name: whole(p) for name, p in model.named_parameters()}
    given = [(s.old_log_probs, s.completion_mask) for s in engine.given]
    line = [line for line in trainer.state.log_history if "troll/kl_max" in line][-1]
    metrics = {name: value for name, value in line.items() if name.startswith("troll/")}
    saved = {"received": received, "given": given, "weights": weights, "metrics": metrics}
    torch.save(saved, Path(output, f"rank{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_together()

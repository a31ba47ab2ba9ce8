"""
TRL's asynchronous GRPO, whole, on a CPU, for tests and examples/asynchronous_cpu.py. TRL asks for a GPU in its
attention kernel, its transfer of weights and the name of the device. An `Engine` takes the place of vLLM, the rollout
worker and the transfer. It samples with weights that are a given number of versions old.
"""

import queue
import time

import numpy as np
import torch
import torch.nn.functional as F
import trl.experimental.async_grpo.async_grpo_trainer as trl_trainer
from transformers import AttentionInterface, AutoModelForCausalLM
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.tiny import padded_logits, sample_tokens, tiny_prompts, tiny_tokenizer
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, AsyncTrollGRPOTrainer

LENGTHS = (1, 5, 5, 5)  # tokens of a group's completions


def path_attention(
    module, query, key, value, attention_mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, scaling=None, **_
):
    """Each segment of a packed row attends to its path from the root: queries `(1, heads, N, D)`."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    segments = torch.arange(len(tree_cu_seqlens_q) - 1)
    on_path = torch.zeros(len(segments), query.shape[2], dtype=torch.bool)
    on_path[segments.repeat_interleave(tree_cu_seqlens_k.diff()), tree_kv_index] = True
    # A row is packed depth first: what precedes a token on its path precedes it in the row
    mask = on_path[segments.repeat_interleave(tree_cu_seqlens_q.diff())].tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2), None


class Engine:
    """
    A rollout worker, its queue, and the transfer of weights.

    Args:
        folder (`str`): the model's.
        age (`int`): versions between the newest weights and those that sample. The data loader takes a batch ahead.
        reward (`Callable`): of a completion's token ids.
    """

    def __init__(self, folder, age=0, reward=lambda ids: sum((7 * token) % 13 for token in ids) / (13 * len(ids))):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.age, self.reward = age, reward
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.weights = []  # one set of weights for each version
        self.pending, self.given = [], []
        self.version = self.groups = 0
        self.prompts = tiny_tokenizer()(list(tiny_prompts()["prompt"])).input_ids
        self.generator = torch.Generator().manual_seed(0)

    def group(self):
        """The samples of one prompt."""
        version = max(1, self.version - self.age)
        self.model.load_state_dict(self.weights[version - 1], strict=False)
        prompt = self.prompts[self.groups % len(self.prompts)]
        logits = lambda rows, _: padded_logits(self.model, rows)
        completions = sample_tokens(logits, [prompt] * len(LENGTHS), LENGTHS, self.generator)
        rewards = np.array([self.reward(ids) for ids in completions])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        self.groups += 1
        return [
            self.make_sample(prompt, ids, float(advantage), float(reward), version)
            for ids, advantage, reward in zip(completions, advantages, rewards, strict=True)
        ]

    @torch.no_grad()
    def make_sample(self, prompt, completion, advantage, reward, version):
        ids = torch.tensor(prompt + completion)
        log_probs = self.model(ids[None]).logits[0].float().log_softmax(-1)
        old = np.zeros(len(ids), np.float32)
        old[len(prompt) :] = log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        return RolloutSample(
            prompt=[], completion=[], input_ids=ids.numpy(), completion_mask=(np.arange(len(ids)) >= len(prompt)) * 1,
            old_log_probs=old, advantage=advantage, model_version=version, group_id=self.groups,
            metrics={"reward": reward}, enqueued_at=time.time(),
        )  # fmt: skip

    # -- The rollout worker and its queue

    def start(self):
        pass

    stop = start

    def update_model_version(self, model_version):
        self.version = model_version

    def check_health(self, stale_after_s):
        pass

    def qsize(self):
        return len(self.pending)

    def get(self, timeout=None):
        if not self.pending:
            self.pending = self.group()
        self.given.append(self.pending.pop(0))
        return self.given[-1]

    # -- The transfer of weights

    init_weight_transfer = pause = resume = destroy = start

    def send_weights(self, iterator):
        self.weights.append({name: tensor.detach().clone() for name, tensor in iterator})


def make_cpu_trainer(trainer_class, folder, config, engine, **kwargs):
    """A trainer of the model in `folder` that asks for no GPU; without an engine its worker and transfer are TRL's."""
    trl_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA for its name
    trainer = trainer_class(
        model=str(folder), args=config, **{"rollout_worker": engine, "weight_transfer": engine, **kwargs}
    )
    AttentionInterface.register(packing.TREE_ATTENTION, path_attention)  # after the trainer has registered its own
    return trainer


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
        "per_device_train_batch_size": 8,
        "num_generations": len(LENGTHS),
        "max_completion_length": 8,
        "max_steps": 5,
        "learning_rate": 5e-3,
        "token_budget": 0,
        "max_staleness": 10,
        "seed": 3,
        **options,
    }
    arguments = {
        "reward_funcs": [no_reward],
        "processing_class": tiny_tokenizer(),
        "train_dataset": tiny_prompts(),
        "peft_config": None,
    }
    arguments = {name: options.pop(name, value) for name, value in arguments.items()}
    return make_cpu_trainer(trainer_class, folder, config_class(**options), engine, **arguments)


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)

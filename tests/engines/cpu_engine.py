"""
TRL's asynchronous GRPO, whole, on a CPU, for tests and examples/asynchronous_cpu.py. TRL asks for a GPU in its
attention kernel, its transfer of weights and the name of the device. An `Engine` takes the place of vLLM, the rollout
worker and the transfer. It samples with weights that are a given number of versions old.
"""

import queue
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import trl.experimental.async_grpo.async_grpo_trainer as trl_trainer
from transformers import AttentionInterface, AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


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
    A rollout worker, its queue, and the transfer of weights. A subclass makes the samples, in `group`.

    Args:
        folder (`str` or `Path`): the model's.
        age (`int`): versions between the newest weights and those that sample. The data loader takes a batch ahead, so
            at the loss a sample is one version older, the first batch apart.
        support_size (`int`, *optional*): K; without one the samples carry the sampled log-probability alone.
    """

    def __init__(self, folder: str | Path, age: int = 0, support_size: int | None = None):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.age, self.support_size = age, support_size
        self.rollout_buffer, self.metrics_queue = self, queue.Queue[dict[str, float]]()
        self.weights: list[dict[str, torch.Tensor]] = []  # one set of weights for each version
        self.pending: list[RolloutSample] = []
        self.given: list[RolloutSample] = []
        self.version = 0

    def group(self) -> list[RolloutSample]:
        """Samples of the weights that [`load_weights`] loads."""
        raise NotImplementedError

    def load_weights(self) -> int:
        """Load the weights that sample now. Returns their version; the first is 1."""
        version = max(1, self.version - self.age)
        self.model.load_state_dict(self.weights[version - 1], strict=False)
        return version

    # -- The rollout worker

    def start(self):
        pass

    def stop(self):
        pass

    def update_model_version(self, model_version: int):
        self.version = model_version

    def check_health(self, stale_after_s: float):
        pass

    def qsize(self) -> int:
        return len(self.pending)

    def get(self, timeout: float | None = None) -> RolloutSample:
        if not self.pending:
            self.pending = self.group()
        self.given.append(self.pending.pop(0))
        return self.given[-1]

    # -- The transfer of weights

    def init_weight_transfer(self):
        pass

    def pause(self):
        pass

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]):
        self.weights.append({name: tensor.detach().clone() for name, tensor in iterator})

    def resume(self):
        pass

    def destroy(self):
        pass


def make_cpu_trainer(
    trainer_class: type[AsyncGRPOTrainer],
    folder: str | Path,
    config: AsyncGRPOConfig,
    engine: Engine | None,
    **kwargs: Any,
) -> AsyncGRPOTrainer:
    """A trainer of the model in `folder` that asks for no GPU; without an engine its worker and transfer are TRL's."""
    trl_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA for its name
    trainer = trainer_class(
        model=str(folder), args=config, **{"rollout_worker": engine, "weight_transfer": engine, **kwargs}
    )
    AttentionInterface.register(packing.TREE_ATTENTION, path_attention)  # after the trainer has registered its own
    return trainer

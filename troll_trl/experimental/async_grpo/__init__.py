"""
Asynchronous GRPO with a trust region around the engine's distribution, a swap of two lines for TRL's
`experimental.async_grpo`. Works with TRL 1.16 alone, and may change.

    trainer.py       AsyncTrollGRPOTrainer: bounds the policy that TRL's loss reads
    config.py        AsyncTrollGRPOConfig: the trust region's options, and what is refused
    engine.py        the old policy: what vLLM must answer for every token, and how this travels to the loss
    queue.py         the samples between worker and trainer, without those that cannot be trained on
    trl_compat.py    every private part of TRL's that this reaches into, checked at the start
"""

from troll_trl.experimental.async_grpo.config import AsyncTrollGRPOConfig
from troll_trl.experimental.async_grpo.engine import sample_log_probs
from troll_trl.experimental.async_grpo.trainer import AsyncTrollGRPOTrainer

__all__ = ["AsyncTrollGRPOConfig", "AsyncTrollGRPOTrainer", "sample_log_probs"]

"""
Asynchronous GRPO with a trust region around the engine's distribution, a swap of two names for TRL's
`experimental.async_grpo`. It works with the tested minor version of TRL alone, and may change with any release.

    trainer.py       AsyncTrollGRPOTrainer: bounds the policy that TRL's loss reads
    config.py        AsyncTrollGRPOConfig: the trust region's options, and what is refused
"""

from troll_trl.experimental.async_grpo.config import AsyncTrollGRPOConfig
from troll_trl.experimental.async_grpo.trainer import AsyncTrollGRPOTrainer

__all__ = ["AsyncTrollGRPOConfig", "AsyncTrollGRPOTrainer"]

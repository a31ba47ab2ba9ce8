"""
Asynchronous GRPO with a trust region around the engine's distribution. To use it, replace two names of TRL's
`experimental.async_grpo`. It works only with the tested minor version of TRL, and may change in any release.

    trainer.py       AsyncTrollGRPOTrainer: bounds the policy that TRL's loss reads
    config.py        AsyncTrollGRPOConfig: the trust region's options and their checks
"""

import trl

from troll_trl.compat import TESTED, install

try:  # TRL 1.18 has moved its trainer, and has none of the submodules
    from troll_trl.experimental.async_grpo.config import AsyncTrollGRPOConfig
    from troll_trl.experimental.async_grpo.trainer import AsyncTrollGRPOTrainer
except ImportError as error:
    raise ImportError(
        f"Asynchronous training works with trl {TESTED['trl'][-1]} only, and an import from trl {trl.__version__} "
        f"failed: {error}. {install('trl')}, or the extra [async]."
    ) from error

__all__ = ["AsyncTrollGRPOConfig", "AsyncTrollGRPOTrainer"]

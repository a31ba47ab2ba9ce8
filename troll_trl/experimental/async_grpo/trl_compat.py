"""
Every private part of TRL's asynchronous GRPO in use, and the check that it still exists. The rollout loop's attributes
exist only in its own process, so no run checks those. `tests/engines/test_async_compat.py` checks what the methods do,
`tests/trl/test_trl_compat.py` that no name is missing here.
"""

import trl
from transformers import Trainer

from troll_trl.trainers.trl_compat import (
    TESTED,
    Parts,
    check_attributes,
    check_methods,
    naming_versions,
    unsupported,
)

if trl.__version__.split(".")[:2] != TESTED["trl"].split("."):
    raise ImportError(unsupported("trl", "asynchronous training, experimental in TRL, needs this minor version"))
with naming_versions():
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, RolloutQueueDataset
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
    from trl.experimental.async_grpo.packing import TreeRow
    from trl.trainer.utils import is_async_callable  # noqa: F401

PARTS: Parts = {
    AsyncGRPOTrainer: {
        # Overridden. Reads `epsilon_low`, `epsilon_high`, `old_log_probs`, and the `log_probs` and `entropy` of the
        # given model at `token_index`
        "compute_loss": "self model inputs return_outputs num_items_in_batch",
        "log": "self logs start_time",  # overridden
        "_save_checkpoint": "self model trial",  # overridden; reads `_trained_groups`
        **dict.fromkeys(("rollout_worker", "vllm_client", "model_version")),  # read
        **dict.fromkeys(("epsilon_low", "epsilon_high", "rollout_queue", "_trained_groups")),  # set
        "_metrics": None,  # without `clip_ratio/*`
        **dict.fromkeys(("_name", "_paper", "_tag_names")),  # the model card's, overridden
    },
    # The trainer alone drains its `rollout_queue`
    RolloutQueueDataset: {"__iter__": "self"},
    AsyncRolloutWorker: {
        **{"start": "self", "stop": "self"},
        **dict.fromkeys(("_mp_ctx", "_process", "_failed_event", "_exception_info_queue")),  # read
        **dict.fromkeys(("_loop_cls", "_loop_kwargs", "_stop_event_mp")),  # set on the worker that TRL has made
    },
    _AsyncRolloutLoop: {
        **{"_post": "self path payload timeout", "_score_group": "self group"},  # overridden
        **dict.fromkeys(("reward_funcs", "reward_func_names", "_exception_info_queue", "_failed_event")),
    },
    # Takes, packs and pads `old_log_probs` of a sample also if a token has a row of numbers
    TreeRow: {"pack": "self"},
    Trainer: {"current_gradient_accumulation_steps": None},  # it exists from the first loss on
}


def check_async_trl() -> None:
    """[`check_methods`] of all of the above."""
    for owner, parts in PARTS.items():
        check_methods(owner, parts)


def check_async_made(trainer: AsyncGRPOTrainer) -> None:
    """[`check_attributes`] of a trainer that TRL's constructor has just made, and of TRL's own worker: a user's may
    derive from it and lack some, and only the main process has one."""
    check_attributes(AsyncGRPOTrainer, trainer, PARTS[AsyncGRPOTrainer])
    if type(trainer.rollout_worker) is AsyncRolloutWorker:
        check_attributes(AsyncRolloutWorker, trainer.rollout_worker, PARTS[AsyncRolloutWorker])

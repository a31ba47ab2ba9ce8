"""
Every private part of TRL's asynchronous GRPO in use, and the check that it still exists.
`tests/test_async_compat.py` checks what the methods do.
"""

from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow

from troll_trl.trainers.trl_compat import check_parameters

PARAMETERS: dict[type, dict[str, str]] = {
    AsyncGRPOTrainer: {
        # Overridden. Reads `epsilon_low`, `epsilon_high`, `old_log_probs`, and the `log_probs` and `entropy` of the
        # given model at `token_index`
        "compute_loss": "self model inputs return_outputs num_items_in_batch",
        # Overridden: no `clip_ratio/*` of `_metrics`
        "log": "self logs start_time",
    },
    # The trainer alone drains its `rollout_queue`, which is replaced
    RolloutQueueDataset: {"__iter__": "self"},
    # `_loop_cls` and `_loop_kwargs` are set on the worker that TRL has made
    AsyncRolloutWorker: {"start": "self", "_loop_cls": ""},
    # Subclassed, with both methods overridden
    _AsyncRolloutLoop: {"_post": "self path payload timeout", "_score_group": "self group"},
    # Takes, packs and pads `old_log_probs` of a sample also if a token has a row of numbers
    TreeRow: {"pack": "self"},
}


def check_async_trl() -> None:
    """Raise an `ImportError` unless the installed TRL has all of the above, see [`check_parameters`]."""
    for owner, methods in PARAMETERS.items():
        check_parameters(owner, methods)

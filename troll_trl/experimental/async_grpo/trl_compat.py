"""Every private part of TRL's asynchronous GRPO that is reached into, and the check that it is still there.

AsyncGRPOTrainer.compute_loss        overridden; reads `epsilon_low`, `epsilon_high`, `token_index`, `old_log_probs`;
                                     and at `token_index` the `log_probs` and `entropy` of the model that it is given
AsyncGRPOTrainer._metrics            `clip_ratio/*` removed
AsyncGRPOTrainer.rollout_queue       replaced after construction: the trainer alone drains it
_AsyncRolloutLoop                    subclassed: `_post` and `_score_group` overridden
AsyncRolloutWorker                   `_loop_cls` and `_loop_kwargs` set on the worker that TRL has made
RolloutSample.old_log_probs, TreeRow.pack
                                     numbers of a token may be a row: they are taken along, packed and padded

What these methods must say is a test (`tests/test_async_compat.py`).
"""

from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow

from troll_trl.trainers.trl_compat import check_parameters

PARAMETERS: dict[type, dict[str, tuple[str, ...]]] = {
    AsyncGRPOTrainer: {
        "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        "log": ("self", "logs", "start_time"),
    },
    RolloutQueueDataset: {"__iter__": ("self",)},
    AsyncRolloutWorker: {"start": ("self",), "_loop_cls": ()},
    _AsyncRolloutLoop: {"_post": ("self", "path", "payload", "timeout"), "_score_group": ("self", "group")},
    TreeRow: {"pack": ("self",)},
}


def check_async_trl() -> None:
    """
    Check that the installed TRL still has what is listed above, by name and parameters.

    Raises:
        ImportError: a name has moved; the message says which, the installed version and the tested one.
    """
    for owner, methods in PARAMETERS.items():
        check_parameters(owner, methods)

"""What asynchronous GRPO rests on in TRL: names and parameters, which are checked at start as well, and what the
methods say, which is only checked here."""

import inspect

import pytest
from async_engine import Engine, make_trainer
from tiny import saved_model
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow

from troll_trl.experimental.async_grpo import trl_compat

PHRASES = {
    (AsyncGRPOTrainer, "compute_loss"): (
        'selected = inputs["token_index"] >= 0',
        'old_log_probs = inputs["old_log_probs"][selected]',
        "log_probs = outputs.log_probs.flatten()[token_index]",
        "entropy = outputs.entropy.flatten()[token_index]",
        "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
        "tokens_per_rank = (global_n_tokens / world_size).clamp(min=1.0)",
        "loss = loss / self.current_gradient_accumulation_steps",
    ),
    (AsyncGRPOTrainer, "log"): ("self._metrics[mode].items()",),
    (AsyncGRPOTrainer, "get_train_dataloader"): ("rollout_queue=self.rollout_queue",),
    (RolloutQueueDataset, "__iter__"): (
        "self.queue.get(timeout=self.poll_interval_s)",
        '"old_log_probs": sample.old_log_probs',
    ),
    (TreeRow, "pack"): (
        'sample[key].tolist() for key in ("input_ids", "completion_mask", "old_log_probs")',
        "old_log_probs.append(logps[p])",
    ),
    (AsyncRolloutWorker, "start"): ("self._loop_cls", "self._loop_kwargs"),
    (_AsyncRolloutLoop, "_generate_one_turn"): (
        'self._post("/v1/completions", payload, self.request_timeout)',
        'return choice["token_ids"], choice["logprobs"]["token_logprobs"]',
    ),
    (_AsyncRolloutLoop, "_score_group"): ("group.completions_sequences", "for seq in sequences:"),
}


@pytest.mark.upstream
@pytest.mark.parametrize(("owner", "name"), PHRASES)
def test_methods_say_what_the_overrides_rest_on(owner, name):
    source = inspect.getsource(getattr(owner, name))
    for phrase in PHRASES[owner, name]:
        assert phrase in source, f"{owner.__name__}.{name} no longer contains `{phrase}`"


@pytest.mark.parametrize(("owner", "name"), [(AsyncGRPOTrainer, "compute_loss"), (_AsyncRolloutLoop, "_post")])
def test_what_has_moved_is_named_at_the_start(owner, name, monkeypatch, tmp_path):
    trl_compat.check_async_trl()
    folder = saved_model(tmp_path)
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.raises(
        ImportError, match=rf"does not support trl .*`{owner.__name__}\.{name}` takes .*tested with trl"
    ):
        make_trainer(folder, tmp_path, Engine(folder))

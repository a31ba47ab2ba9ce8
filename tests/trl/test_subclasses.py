"""What a user builds on a trainer: a loss of its own, a callback, and a reader of the trust region's metrics."""

import pytest
import torch
from transformers import TrainerCallback
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer


@pytest.mark.parametrize(("base", "config"), [(TrollGRPOTrainer, TrollGRPOConfig), (TrollRLOOTrainer, TrollRLOOConfig)])
def test_a_subclass_that_overrides_the_loss_trains_what_it_returns(base, config, tmp_path):
    seen = []

    class Halved(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            seen.append((loss.item(), self.finite_guard.loss_mask is None, "completion_mask" in inputs))
            return 0 * loss

    trainer = make_trainer(Halved, config, tmp_path, max_steps=2, beta=0.0)
    before = weights(trainer)
    trainer.train()
    assert len(seen) == 2 and all(live_is_none and has_mask for _, live_is_none, has_mask in seen)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
    assert max(logged(trainer, "troll/kl_max")) < 1e-6, "its policy has not moved"


def test_a_subclass_whose_loss_is_not_finite_is_guarded(tmp_path):
    class Broken(TrollGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, inputs, *args, **kwargs) * torch.nan

    trainer = make_trainer(Broken, TrollGRPOConfig, tmp_path, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert logged(trainer, "troll/skipped_updates") == [1]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())


def test_a_callback_and_a_reader_of_the_metrics_see_every_update(tmp_path):
    class Reader(TrainerCallback):
        def __init__(self):
            self.steps, self.tokens = [], []

        def on_step_end(self, args, state, control, **kwargs):
            self.steps.append(state.global_step)
            self.tokens.append(trainer.troll_metrics["train"].state_dict()["sums"]["tokens"])

    reader = Reader()
    trainer = make_trainer(TrollGRPOTrainer, TrollGRPOConfig, tmp_path, max_steps=3)
    trainer.add_callback(reader)
    trainer.train()
    assert reader.steps == [1, 2, 3] and all(count > 0 for count in reader.tokens)
    assert len(logged(trainer, "troll/projected_fraction")) == 3
    assert trainer.troll_metrics["train"].pop() == {}, "a log line takes what was counted"

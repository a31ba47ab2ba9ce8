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
            seen.append("completion_mask" in inputs)
            return 0 * loss

    trainer = make_trainer(Halved, config, tmp_path, max_steps=2, beta=0.0)
    before = weights(trainer)
    trainer.train()
    assert seen == [True, True]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
    assert max(logged(trainer, "troll/kl_max")) < 1e-6, "its policy has not moved"


def test_advantages_of_each_token_are_weighed_by_token(tmp_path):
    """TRL offers `(B, C)` to subclasses. Equal ones are the completion's."""

    class OfTokens(TrollGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return batch | {"advantages": batch["advantages"].unsqueeze(1).expand(batch["completion_ids"].shape)}

    options = {"max_steps": 3, "kl_bound": 0.01, "learning_rate": 2e-2}
    runs = []
    for kind in (OfTokens, TrollGRPOTrainer):
        runs.append(make_trainer(kind, TrollGRPOConfig, tmp_path, **options))
        runs[-1].train()
    for name, weight in weights(runs[0]).items():
        torch.testing.assert_close(weight, weights(runs[1])[name], rtol=0, atol=1e-5)


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


def test_a_subclass_that_calls_the_inner_loss_is_bounded(tmp_path):
    """Only `compute_loss` was overridden: this one trained without any limit on its ratios."""

    class Inner(TrollGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return self._compute_loss(model, inputs)

    runs = []
    for kind in (Inner, TrollGRPOTrainer):
        options = {"max_steps": 3, "kl_bound": 0.01, "learning_rate": 2e-2}
        runs.append(make_trainer(kind, TrollGRPOConfig, tmp_path, **options))
        runs[-1].train()
    assert max(logged(runs[0], "troll/projected_fraction")) > 0
    assert all(torch.equal(weight, weights(runs[1])[name]) for name, weight in weights(runs[0]).items())

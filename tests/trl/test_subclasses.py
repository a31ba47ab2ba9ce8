"""Subclasses of the trainer: a loss that lost its trust region says so, or is refused."""

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from tests.trl_comparison import OURS, make_trainer, off_policy, weights
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

UNBOUNDED = "has no trust region"


@pytest.mark.parametrize(("algorithm", "trl"), [("grpo", GRPOTrainer), ("rloo", RLOOTrainer)])
def test_trls_own_loss_is_refused(algorithm, trl, tmp_path):
    """It would train without a trust region and without a clip."""
    trainer_class, config_class = OURS[algorithm]
    stock = type("Stock", (trainer_class,), {"_compute_loss": trl._compute_loss})
    with pytest.raises(TypeError, match=r"Stock\._compute_loss is TRL's own"):
        make_trainer(stock, config_class, tmp_path)


def test_a_loss_of_the_users_own_trains_and_says_that_it_has_no_limit(tmp_path, caplog):
    class Own(TrollGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return sum(parameter.sum() for parameter in model.parameters())

    trainer = make_trainer(Own, TrollGRPOConfig, tmp_path, max_steps=2)
    start = weights(trainer)
    trainer.train()
    assert any(not torch.equal(start[name], value) for name, value in weights(trainer).items())
    assert caplog.text.count(UNBOUNDED) == 1


def test_a_term_added_to_the_loss_says_nothing(tmp_path, caplog):
    class Added(TrollGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 0.0

    make_trainer(Added, TrollGRPOConfig, tmp_path, max_steps=2).train()
    assert UNBOUNDED not in caplog.text


def score(trainer, model, inputs):
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_second_scoring_pass_within_the_loss_is_refused(algorithm, tmp_path, monkeypatch):
    """The trust region would act twice: weights differed by 0.95 of their movement."""
    trainer, inputs = off_policy(algorithm, tmp_path)
    trl = GRPOTrainer if algorithm == "grpo" else RLOOTrainer
    original = trl._compute_loss

    def scoring_twice(self, model, inputs):
        score(self, model, inputs)
        return original(self, model, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(trl, "_compute_loss", scoring_twice)
        with pytest.raises(RuntimeError, match="scored twice in one loss"):
            trainer.compute_loss(trainer.model, inputs)
    trainer.compute_loss(trainer.model, inputs)
    log_probs, *_ = score(trainer, trainer.model, inputs)  # after the loss: the policy's own, unbounded
    mask = inputs["completion_mask"].bool()
    assert (log_probs - inputs["old_sparse_logps"][..., 0])[mask].abs().max() > 0.05


def test_a_subclass_with_its_own_off_policy_mask_gets_the_policys_own_numbers(tmp_path):
    """A subclass's static function read the projection's log-probabilities, and advantages with the regression."""
    seen = []

    class Masked(TrollGRPOTrainer):
        @staticmethod
        def get_off_policy_mask(**inputs):
            seen.append(inputs)
            return GRPOTrainer.get_off_policy_mask(**inputs)

    options = {"kl_bound": 1e-6, "off_policy_mask_threshold": 0.1, "learning_rate": 2e-2, "max_steps": 3}
    trainer = make_trainer(Masked, TrollGRPOConfig, tmp_path, **options)
    trainer.train()
    inputs = dict(trainer._buffered_inputs[0])
    seen.clear()
    trainer.compute_loss(trainer.model, inputs)
    (given,) = seen
    live = inputs["completion_mask"].bool()
    assert (given["per_token_logps"] - inputs["old_per_token_logps"])[live].abs().max() > 0.05
    assert torch.equal(given["advantages"].squeeze(1), inputs["advantages"])

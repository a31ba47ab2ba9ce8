"""What every log line says about the run's cost."""

import torch
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from tests.trl_comparison import make_trainer
from troll_trl.trainers import run_cost
from troll_trl.trainers.clip import ClipGRPOTrainer
from troll_trl.trainers.run_cost import RunCost


def begun(monkeypatch, state: TrainerState) -> RunCost:
    """The cost of a training that begins, or resumes, from a `state` at 1000 seconds."""
    cost = RunCost()
    monkeypatch.setattr(run_cost.time, "monotonic", lambda: 1000.0)
    cost.on_train_begin(None, state, None)
    return cost


def so_far(cost: RunCost) -> tuple[float, float]:
    logs = cost.metrics(torch.device("cpu"))
    return logs["cost/completions"], logs["cost/minutes"]


def test_the_clock_runs_while_a_training_does_and_goes_on_when_it_is_resumed(monkeypatch):
    assert so_far(RunCost()) == (0, 0), "an evaluation may precede the training"
    cost = begun(monkeypatch, TrainerState(stateful_callbacks=[RunCost()]))
    monkeypatch.setattr(run_cost.time, "monotonic", lambda: 1090.0)
    cost.completions += 512
    assert so_far(cost) == (512, 1.5)
    saved = {"RunCost": cost.state()}
    cost.on_train_end(None, None, None)
    monkeypatch.setattr(run_cost.time, "monotonic", lambda: 5000.0)
    assert so_far(cost) == (512, 1.5)
    assert so_far(begun(monkeypatch, TrainerState(global_step=1, stateful_callbacks=saved))) == (512, 1.5)
    assert so_far(begun(monkeypatch, TrainerState(stateful_callbacks=saved))) == (0, 0), "a second training"


def test_a_run_that_makes_a_rollout_batch_again_counts_it_twice(tmp_path):
    """TRL's trainer drops the rollout batch of a checkpoint. Its own checkpoints have no cost, and no place for it."""
    options = {"steps_per_generation": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(ClipGRPOTrainer, GRPOConfig, tmp_path, max_steps=1, **options).train()
    resumed = make_trainer(ClipGRPOTrainer, GRPOConfig, tmp_path, max_steps=3, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-1]["cost/completions"] == 32
    make_trainer(GRPOTrainer, GRPOConfig, tmp_path / "trl", max_steps=1, **options).train()
    resumed = make_trainer(ClipGRPOTrainer, GRPOConfig, tmp_path / "trl", max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-1]["cost/completions"] == 16

"""What every log line says about the run's cost."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from troll_trl.trainers import run_cost
from troll_trl.trainers.run_cost import RunCost


def cost(step, before, seconds, monkeypatch, **options):
    """What the log line of a step has after so many seconds of a run whose log had lines `before` it."""
    args = SimpleNamespace(**{"gradient_accumulation_steps": 1, "generation_batch_size": 512} | options)
    callback, state = RunCost(), TrainerState(log_history=before)
    monkeypatch.setattr(run_cost.time, "monotonic", lambda: 1000.0)
    if step:  # else an evaluation precedes the training
        callback.on_train_begin(args, state, None)
    monkeypatch.setattr(run_cost.time, "monotonic", lambda: 1000.0 + seconds)
    state.log_history.append({})
    state.global_step = step
    callback.on_log(args, state, None)
    return [state.log_history[-1][name] for name in ("cost/completions", "cost/minutes")]


@pytest.mark.parametrize(("n", "k", "accumulated", "completions"), [
    (8, 4, 1, [0, 512, 512, 1024]),
    (8, 1, 1, [0, 512, 2048, 2560]),
    (4, 2, 4, [0, 512, 8192, 8704]),  # two updates of four micro-batches
    (1, 1, 2, [0, 1024, 32768, 33792]),  # two generations in each update
])  # fmt: skip
def test_a_generation_counts_from_its_first_update_on(n, k, accumulated, completions, monkeypatch):
    options = {"steps_per_generation": n, "num_iterations": k, "gradient_accumulation_steps": accumulated}
    assert [cost(step, [], 0, monkeypatch, **options)[0] for step in (0, 1, 32, 33)] == completions


def test_a_resumed_run_continues_its_clock(monkeypatch):
    options = {"steps_per_generation": 1, "num_iterations": 1}
    assert cost(1, [], 90, monkeypatch, **options)[1] == 1.5
    assert cost(1, [{"cost/minutes": 2.0}, {"loss": 1.0}], 90, monkeypatch, **options)[1] == 3.5

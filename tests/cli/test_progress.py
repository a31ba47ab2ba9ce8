"""The lines that a training prints into a log file, where stderr is no terminal."""

from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from troll_trl.cli import progress
from troll_trl.cli.progress import ProgressLine, RunCost


@pytest.fixture
def printed(capsys):
    """What a training prints that logs these lines after its first update."""

    def printed(*lines: dict) -> list[str]:
        line, state, control = ProgressLine(), TrainerState(max_steps=4), TrainerControl()
        line.on_train_begin(None, state, control)
        state.global_step = 1
        line.on_step_end(None, state, control)
        for logs in lines:
            line.on_log(None, state, control, logs=logs)
        line.on_train_end(None, state, control)
        said = capsys.readouterr()
        return (said.err + said.out).splitlines()

    return printed


def test_a_log_line_without_any_reward_leaves_the_column_out(printed):
    """TRL logs `None` if no row had a reward, and its format ended the run with a `TypeError`."""
    train, evaluation = printed({"reward": None, "loss": 0.5}, {"eval_reward": None, "eval_completions/mean_length": 3})
    assert train.startswith("step 1/4, ") and train.endswith(": loss 0.5")
    assert evaluation.startswith("eval step 1/4, ") and evaluation.endswith(": length 3")


def test_a_log_file_has_lines_alone(printed):
    """The empty bar was drawn once, and the first line followed it: `0%|   | 0/4 [00:00<?, ?it/s]step 1/4`."""
    assert [line.partition(",")[0] for line in printed({"reward": 0.5}, {"reward": 0.6})] == ["step 1/4"] * 2


def cost(step, before, seconds, monkeypatch, **options):
    """What the log line of a step has after so many seconds of a run whose log had lines `before` it."""
    args = SimpleNamespace(**{"gradient_accumulation_steps": 1, "generation_batch_size": 512} | options)
    callback, state = RunCost(), TrainerState(log_history=before)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    callback.on_train_begin(args, state, None)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0 + seconds)
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

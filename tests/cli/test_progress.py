"""The lines that a training prints into a log file, where stderr is no terminal."""

import pytest
from transformers import TrainerControl, TrainerState

from troll_trl.cli.progress import ProgressLine


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

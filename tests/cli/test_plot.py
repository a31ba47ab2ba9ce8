"""troll plot: which file of a run is read, the table of last values, and the picture."""

import json

import pytest

from troll_trl.cli import plot


def write_run(folder, rewards, method="troll", kl=0.01):
    """A run that logged these rewards, an evaluation at its end, and its config."""
    folder.mkdir(parents=True)
    lines = [{"step": 2 * n, "reward": reward, "entropy": 1.0 / n} for n, reward in enumerate(rewards, 1)]
    lines = [line | ({"troll/policy_kl_mean": kl} if method == "troll" else {}) for line in lines]
    lines += [{"step": lines[-1]["step"], "eval_reward": rewards[-1] / 2}, {"step": lines[-1]["step"], "train_loss": 1}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    (folder / "config.yaml").write_text(f"method: {method}\n")
    return folder


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / "a", [0.1, 0.3]),
        write_run(tmp_path / "b", [0.2, 0.5]),
        write_run(tmp_path / "c", [0.2, 0.1], "clip"),
    ]


def test_a_stopped_run_is_read_from_its_newest_checkpoint(tmp_path):
    for step, rewards in ((9, [0.1, 0.2]), (10, [0.1, 0.2, 0.4])):
        write_run(tmp_path / "run" / f"checkpoint-{step}", rewards)
    (tmp_path / "run" / "checkpoint-11").mkdir()
    write_run(tmp_path / "run" / "checkpoint-best", [0.1])  # a copy of the user's
    assert plot.read_log(tmp_path / "run")["reward"].iloc[-1] == 0.4


def test_a_resumed_run_is_read_from_the_state_that_reaches_the_latest_update(tmp_path):
    """A run that was finished at update 4 and resumed to update 8 was drawn up to 4."""
    run = write_run(tmp_path / "run", [0.1, 0.2])
    write_run(run / "checkpoint-8", [0.1, 0.2, 0.3, 0.4])
    assert plot.read_log(run)["reward"].to_dict() == {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4}
    write_run(tmp_path / "run" / "finished", [0.1, 0.2, 0.3, 0.4, 0.5])
    (run / "finished" / "trainer_state.json").rename(run / "trainer_state.json")
    assert plot.read_log(run)["reward"].iloc[-1] == 0.5


def test_the_table_has_last_values_averaged_over_a_group(runs):
    logs = {run: plot.read_log(run) for run in runs}
    table = plot.last_values(logs, {run: plot.group_of(run, "method") for run in runs})
    assert table.loc["method troll", "reward"] == pytest.approx(0.4) and table.loc["method clip", "reward"] == 0.1
    assert table["troll/policy_kl_mean"].isna().to_dict() == {"method troll": False, "method clip": True}
    alone = plot.last_values(logs, {run: plot.group_of(run, None) for run in runs})
    assert list(alone["eval_reward"]) == [0.15, 0.25, 0.05] and list(alone["updates"]) == [4, 4, 4]


def test_runs_are_drawn_against_what_they_cost(tmp_path, capsys, monkeypatch):
    """Two runs of unequal schedule: one uses each of 64 completions once, the other each of 32 twice."""
    runs, drawn = [], {}
    for name, completions, minutes in (("once", [64, 128], [0.5, 1.0]), ("twice", [32, 32], [1.0, 3.0])):
        run = write_run(tmp_path / name, [0.1, 0.2])
        state = json.loads((run / "trainer_state.json").read_text())
        for line in state["log_history"]:
            place = line["step"] // 2 - 1
            line |= {"cost/completions": completions[place], "cost/minutes": minutes[place]}
        (run / "trainer_state.json").write_text(json.dumps(state))
        runs.append(run)
    monkeypatch.setattr(plot, "draw", lambda logs, groups, x, file: drawn.update({x: [*logs.values()]}))
    for x in ("updates", "completions", "minutes"):
        plot.main([*map(str, runs), "--x", x])
    assert [[*log["reward"].dropna().index] for log in drawn["updates"]] == [[2, 4], [2, 4]]
    assert [[*log["reward"].dropna().index] for log in drawn["completions"]] == [[64, 128], [32, 32]]
    assert [[*log["reward"].dropna().index] for log in drawn["minutes"]] == [[0.5, 1.0], [1.0, 3.0]]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "once" in line] == ["4", "128", "1"]


def test_a_run_that_did_not_log_its_cost_is_named(runs, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(runs[0]), "--x", "minutes"])
    assert f"{runs[0]} logged no `cost/minutes`" in capsys.readouterr().err.replace("\n", " ")


def test_the_command_writes_one_picture_and_prints_the_table(runs, tmp_path, capsys):
    plot.main([*map(str, runs), "--group", "method", "--output", str(tmp_path / "new" / "all.png")])
    assert "method clip" in capsys.readouterr().out
    assert (tmp_path / "new" / "all.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["trainer_state.json", "config.yaml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, name):
    (write_run(tmp_path / "run", [0.1]) / name).write_text("{")
    with pytest.raises(SystemExit) as stop:
        plot.main([str(tmp_path / "run"), "--group", "method"])
    assert stop.value.code == 2 and name in capsys.readouterr().err

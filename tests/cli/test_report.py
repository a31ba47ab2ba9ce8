"""scripts/report.py: run folders read, seeds grouped, metrics averaged, figures drawn, one page written."""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from repository import ROOT
from transformers import TrainerState

from troll_trl import TrollGRPOConfig, TrollRLOOConfig
from troll_trl.cli.progress import PeakMemory
from troll_trl.report import figures, metrics
from troll_trl.report.page import warnings_of
from troll_trl.report.runs import TOKENS_PER_SECOND, Group, ReportError, load_groups, load_run
from troll_trl.trust_region import DEFAULT_KL_BOUND

SCRIPT = ROOT / "scripts" / "report.py"
ACCURACY = "rewards/math_accuracy_reward/mean"


def troll_line(step: int, **values) -> dict:
    """A log line as TRL and `TrollMetrics` write it, here of 2 s per update and 100 tokens per update."""
    kl = {"troll/policy_kl_max": 1.0 + step, "troll/policy_kl_mean": 0.1, "troll/kl_max": 0.05, "troll/kl_mean": 0.01}
    troll = {"troll/projected_fraction": 0.1, "troll/eta_mean": 0.7, "troll/regression": 0.01} | kl
    return trl_line(step) | troll | {"troll/support_size_mean": 9.0, "troll/rest_mass_mean": 1e-6} | values


def clip_line(step: int, **values) -> dict:
    clip = {"clip_ratio/region_mean": 0.04, "clip_ratio/low_mean": 0.03, "clip_ratio/high_mean": 0.01}
    return trl_line(step) | clip | values


def trl_line(step: int) -> dict:
    completions = {"completions/mean_length": 50.0, "completions/clipped_ratio": 0.25}
    rewards = {"reward": step / 10, ACCURACY: step / 20, "rewards/form/mean": -1.0}
    training = {"loss": 0.0, "grad_norm": 1.5, "learning_rate": 1e-6, "entropy": 0.5, "num_tokens": 100.0 * step}
    return {"step": step, "epoch": step / 100, "step_time": 2.0} | completions | rewards | training


def write_state(folder: Path, lines: list[dict], settings: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    step = max((line.get("step", 0) for line in lines), default=0)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": lines}))
    if settings is not None:
        (folder / "config.yaml").write_text(settings)
    return folder


def write_troll(folder: Path, last: int = 10, settings: str | None = None, **values) -> Path:
    return write_state(folder, [troll_line(step, **values) for step in range(1, last + 1)], settings)


# -- Reading ----------------------------------------------------------------------------------------------------------


def test_time_is_the_mean_of_a_line_times_its_updates(tmp_path):
    """`step_time` of a line is the mean since the line before, here of 1, 7, 8 and (two lines' worth) 16 updates."""
    lines = [troll_line(1, step_time=10.0), troll_line(8, step_time=2.0), troll_line(16, step_time=3.0)]
    torn = troll_line(24)
    del torn["step_time"]
    run = load_run(
        write_state(tmp_path, [*lines, torn, troll_line(32, step_time=1.0), {"step": 12, "eval_reward": 0.5}])
    )
    steps = np.array([0, 1, 8, 12, 16, 24, 32])
    assert run.seconds(steps).tolist() == [0, 10, 24, 36, 48, 56, 64]


def test_throughput_is_a_batch_over_the_time_of_all_its_updates(tmp_path):
    """Logged at every update, tokens come with the first of four updates, which is slow since it generates."""
    lines, tokens = [], 0.0
    for step in range(1, 15):
        line = troll_line(step, step_time=7.0 if step % 4 == 1 else 1.0)
        del line["num_tokens"]
        if step % 4 == 1:
            tokens += 1000.0 * step
            line["num_tokens"] = tokens
        lines.append(line)
    throughput = load_run(write_state(tmp_path, lines)).values(TOKENS_PER_SECOND)
    assert throughput.index.tolist() == [1, 5, 9]  # the run ends within the fourth batch
    assert throughput.tolist() == pytest.approx([1000 / 10, 5000 / 10, 9000 / 10])


def test_values_that_are_no_finite_numbers_are_left_out_and_said(tmp_path):
    lines = [troll_line(step) for step in (1, 2, 3)]
    lines[0]["grad_norm"], lines[1]["grad_norm"], lines[2]["entropy"] = math.nan, math.inf, None
    lines[1]["kind"] = "text"
    run = load_run(write_state(tmp_path, lines))
    assert run.values("grad_norm").index.tolist() == [3]
    assert run.values("entropy").index.tolist() == [1, 2]
    assert run.notes == ["Values that are NaN or infinite are left out: grad_norm."]


def test_updates_repeated_by_a_resumed_run_count_once_the_last_time(tmp_path):
    lines = [troll_line(step, entropy=1.0) for step in (1, 2, 3, 4)]
    lines += [troll_line(step, entropy=2.0) for step in (3, 4, 5)] + [{"step": 4, "eval_reward": 0.5}]
    run = load_run(write_state(tmp_path, lines))
    assert run.values("entropy").to_dict() == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2}
    assert run.values("eval_reward").index.tolist() == [4]  # an evaluation and a training line share an update
    assert run.seconds(np.array([5.0])) == 10


def test_newest_checkpoint_of_a_run_without_a_state_of_its_own(tmp_path):
    for step in (2, 10, 9):  # by number and not by name
        write_troll(tmp_path / f"checkpoint-{step}", last=step)
    (tmp_path / "config.yaml").write_text("kl_bound: 0.2")
    run = load_run(tmp_path)
    assert run.last_update == 10 and run.state_file.parent.name == "checkpoint-10"
    assert load_run(tmp_path / "checkpoint-9").settings["kl_bound"] == 0.2
    assert load_run(tmp_path / "checkpoint-9" / "trainer_state.json").last_update == 9


def test_torn_state_falls_back_to_the_newest_whole_checkpoint(tmp_path):
    for step in (2, 4, 6):
        write_troll(tmp_path / f"checkpoint-{step}", last=step)
    torn = (write_troll(tmp_path) / "trainer_state.json").read_bytes()
    (tmp_path / "trainer_state.json").write_bytes(torn[: len(torn) // 2])
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_bytes(b"\xff\xfe{")
    run = load_run(tmp_path)
    assert run.last_update == 4
    assert all("is torn, or not" in note for note in run.notes) and "checkpoint-6" in run.notes[1]
    assert run.state_file.parent.name == "checkpoint-4"


@pytest.mark.parametrize("last", [11, 14])
def test_resumed_and_stopped_run_is_continued_from_its_checkpoint(tmp_path, last):
    """One more update was overlooked, as the last line of the earlier training made both logs equally long."""
    end = {"step": 10, "train_runtime": 99.0, "train_loss": 0.0}
    write_state(tmp_path, [*(troll_line(step) for step in range(1, 11)), end])
    write_troll(tmp_path / f"checkpoint-{last}", last=last)
    run = load_run(tmp_path)
    assert run.last_update == last and run.state_file.parent.name == f"checkpoint-{last}"


def test_updates_after_the_last_full_line_are_in_the_line_that_ends_the_training(tmp_path):
    """20 updates with a line every 8 were reported as 16."""
    end = troll_line(20) | {"train_runtime": 99.0, "train_loss": 0.0, "reward": 0.875}
    write_state(tmp_path, [troll_line(8), troll_line(16), end])
    run = load_run(tmp_path)
    assert run.last_update == 20 and run.values("reward")[20] == 0.875 and "train_loss" not in run.log
    write_state(tmp_path, [troll_line(8), {"step": 8, "train_runtime": 99.0, "train_loss": 0.0}])
    assert load_run(tmp_path).last_update == 8


def test_checkpoint_of_another_run_in_the_same_folder_is_not_mixed_in(tmp_path):
    write_troll(tmp_path, last=5)
    write_troll(tmp_path / "checkpoint-14", last=14, entropy=3.0)
    assert load_run(tmp_path).last_update == 5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is not a run: it holds no trainer_state.json"),
        ('{"log_history": [{"ste', "is torn, or not a trainer's state"),
        ('{"log_history": []}', "no line of its `log_history` holds a `step`"),
        ('{"log_history": [{"loss": 1.0}]}', "no line of its `log_history` holds a `step`"),
    ],
)
def test_folder_without_a_usable_state(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(ReportError) as error:
        load_run(tmp_path)
    assert str(tmp_path) in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize("settings", ["a: [1", "- 1", "", "kl_bound: high", "kl_bound: null"])
def test_settings_that_cannot_be_read_are_noted(tmp_path, settings):
    """A bound that is not a number ended in a traceback."""
    run = load_run(write_troll(tmp_path, settings=settings))
    assert "kl_bound" not in run.settings and "cannot be read as settings" in run.notes[0]


def aliases(levels: int, width: int, head: str) -> str:
    """A YAML file of lists of aliases of lists, of `width` to the power of `levels` words."""
    lines = [f"a0: &a0 {head}"]
    for level in range(1, levels):
        names = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} " + (f"{{<<: [{names}]}}" if head[0] == "{" else f"[{names}]"))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "settings",
    [aliases(30, 10, "[x]"), aliases(60, 2, "[x]"), aliases(30, 10, "{x: y}"), "a: " + "[" * 600],
    ids=["wide", "deep", "merged", "nested"],
)
def test_settings_of_aliases_are_not_written_out(tmp_path, settings):
    """Each level took ten times longer; these would never end."""
    run = load_run(write_troll(tmp_path, settings=settings))
    assert "kl_bound" not in run.settings and "cannot be read as settings" in run.notes[0]


def test_a_few_aliases_are_settings_as_any(tmp_path):
    """The training writes an alias for a list that two settings share."""
    run = load_run(write_troll(tmp_path, settings="a: &list [q_proj, v_proj]\nb: *list\nkl_bound: 0.2"))
    assert run.settings["b"] == ["q_proj", "v_proj"] and run.settings["kl_bound"] == 0.2 and not run.notes


def test_a_run_that_resumed_with_other_settings_shows_all_and_is_held_to_no_bound(tmp_path):
    folder = write_troll(
        tmp_path, settings="kl_bound: 0.05\nlearning_rate: 3.0e-06\nresume: true", **{"troll/kl_max": 0.1}
    )
    (folder / "config-until-checkpoint-10.yaml").write_text("kl_bound: 0.05\nlearning_rate: 1.0e-06")
    (folder / "config-until-checkpoint-4.yaml").write_text("kl_bound: 0.1\nlearning_rate: 1.0e-06\noutput_dir: old")
    run = load_run(folder)
    groups = [Group("x", [run])]
    [shown] = groups[0].settings.to_dict("records")
    assert shown == {"method": "troll", "kl_bound": "0.1, then 0.05", "learning_rate": "1e-06, then 3e-06"}
    assert "It resumed with other settings: `kl_bound` 0.1, then 0.05; `learning_rate`" in " ".join(run.notes)
    assert groups[0].kl_bound is None and not list(warnings_of(groups))


def test_a_run_that_resumed_with_its_default_spelled_out_has_a_bound(tmp_path):
    folder = write_troll(tmp_path, settings="kl_bound: 0.05")
    (folder / "config-until-checkpoint-4.yaml").write_text("method: troll")
    assert load_groups([str(folder)])[0].kl_bound == 0.05


def test_peak_memory_is_in_the_log_history(monkeypatch):
    state = TrainerState(log_history=[{"step": 1}, {"step": 2}])
    PeakMemory().on_log(SimpleNamespace(device=torch.device("cpu")), state, None, logs={})
    assert state.log_history[0] == {"step": 1}
    assert 0.05 < state.log_history[1]["memory/cpu_peak_gib"] < 64  # of this process, in GiB

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: device.index * 2**30)
    PeakMemory().on_log(SimpleNamespace(device=torch.device("cuda", 3)), state, None, logs={})
    assert state.log_history[1]["memory/gpu_peak_gib"] == 3


# -- Grouping ---------------------------------------------------------------------------------------------------------


def labels_of(groups: list[Group]) -> dict[str, list[str]]:
    return {group.label: [str(run.folder) for run in group.runs] for group in groups}


def test_paths_equal_but_for_the_seed_are_one_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ["troll-seed0", "troll-seed1", "troll_SEED-12", "clip-seed0", "seed3/lr", "seed4/lr", "a/lr", "v2", "v3"]
    for path in paths:
        write_troll(Path(path))
    assert labels_of(load_groups(paths)) == {
        "troll": ["troll-seed0", "troll-seed1", "troll_SEED-12"],
        "clip": ["clip-seed0"],
        "lr": ["seed3/lr", "seed4/lr"],
        "a/lr": ["a/lr"],
        "v2": ["v2"],
        "v3": ["v3"],
    }


def test_labels_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", "b", "c", "lr=1"):
        write_troll(Path(path))
    groups = load_groups(["ours=a,b", "theirs=c", "lr=1", "ours=c"])
    assert labels_of(groups) == {"ours": ["a", "b", "c"], "theirs": ["c"], "lr=1": ["lr=1"]}


def test_label_that_is_a_run_of_another_name_is_not_mixed_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", "b"):
        write_troll(Path(path))
    assert [(group.label, len(group.runs)) for group in load_groups(["b=a", "b"])] == [("b", 1), ("b", 1)]


def test_the_same_run_twice_is_no_second_seed(tmp_path):
    write_troll(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert [len(group.runs) for group in load_groups([f"x={tmp_path / 'a'},{tmp_path}/b/../a"])] == [1]


# -- Bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (["method: troll\nkl_bound: 0.2"] * 2, 0.2),
        (["kl_bound: inf"] * 2, math.inf),
        (["seed: 1", "seed: 2"], 0.05),  # the default of TrollGRPOConfig
        ([None, None], None),
        (["method: clip\nkl_bound: 0.05"] * 2, None),
        (["kl_bound: 0.1", "kl_bound: 0.2"], None),
    ],
)
def test_bound(tmp_path, settings, bound):
    for number, text in enumerate(settings):
        write_troll(tmp_path / f"seed{number}", 1, text)
    (group,) = load_groups([str(tmp_path / f"seed{number}") for number in range(2)])
    assert group.kl_bound == bound


def test_the_bound_of_a_config_that_sets_none_is_the_default_of_the_training():
    """A report read it from the trainer's config, whose import takes seconds."""
    assert TrollGRPOConfig.kl_bound == TrollRLOOConfig.kl_bound == DEFAULT_KL_BOUND


# -- Metric -----------------------------------------------------------------------------------------------------------


def test_band_is_over_what_all_seeds_have():
    band = metrics.band([pd.Series([0.0, 2.0, 4.0], [1.0, 3.0, 5.0]), pd.Series([10.0, 30.0], [2.0, 4.0])])
    assert band.index.tolist() == [2, 3, 4]
    assert band["min"].tolist() == [1, 2, 3]
    assert band["max"].tolist() == [10, 20, 30]
    assert band["mean"].tolist() == [5.5, 11, 16.5]


def test_thinning_out_keeps_maxima_and_means(tmp_path):
    x = np.arange(1, 1001)
    lines = [{"step": int(step), "y": 5.0 if step == 777 else 1.0} for step in x]
    run = load_run(write_state(tmp_path / "long", lines))
    largest = metrics.curve(run, metrics.Metric("y", "", largest=True), against_time=False)
    assert len(largest) <= metrics.MAX_POINTS and largest.max() == 5 and largest.index[0] == np.mean(x[:9])
    assert metrics.curve(run, metrics.Metric("y", ""), against_time=False).max() == pytest.approx(1 + 4 / 9)
    short = load_run(write_state(tmp_path / "short", lines[:100]))
    assert metrics.curve(short, metrics.Metric("y", ""), against_time=False).tolist() == [1.0] * 100


def test_thinning_out_takes_whole_rollout_batches(tmp_path):
    """Groups of another size than a batch would show a beat of the drift within a batch."""
    lines = [troll_line(step, entropy=float((step - 1) % 8)) for step in range(1, 401)]
    for line in lines:
        if line["step"] % 8 != 1:
            del line["num_tokens"], line["reward"]
    run = load_run(write_state(tmp_path, lines))
    entropy = metrics.curve(run, metrics.ENTROPY, against_time=False)
    assert entropy.tolist() == [3.5] * 50 and entropy.index.tolist() == [4.5 + 8 * n for n in range(50)]
    assert len(metrics.curve(run, metrics.Metric("reward", ""), against_time=False)) == 50  # one per batch as it is


def test_final_value_and_its_interval_over_seeds(tmp_path):
    ends = []
    for seed, last in enumerate((100, 100, 60)):
        lines = [troll_line(step, entropy=math.sin(step) + seed) for step in range(1, last + 1)]
        write_state(tmp_path / f"seed{seed}", lines)
        ends.append(np.mean([math.sin(step) + seed for step in range(1, last + 1) if step > 0.9 * last]))
    (group,) = load_groups([str(tmp_path / f"seed{seed}") for seed in range(3)])
    estimate, seeds = metrics.final(group, metrics.Metric("entropy", "", lowest=-math.inf))
    assert estimate.value == pytest.approx(np.mean(ends)) and seeds == 3
    half = 4.30265 * np.std(ends, ddof=1) / math.sqrt(3)  # of Student's table, 2 degrees of freedom
    assert (estimate.low, estimate.high) == pytest.approx((np.mean(ends) - half, np.mean(ends) + half), rel=1e-5)
    assert metrics.final(group, metrics.ENTROPY)[0].low == 0  # an entropy cannot be negative
    assert metrics.final(group, metrics.KL_MAX_BEFORE)[0].value == pytest.approx(
        (101 + 101 + 61) / 3
    )  # of the whole run
    assert metrics.final(group, metrics.CLIPPED) is None


def test_one_seed_has_the_interval_of_its_last_lines(tmp_path):
    lines = [troll_line(step, entropy=1 + step % 3) for step in range(1, 101)]
    group = Group("", [load_run(write_state(tmp_path, [*lines, {"step": 100, "eval_entropy": 0.3}]))])
    values = [1 + step % 3 for step in range(91, 101)]
    half = 2.26216 * np.std(values, ddof=1) / math.sqrt(10)  # of Student's table, 9 degrees of freedom
    estimate, seeds = metrics.final(group, metrics.ENTROPY)
    assert seeds == 1
    assert (estimate.low, estimate.high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), rel=1e-5)
    estimate, seeds = metrics.final(group, metrics.ENTROPY, prefix="eval_")
    assert (estimate.value, seeds) == (0.3, 1) and math.isnan(estimate.low) and math.isnan(estimate.high)


def test_held_out_values_are_of_the_updates_that_all_seeds_evaluated(tmp_path):
    for seed, steps in enumerate(((0, 5, 10), (0, 5))):
        evaluations = [{"step": step, "eval_reward": step + seed} for step in steps]
        training = [troll_line(step, step_time=1.0 + seed) for step in range(1, 11)]
        write_state(tmp_path / f"seed{seed}", training + evaluations)
    (group,) = load_groups([str(tmp_path / "seed0"), str(tmp_path / "seed1")])
    held_out = metrics.held_out(group, metrics.Metric("reward", ""), against_time=True)
    assert held_out.index.tolist() == [0, 7.5] and held_out["mean"].tolist() == [0.5, 5.5]
    assert (held_out["min"].tolist(), held_out["max"].tolist()) == ([0, 5], [1, 6])


def test_reward_functions(tmp_path):
    lines = [troll_line(step) | {"rewards/len_accuracy/mean": 7.0} for step in (1, 2)]
    groups = [Group("", [load_run(write_state(tmp_path, lines))])]
    assert [metric.key for metric in metrics.reward_metrics(groups)] == [
        ACCURACY, "reward", "rewards/form/mean", "rewards/len_accuracy/mean",
    ]  # fmt: skip
    assert [metric.is_share for metric in metrics.reward_metrics(groups)] == [True, False, False, False]  # 7 is no rate
    assert [metric.key for metric in metrics.reward_metrics(groups, "form") if metric.is_share] == ["rewards/form/mean"]
    with pytest.raises(ReportError, match="reward function 'nothing'; there are: form, len_accuracy, math_accuracy"):
        metrics.reward_metrics(groups, "nothing")


def test_reward_functions_of_a_run_that_was_only_evaluated_are_shown(tmp_path):
    """Only the total was: the names came from training lines."""
    line = {"step": 0, "eval_reward": 0.5, f"eval_{ACCURACY}": 0.4, "eval_rewards/form/mean": 0.1}
    groups = load_groups([str(write_state(tmp_path, [line]))])
    assert [metric.key for metric in metrics.reward_metrics(groups)] == [ACCURACY, "reward", "rewards/form/mean"]
    line[f"eval_{ACCURACY}"] = 7.0  # no rate
    groups = load_groups([str(write_state(tmp_path, [line]))])
    assert not any(metric.is_share for metric in metrics.reward_metrics(groups))
    # One function whose weight is not 1: the total is another metric
    groups = load_groups([str(write_state(tmp_path, [{"step": 0, "eval_reward": 0.5, f"eval_{ACCURACY}": 0.4}]))])
    assert [metric.key for metric in metrics.reward_metrics(groups)] == [ACCURACY, "reward"]


def test_the_only_reward_function_is_not_drawn_twice(tmp_path):
    lines = [{"step": 1, "reward": 0.5, ACCURACY: 0.5}]
    groups = [Group("", [load_run(write_state(tmp_path, lines))])]
    assert [metric.key for metric in metrics.reward_metrics(groups)] == [ACCURACY]


# -- The report -------------------------------------------------------------------------------------------------------


def make_report(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two seeds of TROLL of different lengths, and a clip run under a name that is HTML."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        folder = write_troll(Path(f"troll-seed{seed}"), 10 + 5 * seed, f"method: troll\nseed: {seed}\nlr: 1")
        state = json.loads((folder / "trainer_state.json").read_text())
        state["log_history"].append({"step": 10, f"eval_{ACCURACY}": 0.4 + seed / 10})
        (folder / "trainer_state.json").write_text(json.dumps(state))
    lines = [clip_line(step) for step in range(1, 11)]
    write_state(Path('<b>x&"$y_1$'), lines, "method: clip\nseed: 0\nlr: 1")
    return ["troll-seed0", "troll-seed1", '<b>x&"$y_1$']


def test_report(runs, monkeypatch, capsys, recwarn):
    Path("report").mkdir()
    make_report(monkeypatch, *runs, "--output", "report")
    names = {file.name for file in Path("report").iterdir()}
    figures = {"reward.png", "optimization.png", "trust_region.png", "clip.png", "completions.png", "cost.png"}
    assert names == figures | {"report.html", "table.md"}
    for name in figures:
        assert (Path("report") / name).read_bytes().startswith(b"\x89PNG")

    page = Path("report/report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(figures)
    assert "<b>" not in page and "&lt;b&gt;x&amp;&#34;$y_1$" in page
    assert not re.search(r"""(?:src|href)=["'](?!data:)|url\(|@import|<script|https?://""", page)  # requests nothing
    assert "Nothing to draw for troll: any of this." in page  # the clip's figure
    assert "Mean multiplier η" in page and "Peak memory of a process" in page
    assert "Nothing to draw for &lt;b&gt;x&amp;&#34;$y_1$: Peak memory of a process." in page
    assert "method</th><td>troll</td><td>clip" in dense(page)  # and of the other settings what differs, not the seed
    assert ">lr<" not in page and ">seed<" not in page
    assert not [warning for warning in recwarn if re.search("matplotlib|report", str(warning.filename))]

    table = Path("report/table.md").read_text()
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in map(split_row, table.splitlines())}
    assert rows["seeds"] == ["2", "1"]
    assert rows["updates"] == ["10–15", "10"]
    assert rows["training time"] == ["20.0–30.0 seconds", "20.0 seconds"]
    assert rows["Success rate (math_accuracy_reward), held out, last"] == ["45.0 [0.0, 100.0] %", "–"]
    assert rows["KL bound (nats)"] == ["0.05", "–"]
    assert rows["Clipped tokens, at the end"] == ["–", "4.0 %"]
    assert rows["Throughput, prompts and completions, at the end (tokens/s)"] == ["50.00 [50.00, 50.00]", "50.00"]
    assert table in capsys.readouterr().out


@pytest.fixture
def no_figures(monkeypatch):
    """For what a page says: drawing takes a second or two."""
    monkeypatch.setattr(figures, "_draw", lambda *_: None)


@pytest.mark.usefixtures("no_figures")
def test_nothing_of_a_run_commands_the_terminal_or_marks_up_the_table(tmp_path, monkeypatch, capsys):
    """Names of metrics and settings come from files that others may have written."""
    hostile = "h\x1b[2J\x07\u202e<b>[a](http://c)"
    for name, bound in (("a", 0.1), ("b", 0.2)):
        lines = [troll_line(1, **{f"rewards/{hostile}/mean": 0.5}), troll_line(2, **{f"{hostile} inf": math.inf})]
        folder = write_state(tmp_path / name, lines, json.dumps({hostile: name, "kl_bound": bound}))
        (folder / "config-until-checkpoint-1.yaml").write_text(json.dumps({hostile: f"{name}{hostile}"}))
    monkeypatch.chdir(tmp_path)
    make_report(monkeypatch, f"{hostile}=a,b", "--output", "report")
    table, page = (Path("report", name).read_text() for name in ("table.md", "report.html"))
    notes = re.findall("Note: .*", capsys.readouterr().out)
    assert notes and all(note.isprintable() and "\\x1b[2J" in note for note in notes)
    assert table.replace("\n", "").isprintable() and r"h\x1b[2J\x07\u202e&lt;b&gt;[a]\(http://c)" in table
    assert "<b>" not in page and "Note" in "".join(notes)


@pytest.mark.usefixtures("no_figures")
def test_the_page_names_model_dataset_and_learning_rate_at_its_top(tmp_path, monkeypatch):
    """A report on the table said which method and how many seeds, but neither of what nor on what."""
    common = "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: openai/gsm8k\n"
    for name, rate in (("troll", "1.0e-06"), ("clip", "0.000002")):
        write_troll(tmp_path / name, settings=f"{common}learning_rate: {rate}")
    write_troll(tmp_path / "plain")  # another script's: its log holds the learning rate
    top = page_top(monkeypatch, tmp_path, "troll", "clip")
    assert "<td>Qwen/Qwen3-0.6B</td><td>Qwen/Qwen3-0.6B</td>" in top and "<td>openai/gsm8k</td>" in top
    assert "learning_rate</th><td>1e-06</td><td>2e-06</td>" in top
    top = page_top(monkeypatch, tmp_path, "plain", "troll")
    assert "learning_rate</th><td>1e-06</td><td>1e-06</td>" in top
    assert "model_name_or_path</th><td>–</td>" in top and "dataset_name</th><td>–</td>" in top
    assert "dataset_name</th><td>–</td><td>–</td>" in page_top(monkeypatch, tmp_path, "a=plain", "b=plain")
    assert "<td>1e-06 or 2e-06</td>" in page_top(monkeypatch, tmp_path, "both=troll,clip", "troll")


def page_top(monkeypatch, folder: Path, *runs: str) -> str:
    monkeypatch.chdir(folder)
    make_report(monkeypatch, *runs, "--output", "report")
    return dense(Path("report/report.html").read_text().partition("<h2>")[0])


def dense(page: str) -> str:
    return re.sub(r">\s+<", "><", page)


def split_row(line: str) -> list[str]:
    return line.strip("|").split("|")


def test_any_label_and_no_figure_of_an_earlier_report(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    Path("report").mkdir()
    for name in ("clip.png", "reward.png", "mine.png"):
        Path("report", name).write_text("earlier")
    write_state(Path("run"), [{"step": step, "reward": 0.5} for step in (1, 2)])
    labels = ["_hidden", "$x_{", "a\nb", "ü" * 300, "100%", "a|b", " "]
    make_report(monkeypatch, *(f"{label}=run" for label in labels), "--output", "report")
    assert Path("report/mine.png").exists() and not Path("report/clip.png").exists()
    assert Path("report/reward.png").stat().st_size > 10_000
    head = Path("report/table.md").read_text().splitlines()[0]
    assert [" ".join(cell.split()) for cell in re.split(r"(?<!\\)\|", head)[2:-1]] == [
        "_hidden", "$x_{", "a b", "ü" * 300, "100%", "a\\|b", "",
    ]  # fmt: skip
    assert not [warning for warning in recwarn if re.search("matplotlib|report", str(warning.filename))]


def test_a_run_with_almost_nothing(tmp_path, monkeypatch):
    """One line of a plain run: no time, no evaluation, a zero on a logarithmic axis."""
    write_state(tmp_path / "run", [{"step": 1, "reward": 0.5, "troll/kl_max": 0.0, "troll/policy_kl_max": 0.0}])
    make_report(monkeypatch, str(tmp_path / "run"), "--output", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Nothing to draw for run: Reward, weighted sum of all functions against time." in page
    assert (tmp_path / "report" / "reward.png").exists() and not (tmp_path / "report" / "cost.png").exists()


@pytest.mark.usefixtures("no_figures")
def test_mixed_seeds_and_a_broken_bound_are_said(runs, monkeypatch):
    write_troll(Path("other"), 10, "method: troll\nlr: 2", **{"troll/kl_max": 0.06})
    make_report(monkeypatch, f"both={runs[0]},other", f"methods={runs[1]},{runs[2]}", "--output", "report")
    page = Path("report/report.html").read_text()
    assert "The runs of both are shown as seeds, but differ in lr." in page
    assert "The runs of methods are shown as seeds, but differ in kl_bound, method." in page
    assert "both: a KL of 0.06 after the projection exceeds the bound 0.05." in page
    assert "methods: a KL" not in page


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x=troll-seed0,empty"], "empty is not a run: it holds no trainer_state.json"),
        (["=troll-seed0"], "'=troll-seed0' is not a run: give RUN or LABEL=RUN[,RUN…]."),
        (["troll-seed0", "--success", "acc"], "No run logged a reward function 'acc'; there are: form, math_acc"),
        (["troll-seed0", "--output", "file"], "file"),
    ],
)
def test_a_mistake_ends_in_one_line(runs, monkeypatch, capsys, arguments, expected):
    Path("empty").mkdir()
    Path("file").write_text("")
    with pytest.raises(SystemExit) as stop:
        make_report(monkeypatch, *([] if "--output" in arguments else ["--output", "report"]), *arguments)
    message = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert message.startswith("report.py: error: ") and expected in message
    assert not Path("report").exists()


def test_groups_differ_without_colour():
    looks = [(str(style["linestyle"]), style["marker"]) for style in map(figures._style, range(20))]
    assert len(set(looks)) == 20


def test_bounds_that_differ_are_told_apart(tmp_path):
    groups = []
    for number, bound in enumerate((0.05, 0.2, math.inf)):
        run = load_run(write_troll(tmp_path / str(number), settings=f"kl_bound: {bound}".replace("inf", ".inf")))
        groups.append(Group(str(number), [run]))
    assert list(figures._bounds(groups)) == [0.05, 0.2] and len(set(figures._bounds(groups).values())) == 2
    assert figures._bounds([groups[0], groups[0]]) == {0.05: "black"}


# -- What the trainers log --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["troll", "mask", "penalty", "clip"])
def test_every_metric_is_one_that_the_trainers_log(method, tmp_path):
    from trl import GRPOConfig, GRPOTrainer
    from trl_comparison import make_trainer

    from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

    ours = TrollGRPOTrainer, TrollGRPOConfig
    kind = (GRPOTrainer, GRPOConfig) if method == "clip" else ours
    region = {"trust_region": method, "divergence_type": "topk_kl"} if method in ("mask", "penalty") else {}
    trainer = make_trainer(*kind, tmp_path, steps_per_generation=2, max_steps=4, **region)
    trainer.add_callback(PeakMemory)
    trainer.train()
    trainer.save_state()
    run = load_run(tmp_path)
    assert run.settings["method"] == ("clip" if method == "clip" else "troll")
    keys = {metric.key for metric in vars(metrics).values() if isinstance(metric, metrics.Metric)}
    of_mask = {key for key in keys if re.search("mask|divergence", key)}
    of_support, of_penalty = {metrics.SUPPORT.key}, {metrics.PENALIZED.key}
    of_projection = {metric.key for metric in (metrics.PROJECTED, metrics.ETA, metrics.KL_MAX_AFTER)}
    others = {
        "troll": {key for key in keys if key.startswith("clip_ratio/")} | of_mask | of_penalty,
        "mask": {key for key in keys if key.startswith(("clip_ratio/", "troll/"))} - of_mask - of_support,
        "penalty": of_mask | of_projection | {metrics.KL_MEAN_AFTER.key},
        "clip": {key for key in keys if key.startswith("troll/")},
    }
    for key in keys - others[method]:
        assert len(run.values(key)), key
    assert run.seconds(np.array([4.0]))[0] == pytest.approx(
        sum(line["step_time"] for line in trainer.state.log_history if "step_time" in line)
    )


def test_a_mask_is_shown_and_held_to_no_kl_bound(tmp_path, monkeypatch):
    mask = {f"troll/masked_fraction{sign}": 0.02 for sign in ("", "_positive", "_negative")}
    mask |= {"troll/divergence_mean": 0.01, "troll/divergence_max": 0.4}
    lines = [{"step": step, "reward": 0.5} | mask for step in range(1, 11)]
    write_state(tmp_path / "mask", lines, "trust_region: mask\nmethod: troll\n")
    monkeypatch.chdir(tmp_path)
    make_report(monkeypatch, "mask", "--output", "report")
    page, table = Path("report/report.html").read_text(), Path("report/table.md").read_text()
    assert "Masked, of negative advantage" in page and Path("report/mask.png").exists()
    assert "| Masked tokens, at the end | 2.0 % |" in table and "KL bound" not in table

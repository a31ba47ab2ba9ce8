"""The quickstart: its start, its goals, its end by a signal, and (slow) the whole of it."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.support.training_args import parse_training_args
from troll_trl import small_models
from troll_trl.cli import evaluate, quickstart
from troll_trl.cli.plot import read_log

SCRIPT = ROOT / "scripts" / "quickstart.py"


def test_missed_goals_are_named():
    def log(after, projected, kl):
        update = {"troll/projected_fraction": projected, "troll/kl_max": kl}
        return pd.DataFrame([{"eval_reward": 0.25}, update, {"eval_reward": after}])

    assert quickstart.missed_goals(log(0.75, 0.02, 0.05), kl_bound=0.05) == []
    assert len(quickstart.missed_goals(log(0.29, 0.0, 0.0502), kl_bound=0.05)) == 3


def test_the_start_of_the_package_is_small_and_solves_over_a_third():
    """And it is the model that `--warm_up` makes, of the sizes and with the tokenizer of today."""
    tokenizer = small_models.make_tokenizer()
    assert sum(file.stat().st_size for file in quickstart.START.iterdir()) < 2**20
    start = AutoModelForCausalLM.from_pretrained(quickstart.START)
    new = small_models.make_model(tokenizer)
    shapes = [{name: weight.shape for name, weight in model.named_parameters()} for model in (start, new)]
    assert shapes[0] == shapes[1]
    assert AutoTokenizer.from_pretrained(quickstart.START).get_vocab() == tokenizer.get_vocab()
    input_ids, labels = small_models.encode(tokenizer, quickstart.make_problems(seed=0)[1])
    with torch.no_grad():
        logits = start(input_ids=input_ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    assert 0.3 < losses.sum(1).neg().exp().mean() < 0.5  # the chance that a sampled answer is right


def test_it_replaces_its_own_runs_alone(tmp_path):
    for name, model in (("run", str(tmp_path / "start")), ("trl", "outputs/quickstart/start")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"model_name_or_path: {model}")
        quickstart._remove_own_run(tmp_path / name, tmp_path / "start")
    assert [path.name for path in tmp_path.iterdir()] == ["trl"]


@pytest.mark.parametrize("updates", [None, 8, 40])
def test_the_runs_take_equally_many_completions(updates, tmp_path):
    """A clip that collapsed at TROLL's rate was compared, with as many updates."""
    completions, evaluated, rates = {}, {}, {}
    for folder in quickstart.RUNS:
        _, _, _, *flags = quickstart._command(tmp_path, folder, 0, updates)
        _, args, _ = parse_training_args(flags)
        generations = math.ceil(args.max_steps / (args.steps_per_generation * args.num_iterations))
        completions[folder] = generations * args.per_device_train_batch_size * args.steps_per_generation
        evaluated[folder] = args.max_steps / args.eval_steps
        rates[folder] = args.learning_rate, args.get_warmup_steps(args.max_steps) / args.max_steps
    assert set(completions.values()) == {{None: 3072, 8: 1024, 40: 2048}[updates]}
    assert set(evaluated.values()) == {1 if updates else 4}
    if updates is None:
        assert rates == {"run": (8e-4, 1 / 6), "trl": (2e-4, 1 / 6), "trl-reuse": (8e-4, 1 / 6)}


TRAINING = "#!/bin/sh\necho $$ >> trainings\nexec sleep 600\n"  # in place of Python
MAIN = "import sys; sys.executable = './training'; from troll_trl.cli import quickstart; quickstart.main(sys.argv[1:])"


def test_sigterm_ends_all_trainings_with_it(tmp_path):
    """They went on without the command that would have ended them."""
    (tmp_path / "training").write_text(TRAINING)
    (tmp_path / "training").chmod(0o755)
    command = [sys.executable, "-c", MAIN, "--output", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    trainings, deadline = tmp_path / "trainings", time.monotonic() + HANG
    while not (trainings.exists() and len(trainings.read_text().splitlines()) == 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(HANG) == 128 + signal.SIGTERM
    for training in map(int, trainings.read_text().splitlines()):
        with pytest.raises(ProcessLookupError):
            os.kill(training, 0)


@pytest.mark.slow
def test_reuse_learns_more_from_equally_many_completions(tmp_path):
    options = ["--seed", "0", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], check=True, cwd=ROOT, stdout=-1, text=True)
    logs = {folder: read_log(tmp_path / folder) for folder in quickstart.RUNS}
    assert {log["cost/completions"].max() for log in logs.values()} == {3072}
    (success, default, clip), log = (one["eval_reward"].dropna() for one in logs.values()), logs["run"]
    assert success.iloc[0] == default.iloc[0] == clip.iloc[0]
    assert success.iloc[-1] - success.iloc[0] >= 0.05  # seeds 0, 1 and 2: 22, 14 and 20 points
    assert min(success.iloc[-1], clip.iloc[-1]) - default.iloc[-1] >= 0.03  # 10, 9 and 8 points
    assert f"TROLL, each completion used 4 times: {success.iloc[0]:.1%} of the held-out sums before" in done.stdout
    assert log["troll/kl_max"].max() <= 0.8 * 1.001 and log["troll/projected_fraction"].max() > 0
    assert (tmp_path / "curves.png").stat().st_size > 0
    evaluate.main(shlex.split(done.stdout.partition("Evaluate it greedily: troll eval ")[2].splitlines()[0]))
    [result] = json.loads((tmp_path / "evaluation" / "summary.json").read_text())["results"]
    assert result["metrics"]["mean"]["value"] >= success.iloc[-1] - 0.05

"""The quickstart: its start, its goals, and (slow) the whole of it."""

import json
import shlex
import subprocess
import sys

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.repository import ROOT
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


@pytest.mark.slow
def test_troll_learns_where_the_clip_collapses(tmp_path):
    options = ["--seed", "0", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], check=True, cwd=ROOT, stdout=-1, text=True)
    log = read_log(tmp_path / "run")
    success, clip = (one["eval_reward"].dropna() for one in (log, read_log(tmp_path / "clip")))
    assert success.iloc[-1] - success.iloc[0] >= 0.05  # seeds 0, 1 and 2: 20, 14 and 12 points
    assert clip.iloc[0] == success.iloc[0] and clip.iloc[-1] < 0.25  # seeds 0, 1 and 2: 10, 4 and 1 %
    assert f"TROLL: {success.iloc[0]:.1%} of the held-out sums before" in done.stdout
    assert log["troll/kl_max"].max() <= 0.05 * 1.001 and log["troll/projected_fraction"].max() > 0
    assert (tmp_path / "curves.png").stat().st_size > 0
    evaluate.main(shlex.split(done.stdout.partition("Evaluate it greedily: troll eval ")[2].splitlines()[0]))
    [result] = json.loads((tmp_path / "evaluation" / "summary.json").read_text())["results"]
    assert result["metrics"]["mean"]["value"] >= success.iloc[-1] - 0.05

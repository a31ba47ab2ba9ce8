"""The quickstart: its problems, its tokenizer, its YAML, its result, and (slow) the whole of it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from repository import ROOT
from training_args import parse_training_args
from transformers import AutoModelForCausalLM, AutoTokenizer

from math_answers import math_accuracy_reward
from math_answers.data import load_math_dataset
from troll_trl import small_models
from troll_trl.cli import evaluate, quickstart
from troll_trl.cli.plot import read_log

SCRIPT = ROOT / "scripts" / "quickstart.py"


@pytest.fixture(scope="module")
def problems():
    return quickstart.make_problems(seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return small_models.make_tokenizer()


# -- Problems ---------------------------------------------------------------------------------------------------------


def test_all_sums_are_there_once_and_right(problems):
    train, test = problems
    assert len(train) == 9488 and len(test) == 512
    assert len({row["problem"] for row in train + test}) == 10_000
    for row in train + test:
        left, right = row["problem"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(left) + int(right) == int(row["answer"])


def test_written_problems_load_and_their_answers_are_rewarded(problems, tmp_path):
    small_models.write_problems(tmp_path, problems[0][:20], problems[1][:10])
    dataset = load_math_dataset(str(tmp_path), "test")
    assert dataset["prompt"][3] == [{"role": "user", "content": problems[1][3]["problem"]}]
    right = [f"Answer: {row['answer']}" for row in problems[1][:10]]
    wrong = [f"Answer: {row['answer']}1" for row in problems[1][:10]]
    assert math_accuracy_reward(right, dataset["solution"]) == [1.0] * 10
    assert math_accuracy_reward(wrong, dataset["solution"]) == [0.0] * 10
    assert len(load_math_dataset(str(tmp_path), "train")) == 20


# -- The start --------------------------------------------------------------------------------------------------------


def test_tokenizer_round_trip(tokenizer):
    text = "What is 37 + 48?\nAnswer: 85 – naïve"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("185") == ["1", "8", "5"]


def test_labels_are_the_answer_and_its_end(tokenizer):
    rows = [{"problem": "What is 1 + 1?", "answer": "2"}, {"problem": "What is 99 + 99?", "answer": "198"}]
    input_ids, labels = small_models.encode(tokenizer, rows)
    assert input_ids.shape == labels.shape
    for ids, label, row in zip(input_ids, labels, rows, strict=True):
        assert tokenizer.decode(label[label != -100]) == f"Answer: {row['answer']}<|im_end|>"
        prompt = f"<|im_start|>user\n{row['problem']}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids).replace("<|endoftext|>", "") == f"{prompt}Answer: {row['answer']}<|im_end|>"


# -- The YAML ---------------------------------------------------------------------------------------------------------


def test_yaml_reads_and_writes_where_the_quickstart_does(tokenizer):
    script_args, training_args, model_args = parse_training_args(["--config", str(quickstart.CONFIG)])
    folder = Path("outputs/quickstart")
    assert Path(model_args.model_name_or_path) == folder / "start"
    assert Path(script_args.dataset_name) == folder / "data"
    assert Path(training_args.output_dir) == folder / "run"
    assert len(tokenizer(f"Answer: 198{tokenizer.eos_token}").input_ids) <= training_args.max_completion_length


# -- The result -------------------------------------------------------------------------------------------------------


def test_missed_goals_are_named():
    def log(after, projected, kl):
        update = {"troll/projected_fraction": projected, "troll/kl_max": kl}
        return pd.DataFrame([{"eval_reward": 0.25}, update, {"eval_reward": after}])

    assert quickstart.missed_goals(log(0.75, 0.02, 0.05), kl_bound=0.05) == []
    assert len(quickstart.missed_goals(log(0.29, 0.0, 0.0502), kl_bound=0.05)) == 3


def test_the_start_of_the_package_is_small_and_solves_over_a_third(problems, tokenizer):
    """And it is the model that `--warm_up` makes, of the sizes and with the tokenizer of today."""
    assert sum(file.stat().st_size for file in quickstart.START.iterdir()) < 2**20
    start = AutoModelForCausalLM.from_pretrained(quickstart.START)
    new = small_models.make_model(tokenizer)
    shapes = [{name: weight.shape for name, weight in model.named_parameters()} for model in (start, new)]
    assert shapes[0] == shapes[1]
    assert AutoTokenizer.from_pretrained(quickstart.START).get_vocab() == tokenizer.get_vocab()
    input_ids, labels = small_models.encode(tokenizer, problems[1])
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

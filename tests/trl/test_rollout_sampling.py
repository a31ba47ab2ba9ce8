"""Without vLLM, rollouts take the special tokens of the model's `generation_config.json` alone."""

import json
import logging

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import GRPOConfig

from tests.tiny import saved_model
from tests.trl_comparison import OURS, make_trainer
from troll_trl.trainers.clip import ClipGRPOTrainer

CLASSES = OURS | {"clip": (ClipGRPOTrainer, GRPOConfig)}
# Each changes what `generate` samples, ends it early, or makes it fail
FILTERS = {"min_p": 0.9, "no_repeat_ngram_size": 1, "suppress_tokens": [*range(2, 90)]}
OTHERS = {"top_k": 1, "num_beams": 2, "max_time": 1e-9, "stop_strings": ["w1"]}


def trainer_of(tmp_path, folder_options, algorithm="grpo", **options):
    """A trainer on a tiny model that comes from a folder, as users' models do."""
    folder = saved_model(tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True} | folder_options))
    model = AutoModelForCausalLM.from_pretrained(folder)
    return make_trainer(
        *CLASSES[algorithm], tmp_path / "out", model, max_completion_length=12, **{"beta": 0.0} | options
    )


def sampled(trainer, training=True):
    """What the trainer samples for eight prompts with seed 0."""
    trainer.model.train(training)
    torch.manual_seed(0)
    rows = [dict(trainer.train_dataset[row // 4]) for row in range(8)]
    ids = []
    generate = trainer._generate
    trainer._generate = lambda *args: (generated := generate(*args), ids.extend(generated[1]))[0]
    trainer._generate_and_score_completions(rows)
    return ids


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return sampled(trainer_of(tmp_path_factory.mktemp("plain"), {}))


@pytest.mark.parametrize(
    ("folder", "algorithm", "lora"),
    [(FILTERS, "grpo", False), (OTHERS, "grpo", False), (FILTERS, "rloo", False), (FILTERS, "clip", True)],
)
def test_no_option_of_the_folder_reaches_a_rollout(folder, algorithm, lora, plain, tmp_path, caplog):
    """`min_p` made 120 of 128 tokens repeats, `num_beams` a beam search; `top_k=None` kept the 50 likeliest tokens."""
    caplog.set_level(logging.WARNING)
    options = {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])} if lora else {}
    trainer = trainer_of(tmp_path, folder, algorithm, top_k=None, min_p=None, **options)
    if folder is FILTERS:
        assert all(f"{name}={value!r}" in caplog.text for name, value in folder.items())
    assert sampled(trainer) == plain
    assert sampled(trainer, training=False) == plain, "an evaluation"


def test_the_special_tokens_of_the_folder_stay(tmp_path, plain):
    """A second end-of-sequence token, which many chat models have, ends completions."""
    end = next(token for ids in plain for token in ids[1:-1] if token > 1)
    ids = sampled(trainer_of(tmp_path, {"eos_token_id": [1, end], "bos_token_id": 5}))
    assert any(row[-1] == end for row in ids) and not any(end in row[:-1] for row in ids)


def test_what_the_run_sets_itself_acts(tmp_path):
    own = {"suppress_tokens": [*range(2, 90)], "min_new_tokens": 12}
    folder = {"temperature": 0.1, "suppress_tokens": [3, 4], "do_sample": False}
    ids = sampled(trainer_of(tmp_path, folder, generation_kwargs=own))
    assert {token for row in ids for token in row} <= {0, 1, *range(90, 100)} and {len(row) for row in ids} == {12}
    assert len({tuple(row) for row in ids}) == 8, "no temperature of 0.1"


def test_a_checkpoint_keeps_the_folders_options(tmp_path):
    """They are for those who use the model later."""
    trainer = trainer_of(tmp_path, {"min_p": 0.9, "no_repeat_ngram_size": 2})
    sampled(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.min_p, saved.no_repeat_ngram_size, saved.eos_token_id) == (0.9, 2, 1)

"""Without vLLM, rollouts take the special tokens of the model's `generation_config.json` alone."""

import json
import logging

import pytest
import torch
from peft import LoraConfig
from tiny import saved_model, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig
from trl_comparison import OURS, make_trainer

from troll_trl.trainers.clip import ClipGRPOTrainer, ClipRLOOTrainer
from troll_trl.trainers.config import ClipGRPOConfig, ClipRLOOConfig
from troll_trl.trainers.rollout_sampling import special_tokens_alone

CLASSES = OURS | {"grpo clip": (ClipGRPOTrainer, ClipGRPOConfig), "rloo clip": (ClipRLOOTrainer, ClipRLOOConfig)}
# Each changes what `generate` samples, ends it early, or makes it fail. The first three are warned of
OPTIONS = {
    "min_p": 0.9,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [*range(2, 90)],
    "num_beams": 2,
    "max_time": 1e-9,
    "stop_strings": ["w1"],
}


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


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_of_the_folder_reaches_a_rollout(tmp_path, plain, caplog, name):
    """`min_p` made 120 of 128 tokens repeats, `num_beams` a beam search; `stop_strings` crashed."""
    caplog.set_level(logging.WARNING)
    trainer = trainer_of(tmp_path, {name: OPTIONS[name]})
    assert (f"{name}={OPTIONS[name]!r}" in caplog.text) == (name in [*OPTIONS][:3])
    assert sampled(trainer) == plain
    assert sampled(trainer, training=False) == plain, "an evaluation"


@pytest.mark.parametrize(
    "algorithm, lora",
    [("rloo", False), ("grpo", True), ("grpo clip", True), ("rloo clip", False)],
)
def test_nor_of_another_trainer_or_of_an_adapters_base_model(tmp_path, plain, algorithm, lora):
    adapter = {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])} if lora else {}
    options = {"min_p": 0.9, "no_repeat_ngram_size": 1, "max_time": 1e-9}
    assert sampled(trainer_of(tmp_path, options, algorithm, **adapter)) == plain


def test_the_special_tokens_of_the_folder_stay(tmp_path, plain, caplog):
    """A second end-of-sequence token, which many chat models have, ends completions."""
    end = next(token for ids in plain for token in ids[1:-1] if token > 1)
    trainer = trainer_of(tmp_path, {"eos_token_id": [1, end], "bos_token_id": 5, "min_p": None})
    assert not any("generation_config.json" in record.getMessage() for record in caplog.records), "nothing left out"
    ids = sampled(trainer)
    assert any(row[-1] == end for row in ids) and not any(end in row[:-1] for row in ids)


def test_what_the_run_sets_itself_acts_and_is_not_called_left_out(tmp_path, plain, caplog):
    caplog.set_level(logging.WARNING)
    folder = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0, "suppress_tokens": [3, 4]}
    own = {"suppress_tokens": [*range(2, 90)], "min_new_tokens": 12}
    trainer = trainer_of(tmp_path, folder | {"do_sample": False}, generation_kwargs=own)
    assert not any("generation_config.json" in record.getMessage() for record in caplog.records)
    ids = sampled(trainer)
    assert {token for row in ids for token in row} <= {0, 1, *range(90, 100)} and {len(row) for row in ids} == {12}
    assert len({tuple(row) for row in ids}) == 8, "no temperature of 0.1"


def test_no_filter_of_the_run_is_none(tmp_path, plain):
    """`top_k=None` kept the 50 most likely tokens, which transformers takes by default."""
    trainer = trainer_of(tmp_path, {"top_k": 1, "min_p": 0.9}, top_k=None, min_p=None)
    assert sampled(trainer) == plain


def test_a_checkpoint_keeps_the_folders_options(tmp_path):
    """They are for those who use the model later."""
    trainer = trainer_of(tmp_path, {"min_p": 0.9, "no_repeat_ngram_size": 2})
    sampled(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.min_p, saved.no_repeat_ngram_size, saved.eos_token_id) == (0.9, 2, 1)


def test_the_options_return_after_an_error_and_reach_into_every_module():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model, self.generation_config = tiny_model(), GenerationConfig(min_p=0.5, eos_token_id=3)
            self.config = self.language_model.config

    outer = Outer()
    inner = outer.language_model
    inner.generation_config.top_h, own = 0.3, (outer.generation_config, inner.generation_config)
    with pytest.raises(KeyError), special_tokens_alone(torch.nn.Sequential(outer)):
        assert (outer.generation_config.min_p, outer.generation_config.eos_token_id) == (None, 3)
        assert (inner.generation_config.top_h, inner.generation_config.eos_token_id) == (None, 1)
        raise KeyError
    assert (outer.generation_config, inner.generation_config) == own

"""A resumed run is the uninterrupted one, bit for bit: weights, losses, gradient norms and every other metric."""

import itertools
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny import tiny_prompts
from torch.nn.modules.module import _IncompatibleKeys
from transformers import TrainerCallback
from trl_comparison import logged, make_trainer, weights

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.trust_region.ragged import RaggedDistribution

FILE = "rollout-state-0-of-1.pt"
OPTIONS = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 2e-2, "max_steps": 9, "kl_bound": 0.01}
# Eight offsets each. The second and the fourth go through several epochs, the third logs averages of three updates.
CONFIGURATIONS = {
    "eight_updates": {"steps_per_generation": 8},
    "two_iterations": {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 32},
    "accumulation": {"gradient_accumulation_steps": 2, "logging_steps": 3, "weight_decay": 0.1},
    "three_epochs": {
        "steps_per_generation": 2,
        "per_device_train_batch_size": 32,
        "lr_scheduler_type": "cosine",
        "use_adaptive_entropy": True,
        "entropy_target": 10.0,
    },
}


FIVE = {"max_steps": 5}  # into the second rollout batch, of four updates


def grpo(folder, **options):
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, **OPTIONS | options)


def rloo(folder, **options):
    return make_trainer(TrollRLOOTrainer, TrollRLOOConfig, folder, **OPTIONS | {"beta": 0.0} | FIVE | options)


def lora(folder, **options):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)  # dropout draws random numbers
    return grpo(folder, peft_config=config, beta=0.1, **FIVE | options)


def log_of(trainer) -> list[dict]:
    """Log lines without what is a time."""
    times = ("runtime", "per_second", "step_time")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: value for name, value in line.items() if not name.endswith(times)} for line in lines]


def assert_same_run(expected, actual):
    assert actual.state.global_step == expected.state.global_step
    assert log_of(actual) == log_of(expected)
    for name, value in weights(expected).items():
        assert torch.equal(value, weights(actual)[name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run of a configuration, with a checkpoint after every update; run when first asked for."""
    runs = {}

    def run(name, make=grpo):
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            runs[name] = make(folder, **CONFIGURATIONS.get(name, {}))
            runs[name].train()
        return runs[name]

    return run


DEFAULT = {("eight_updates", 1), ("eight_updates", 6), ("two_iterations", 1), ("accumulation", 6), ("three_epochs", 6)}
OFFSETS = [
    pytest.param(name, offset, marks=[pytest.mark.slow] * ((name, offset) not in DEFAULT))
    for name, offset in itertools.product(CONFIGURATIONS, range(1, 9))
]


@pytest.mark.parametrize(("name", "offset"), OFFSETS)
def test_any_update_resumes_exactly(name, offset, uninterrupted, tmp_path):
    expected = uninterrupted(name)
    random.seed(offset), np.random.seed(offset), torch.manual_seed(offset)
    resumed = grpo(tmp_path, **CONFIGURATIONS[name] | {"save_strategy": "no"})
    resumed.train(f"{expected.args.output_dir}/checkpoint-{offset}")
    assert_same_run(expected, resumed)


def streamed(folder, **options):
    return grpo(folder, dataset=tiny_prompts(16).to_iterable_dataset(), **options)


@pytest.mark.parametrize(("accumulation", "updates", "offsets"), [(1, 18, (9, 16)), (3, 6, (2, 3))])
def test_a_later_epoch_of_a_streamed_dataset_resumes_exactly(accumulation, updates, offsets, tmp_path):
    """The Trainer takes all of a stream for its first epoch: every later one was resumed at its own start. Here an
    epoch has 8 micro-batches, so with an accumulation of 3 an update goes on into the next epoch."""
    options = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 1, "max_steps": updates}
    expected = streamed(tmp_path, **options)
    expected.train()
    for offset in offsets:
        resumed = streamed(tmp_path / str(offset), **options | {"save_strategy": "no"})
        resumed.train(f"{tmp_path}/checkpoint-{offset}")
        assert_same_run(expected, resumed)


def test_a_streamed_dataset_stays_in_step_without_our_state(tmp_path):
    """The length that the Trainer gives to a stream's epoch, all 13 updates, is no whole number of rollout batches."""
    expected = streamed(tmp_path, steps_per_generation=2, max_steps=13)
    expected.train()
    for name in (FILE, "complete.json"):
        (tmp_path / "checkpoint-10" / name).unlink()
    resumed = streamed(tmp_path / "resumed", steps_per_generation=2, max_steps=13, save_strategy="no")
    resumed.train(f"{tmp_path}/checkpoint-10")
    assert logged(resumed, "loss") == logged(expected, "loss")


def bfloat16(folder, **options):
    return grpo(folder, bf16=True, gradient_checkpointing=True, **FIVE | options)


MASK = {"trust_region": "mask", "steps_per_generation": 8}


def binary_mask(folder, **options):
    return grpo(folder, **MASK | {"divergence_bound": 0.001} | options)


def topk_mask(folder, **options):
    return binary_mask(folder, divergence_type="topk_kl", **options)


def penalty(folder, **options):
    return grpo(folder, trust_region="penalty", steps_per_generation=8, **options)


BINARY_PENALTY = {"trust_region": "penalty", "divergence_type": "binary_kl", "kl_bound": 1e-3}


def binary_penalty(folder, **options):
    return grpo(folder, steps_per_generation=8, **BINARY_PENALTY, epsilon=math.inf, **options)


def rloo_penalty(folder, **options):
    return rloo(folder, **BINARY_PENALTY, **options)


RESUMED = [(rloo, 2), (lora, 2), (bfloat16, 3), (binary_mask, 3), (binary_penalty, 3)]
LATER = [(rloo, 4), (lora, 4), (topk_mask, 3), (penalty, 3), (rloo_penalty, 2)]
LATER = [pytest.param(*case, marks=pytest.mark.slow) for case in LATER]


@pytest.mark.parametrize(("make", "offset"), [*RESUMED, *LATER])
def test_other_runs_resume_exactly(make, offset, uninterrupted, tmp_path):
    expected = uninterrupted(make.__name__, make)
    resumed = make(tmp_path, save_strategy="no")
    resumed.train(f"{expected.args.output_dir}/checkpoint-{offset}")
    assert_same_run(expected, resumed)


def test_saving_does_not_change_the_run(uninterrupted, tmp_path):
    unsaved = grpo(tmp_path, **CONFIGURATIONS["eight_updates"] | {"save_strategy": "no"})
    unsaved.train()
    assert_same_run(uninterrupted("eight_updates"), unsaved)


def test_a_run_resumed_twice_is_exact(uninterrupted, tmp_path):
    expected = uninterrupted("accumulation")
    shutil.copytree(f"{expected.args.output_dir}/checkpoint-3", tmp_path / "checkpoint-3")
    for last in (5, 9):
        resumed = grpo(tmp_path, **CONFIGURATIONS["accumulation"])
        stop_after(resumed, last)
        resumed.train(resume_from_checkpoint=True)
    assert_same_run(expected, resumed)


def stop_after(trainer, step):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step >= step

    trainer.add_callback(Stop())


@pytest.mark.parametrize("given", ["newest", "path"])
def test_a_finished_run_takes_no_further_update(given, uninterrupted, tmp_path):
    """transformers takes one more, since it looks for the end only after an update."""
    expected = uninterrupted("eight_updates")
    shutil.copytree(f"{expected.args.output_dir}/checkpoint-9", tmp_path / "checkpoint-9")
    resumed = grpo(tmp_path, **CONFIGURATIONS["eight_updates"])
    resumed.train(resume_from_checkpoint=True if given == "newest" else str(tmp_path / "checkpoint-9"))
    assert_same_run(expected, resumed)


# -- Without the rollout batch ----------------------------------------------------------------------------------------


def rollouts_of(trainer) -> list[tuple[int, list[str]]]:
    """The update before which each rollout batch is generated from now on, and its prompts."""
    seen, generate = [], trainer._generate

    def recording(prompts):
        seen.append((trainer.state.global_step, list(prompts)))
        return generate(prompts)

    trainer._generate = recording
    return seen


def nine_updates(folder, **options):
    """A run's folder with a checkpoint after each of its updates, and its rollouts, each for four of them."""
    run = grpo(folder, **options)
    rollouts = rollouts_of(run)
    run.train()
    assert [step for step, _ in rollouts] == [0, 4, 8]
    return folder, rollouts


@pytest.fixture(scope="module")
def saved_rollouts(tmp_path_factory):
    return nine_updates(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("reason", ["file", "option", "ranks", "layout", "temperature"])
def test_without_its_rollout_batch_a_run_generates_a_fresh_one(reason, saved_rollouts, tmp_path, caplog):
    """In step with the data: the fresh batch is for the prompts of the lost one, later ones come when they would."""
    not_saved = reason == "option"
    first, rollouts = nine_updates(tmp_path / "first", save_rollouts=False) if not_saved else saved_rollouts
    folder, options = tmp_path / "checkpoint-5", {}
    shutil.copytree(first / "checkpoint-5", folder)
    file = folder / FILE
    if reason in ("file", "ranks"):
        (folder / "complete.json").unlink()
    if reason == "file":
        file.unlink()
    elif reason == "ranks":
        file.rename(folder / FILE.replace("of-1", "of-2"))
    elif reason == "layout":
        options = {"steps_per_generation": 2}
    elif reason == "temperature":  # by which the saved old policy was computed
        options = {"temperature": 0.5}

    resumed = grpo(tmp_path / "resumed", save_strategy="no", **options)
    fresh = rollouts_of(resumed)
    with caplog.at_level("WARNING"):
        resumed.train(str(folder))
    assert "a fresh one is generated" in caplog.text
    if reason in options:
        assert f"The checkpoint was made with another {reason} (1.0, now 0.5)." in caplog.text
    assert resumed.state.global_step == 9
    if reason == "layout":
        assert [step for step, _ in fresh] == [5, 6, 8]
        return
    assert fresh[0] == (5, rollouts[1][1])
    assert fresh[1] == rollouts[2]


def test_another_trust_region_is_said_and_gets_a_fresh_batch(uninterrupted, tmp_path, caplog):
    binary, projection = uninterrupted("binary_mask", binary_mask), uninterrupted("eight_updates")
    for before, make, changed in (
        (binary, topk_mask, ["divergence_type (binary_tv, now topk_kl)", "another support_size (None, now "]),
        (projection, binary_mask, ["divergence_bound (None, now 0.", "another support_size (", ", now None)"]),
    ):
        caplog.clear()
        resumed = make(tmp_path / make.__name__, steps_per_generation=8, save_strategy="no")
        rollouts = rollouts_of(resumed)
        with caplog.at_level("WARNING"):
            resumed.train(f"{before.args.output_dir}/checkpoint-3")
        assert "The checkpoint was made with another trust region: " in caplog.text
        assert all(part in caplog.text for part in changed), caplog.text
        assert [step for step, _ in rollouts] == [3, 8]
        assert resumed.state.global_step == 9


def test_another_bound_keeps_the_rollout_batch(uninterrupted, tmp_path, caplog):
    before = uninterrupted("eight_updates").args
    resumed = grpo(tmp_path, steps_per_generation=8, save_strategy="no", kl_bound=0.4, regression_coef=0.5)
    rollouts = rollouts_of(resumed)
    with caplog.at_level("WARNING"):
        resumed.train(f"{before.output_dir}/checkpoint-3")
    assert f"kl_bound ({before.kl_bound}, now 0.4), regression_coef (1.0, now 0.5)" in caplog.text
    assert "a fresh one" not in caplog.text
    assert [step for step, _ in rollouts] == [8]


def test_at_the_end_of_a_rollout_batch_nothing_is_lost_without_it(tmp_path, caplog):
    first = grpo(tmp_path, save_rollouts=False, **FIVE)
    first.train()
    resumed = grpo(tmp_path / "resumed", save_strategy="no", **FIVE)
    with caplog.at_level("WARNING"):
        resumed.train(str(tmp_path / "checkpoint-4"))
    assert "fresh" not in caplog.text
    assert_same_run(first, resumed)


def test_the_file_is_of_the_stated_size(uninterrupted):
    """For a live token with k kept ones 8·k + 8 bytes of the old policy; at most 32 more a token, padding included."""
    folder = uninterrupted("eight_updates").args.output_dir
    with torch.serialization.safe_globals([RaggedDistribution]):
        batches = torch.load(f"{folder}/checkpoint-3/{FILE}", weights_only=True)["batches"]
        assert torch.load(f"{folder}/checkpoint-8/{FILE}", weights_only=True)["batches"] is None
    assert len(batches) == 8
    tokens = sum(batch["completion_ids"].numel() for batch in batches)
    live = sum(int(batch["completion_mask"].sum()) for batch in batches)
    old = [batch["troll_old_policy"] for batch in batches]
    kept = sum(int(part.counts.sum()) for part in old)
    prompts = sum(batch[f"prompt_{name}"].numel() * 8 for batch in batches for name in ("ids", "mask"))
    rows = 8 * 8 * 8  # advantages and counts of 8 batches of 8 rows
    assert 0 < sum(part.nbytes for part in old) <= 8 * kept + 8 * live + rows
    # Nor is anything else of a storage written
    size, overhead = Path(folder, "checkpoint-3", FILE).stat().st_size, 300 * 8 * 16
    assert size <= 8 * kept + 8 * live + 32 * tokens + prompts + 2 * rows + overhead


def test_a_tied_head_is_not_missing(uninterrupted, tmp_path, caplog):
    """It is in no file, and was reported as a missing key, which looks like a damaged checkpoint."""
    resumed = grpo(tmp_path, **CONFIGURATIONS["eight_updates"] | {"save_strategy": "no"})
    with caplog.at_level("WARNING"):
        resumed.train(f"{uninterrupted('eight_updates').args.output_dir}/checkpoint-8")
        assert "missing keys" not in caplog.text and "made with another" not in caplog.text
        resumed._issue_warnings_after_load(_IncompatibleKeys(["lm_head.weight", "model.norm.weight"], []))
    assert "missing keys in the checkpoint model loaded: ['model.norm.weight']" in caplog.text


def test_a_stock_checkpoint_resumes_with_a_warning(tmp_path, caplog):
    """One of TRL's own trainer has neither our file nor a marker."""
    from trl import GRPOConfig, GRPOTrainer

    options = {name: value for name, value in OPTIONS.items() if name != "kl_bound"}
    stock = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options, epsilon=0.2)
    stop_after(stock, 3)
    stock.train()
    resumed = grpo(tmp_path, save_strategy="no", **FIVE)
    with pytest.raises(ValueError, match=r"checkpoint-3 \(it has no complete.json: .* be given by its path"):
        resumed.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"but checkpoint-3, .* `--resume_from_checkpoint .*/checkpoint-3`, or name"):
        resumed.find_checkpoint("newest")  # a new run would replace it
    with caplog.at_level("WARNING"):
        resumed.train(str(tmp_path / "checkpoint-3"))
    assert "which may be incomplete" in caplog.text and "a fresh one is generated" in caplog.text
    assert resumed.state.global_step == 5


def test_a_checkpoint_resumes_in_trls_own_trainer(uninterrupted, tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    stock = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, steps_per_generation=8, **FIVE)
    stock.train(f"{uninterrupted('eight_updates').args.output_dir}/checkpoint-3")
    assert stock.state.global_step == 5

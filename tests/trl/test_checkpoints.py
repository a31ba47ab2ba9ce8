"""A resumed run is the uninterrupted one, bit for bit; checkpoints are complete or absent; other options are named."""

import functools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.tiny import saved_model, tiny_model, tiny_prompts
from tests.trl_comparison import OURS, assert_same_run, logged, make_trainer, weights
from troll_trl.resilience.checkpoint_folders import MARKER, SAVING, newest_complete, why_incomplete
from troll_trl.resilience.checkpoints import CheckpointError
from troll_trl.resilience.resumed_options import compare_options, options_of

FILE = "rollout-state-0-of-1.pt"
OPTIONS = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 2e-2, "max_steps": 5, "kl_bound": 0.01}


grpo = functools.partial(make_trainer, *OURS["grpo"], **OPTIONS)
rloo = functools.partial(make_trainer, *OURS["rloo"], **OPTIONS, beta=0.0)


def lora(folder, target_modules=("q_proj", "v_proj"), r=4, **options):
    config = LoraConfig(r=r, target_modules=[*target_modules], lora_dropout=0.1)  # dropout draws random numbers
    return grpo(folder, peft_config=config, beta=0.1, **options)


def stop_after(trainer, step):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step >= step

    trainer.add_callback(Stop())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Of five updates, four of them on the first rollout batch, with a checkpoint after each."""
    trainer = grpo(tmp_path_factory.mktemp("uninterrupted"))
    trainer.train()
    return trainer


@pytest.fixture
def folder(uninterrupted, tmp_path):
    """A copy of its run folder."""
    return Path(shutil.copytree(uninterrupted.args.output_dir, tmp_path / "copy"))


# -- Exact ------------------------------------------------------------------------------------------------------------

TWO_ITERATIONS = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 32, "max_steps": 7}
ACCUMULATION = {"gradient_accumulation_steps": 2, "logging_steps": 3, "weight_decay": 0.1, "max_steps": 9}
EPOCHS = {"steps_per_generation": 2, "per_device_train_batch_size": 32, "max_steps": 9, "lr_scheduler_type": "cosine"}
EPOCHS |= {"use_adaptive_entropy": True, "entropy_target": 10.0}
CASES = [
    *((grpo, {}, 1), (grpo, TWO_ITERATIONS, 3), (grpo, ACCUMULATION, 4), (grpo, EPOCHS, 6), (lora, {}, 2)),
    *((rloo, {}, 2), (grpo, {"trust_region": "mask"}, 3)),
]


@pytest.mark.parametrize(("make", "options", "step"), CASES)
def test_a_run_resumes_exactly_also_inside_a_rollout_batch(make, options, step, tmp_path):
    (expected := make(tmp_path / "first", **options)).train()
    random.seed(step), np.random.seed(step), torch.manual_seed(step)
    resumed = make(tmp_path / "second", **options | {"save_strategy": "no"})
    resumed.train(str(tmp_path / "first" / f"checkpoint-{step}"))
    assert_same_run(expected, resumed)


def test_a_run_resumed_twice_is_exact_and_a_finished_one_takes_no_further_update(uninterrupted, folder):
    for step in (3, 4, 5):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for last in (4, 5, 5):
        resumed = grpo(folder)
        stop_after(resumed, last)
        resumed.train(resume_from_checkpoint="newest")
        assert resumed.state.global_step == last
    assert_same_run(uninterrupted, resumed)


# -- Without the rollout batch ----------------------------------------------------------------------------------------


def rollouts_of(trainer) -> list[tuple[int, list[str]]]:
    """The update before which each rollout batch is generated from now on, and its prompts."""
    seen, generate = [], trainer._generate

    def recording(prompts):
        seen.append((trainer.state.global_step, list(prompts)))
        return generate(prompts)

    trainer._generate = recording
    return seen


@pytest.mark.parametrize(
    ("options", "reason"), [(None, FILE), ({"temperature": 0.5}, "temperature"), ({"trust_region": "mask"}, "mask")]
)
def test_what_cannot_be_continued_gets_a_fresh_batch(options, reason, folder, tmp_path, caplog):
    """In step with the data: the fresh batch serves the updates that were left, and the next one comes in time."""
    if options is None:
        (folder / "checkpoint-3" / FILE).unlink()
        (folder / "checkpoint-3" / MARKER).unlink()
    resumed = grpo(tmp_path / "resumed", save_strategy="no", **options or {})
    fresh = rollouts_of(resumed)
    with caplog.at_level("WARNING"):
        resumed.train(str(folder / "checkpoint-3"))
    assert reason in caplog.text and "a fresh one is generated" in caplog.text
    assert [step for step, _ in fresh] == [3, 4]
    assert set(fresh[0][1]) <= set(tiny_prompts()["prompt"]) and fresh[0][1] != fresh[1][1]
    assert resumed.state.global_step == 5


def test_without_saved_rollouts_nothing_is_lost_at_the_end_of_a_batch(tmp_path, caplog):
    (first := grpo(tmp_path, save_rollouts=False)).train()
    for step, fresh in ((4, False), (3, True)):
        resumed = grpo(tmp_path / str(step), save_strategy="no")
        with caplog.at_level("WARNING"):
            resumed.train(str(tmp_path / f"checkpoint-{step}"))
        assert ("a fresh one is generated" in caplog.text) == fresh
        if not fresh:
            assert_same_run(first, resumed)


def test_trls_checkpoints_and_ours_resume_in_the_other_trainer(folder, tmp_path, caplog):
    options = {"max_steps": 5, "learning_rate": 2e-2}
    stock = make_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", save_strategy="steps", save_steps=1, **options)
    stock.train(str(folder / "checkpoint-3"))
    resumed = grpo(tmp_path / "stock")
    for resume in (True, "newest"):  # a new run would replace it
        with pytest.raises(ValueError, match=f"checkpoint-5 .it has no {MARKER}"):
            resumed.find_checkpoint(resume)
    with caplog.at_level("WARNING"):
        resumed.train(str(tmp_path / "stock" / "checkpoint-4"))
    assert "may be incomplete" in caplog.text and resumed.state.global_step == 5


# -- Other options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"learning_rate": 1e-2}, ["learning_rate (0.02, now 0.01)"]),
        ({"dataset": tiny_prompts(24)}, ["training rows (32, now 24)"]),
        ({"kl_bound": 0.4, "loss_type": "grpo"}, ["kl_bound (0.01, now 0.4)", "loss_type (dapo, now grpo)"]),
    ],
)
def test_other_options_are_named(options, named, folder, tmp_path, caplog):
    resumed = grpo(tmp_path, save_strategy="no", **options)
    stop_after(resumed, 4)
    with caplog.at_level("WARNING"):
        resumed.train(str(folder / "checkpoint-3"))
    assert caplog.text.count("Resuming with other options") == 1
    assert all(change in caplog.text for change in named)
    assert "a fresh one" not in caplog.text
    assert logged(resumed, "learning_rate")[3:] in ([2e-2], []), "the checkpoint's"


def test_the_same_options_are_not_named(uninterrupted, folder, caplog):
    now = options_of(uninterrupted)
    for resume in (None, str(folder)):
        assert compare_options({**now, "resume_from_checkpoint": resume}, folder / "checkpoint-3") == {}
    assert caplog.text == "" and [*compare_options({**now, "seed": 1}, folder / "checkpoint-3")] == ["seed"]


def test_a_model_that_is_the_checkpoint_moves_the_reference(tmp_path, caplog):
    start = saved_model(tmp_path / "model")
    load = AutoModelForCausalLM.from_pretrained
    grpo(tmp_path / "run", model=load(start), beta=0.1, max_steps=2).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    for model in (start, checkpoint):
        resumed = grpo(tmp_path / "resumed", model=load(model), beta=0.1, max_steps=2, save_strategy="no")
        with caplog.at_level("WARNING"):
            resumed.train(checkpoint)
        assert (f", now {checkpoint})" in caplog.text) == (model == checkpoint)


def test_an_adapter_that_lacks_weights_is_refused(tmp_path):
    """PEFT and the Trainer would leave them at their start, in silence."""
    lora(tmp_path, max_steps=2).train()
    other = lora(tmp_path / "other", target_modules=("k_proj", "v_proj"))
    with pytest.raises(ValueError, match=r"lacks 4 weights .*k_proj"):
        other.train(str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match=r"another model or adapter: its .*lora_.* is \[(4, 16|16, 4)"):
        lora(tmp_path / "other", r=8).train(str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match=r"has an adapter"):
        grpo(tmp_path / "other").train(str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    checkpoint = str(folder / "checkpoint-3")
    for options, reason in (
        ({"intermediate_size": 64}, r"is \[16, 32\], but this"),
        ({"num_hidden_layers": 3}, "2 layers"),
    ):
        with pytest.raises(ValueError, match=reason):
            grpo(tmp_path, model=tiny_model(**options)).train(checkpoint)
    with pytest.raises(ValueError, match="has a whole model"):
        lora(tmp_path).train(checkpoint)


def test_a_checkpoint_without_an_optimizer_is_named(tmp_path, caplog):
    """The Trainer begins with a new one in silence."""
    grpo(tmp_path, save_only_model=True, max_steps=1).train()
    with caplog.at_level("WARNING"):
        grpo(tmp_path, max_steps=2).train("newest")
    assert "checkpoint-1 lacks optimizer or schedule" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        grpo(tmp_path, max_steps=3).train("newest")
    assert "lacks optimizer" not in caplog.text


def test_no_token_is_saved(tmp_path):
    grpo(tmp_path, hub_token="hf_secret", max_steps=1).train()
    assert "hf_secret" not in (tmp_path / "checkpoint-1" / "options.json").read_text()


@pytest.mark.parametrize(("last", "resumed", "kept"), [(4, 4, {6, 8}), (8, 2, {4, 8})])
@pytest.mark.parametrize("ahead", [0, 3600])
def test_the_newest_checkpoints_are_kept_whatever_the_clock(last, resumed, kept, ahead, tmp_path):
    """Older ones with dates in the future (a clock set back, a copied folder) were kept in place of the new ones. By
    the steps alone, a run that resumes from 2 would lose its new 4 to the 6 and 8 of an earlier run."""
    options = {"save_steps": 2, "steps_per_generation": 1, "max_completion_length": 2}
    grpo(tmp_path, max_steps=last, **options).train()
    now = time.time() + ahead
    for step in range(2, last + 1, 2):
        os.utime(tmp_path / f"checkpoint-{step}", (now + step / 100, now + step / 100))
    run = grpo(tmp_path, max_steps=8, save_total_limit=2, **options)
    stop_after(run, 8 if last == 4 else 4)
    run.train(str(tmp_path / f"checkpoint-{resumed}"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in kept}


# -- The best checkpoint ----------------------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}


def evaluated(folder, rewards, **options):
    """A run whose evaluation after update n gives the n-th reward. The two newest checkpoints and the best are kept."""

    def reward(completions, trainer_state, **kwargs):
        level = rewards[max(trainer_state.global_step, 1) - 1]
        return [None if level is None else level + n % 2 for n in range(len(completions))]

    return grpo(folder, reward=reward, eval_dataset=tiny_prompts(2), **EVALUATED | options)


REWARDS = [1.0, 9.0, 2.0, 3.0, 2.0]


@pytest.fixture(scope="module")
def best_at_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    evaluated(folder, REWARDS, max_steps=3).train()
    return folder


@pytest.mark.parametrize("change", ["copied", "gone", "metric"])
def test_the_best_checkpoint_is_found_or_forgotten(change, best_at_2, tmp_path):
    """Of a moved folder it was deleted as an old one, and of a copied one the original was read."""
    shutil.copytree(best_at_2, tmp_path, dirs_exist_ok=True)
    if change == "gone":
        shutil.rmtree(tmp_path / "checkpoint-2")
        state = tmp_path / "checkpoint-3" / "trainer_state.json"
        state.write_text(state.read_text().replace(str(best_at_2), str(tmp_path)))
        (tmp_path / "checkpoint-3" / MARKER).unlink()
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": False} if change == "metric" else {}
    trainer = evaluated(tmp_path, REWARDS, **options)
    trainer.train(str(tmp_path / "checkpoint-3"))
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and (best.name == "checkpoint-2") == (change == "copied")
    model = AutoModelForCausalLM.from_pretrained(best)
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_an_evaluation_without_a_reward_is_saved(missing, tmp_path):
    """TRL's `None` ended the run in a `TypeError` before the step was saved."""
    trainer = evaluated(tmp_path, [missing, 5.0, missing], max_steps=3, max_skipped_updates=9)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-3"


# -- Interrupted ------------------------------------------------------------------------------------------------------


def signal_during(trainer, step, times=1):
    class Send(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            for _ in range(times if state.global_step == step else 0):
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(Send())


@pytest.mark.parametrize("options", [{"save_steps": 100}, {"save_strategy": "no", "enable_jit_checkpoint": True}])
def test_sigterm_saves_and_stops(options, uninterrupted, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    trainer = grpo(tmp_path, **options)
    assert signal.getsignal(signal.SIGTERM) == before, "transformers' handler is gone"
    signal_during(trainer, 2)
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 143 and signal.getsignal(signal.SIGTERM) == before
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-3"
    (resumed := grpo(tmp_path)).train("newest")
    assert_same_run(uninterrupted, resumed)


def in_process(function, *args) -> int:
    """Call `function` in a process that has imported this module, and return its exit code."""
    os.environ["PYTHONPATH"] = str(ROOT)  # the server does not get pytest's own additions to the path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    (process := context.Process(target=function, args=args)).start()
    process.join(HANG)
    return process.exitcode


def terminate(folder, times):
    signal_during(trainer := grpo(folder), 2, times)
    trainer.train()


@pytest.mark.parametrize(("times", "code", "newest"), [(1, 143, 3), (2, -signal.SIGTERM, 2)])
def test_a_second_sigterm_ends_at_once(times, code, newest, tmp_path):
    assert in_process(terminate, str(tmp_path), times) == code
    assert newest_complete(tmp_path)[0] == tmp_path / f"checkpoint-{newest}"


def at_each_access(trainer, act):
    """Call `act(n)` before the nth access to files of the save after update 4."""
    accesses = []

    def hook(event, args):
        inside = event.startswith(("open", "os.", "shutil.")) and trainer.state.global_step == 4
        if inside and args and isinstance(args[0], str | os.PathLike) and trainer.args.output_dir in str(args[0]):
            accesses.append(1)
            act(len(accesses))

    sys.addaudithook(hook)
    return accesses


def count_accesses(folder):
    accesses = at_each_access(trainer := grpo(folder), lambda n: None)
    trainer.train()
    Path(folder, "accesses").write_text(str(len(accesses)))


def die_at_access(folder, point):
    at_each_access(trainer := grpo(folder), lambda n: n == point and os.kill(os.getpid(), signal.SIGKILL))
    trainer.train("newest")


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True], ids=["new", "replacing"])
def test_killed_at_points_of_a_save(stale, uninterrupted, tmp_path):
    """With `stale`, a damaged checkpoint of the same step is in the way."""
    assert in_process(count_accesses, str(tmp_path / "count")) == 0
    accesses = int((tmp_path / "count" / "accesses").read_text())
    seen = set()
    for point in {1 + i * (accesses - 1) // 8 for i in range(9)}:
        folder, source = tmp_path / str(point), Path(uninterrupted.args.output_dir)
        shutil.copytree(source / "checkpoint-3", folder / "checkpoint-3")
        if stale:
            shutil.copytree(source / "checkpoint-4", folder / "checkpoint-4")
            cut(folder / "checkpoint-4" / "optimizer.pt")
        assert in_process(die_at_access, str(folder), point) == -signal.SIGKILL
        found, _ = newest_complete(folder)
        seen.add(found.name)
        (resumed := grpo(folder)).train("newest")
        assert_same_run(uninterrupted, resumed)
        assert not (folder / SAVING).exists()
    assert seen == {"checkpoint-3", "checkpoint-4"}


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    write_text = Path.write_text

    def full(self, *args, **kwargs):
        if self.name == MARKER and self.parent.name == "checkpoint-3":
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        grpo(tmp_path).train()
    found, skipped = newest_complete(tmp_path)
    assert found.name == "checkpoint-2" and SAVING in skipped[0]
    assert not (tmp_path / "checkpoint-3").exists()


def test_a_full_disk_ends_with_what_to_do(tmp_path):
    """Of an optimizer that did not fit, torch only says "unexpected pos"."""
    trainer, limits = grpo(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    save = trainer._save_optimizer_and_scheduler

    def save_half(folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
        save(folder)

    trainer._save_optimizer_and_scheduler = save_half
    try:
        with pytest.raises(
            CheckpointError,
            match=r"checkpoint-1 was not saved: .*Make this folder writable, with room",
        ):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def garble(path: Path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "has no complete.json"),
        (lambda folder: cut(folder / "optimizer.pt"), "optimizer.pt has"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / MARKER).write_text('{"files": {}}'), "does not list trainer_state.json"),
        (lambda folder: garble(folder / "model.safetensors"), "model.safetensors cannot be read"),
        (lambda folder: garble(folder / "optimizer.pt"), "optimizer.pt cannot be read"),
        (lambda folder: garble(folder / "trainer_state.json"), "trainer_state.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_if_given_refused(damage, reason, folder):
    shutil.copytree(folder / "checkpoint-5", folder / "checkpoint-10")  # as text, 5 would be the newer
    damage(folder / "checkpoint-10")
    found, (skipped,) = newest_complete(folder)
    assert found.name == "checkpoint-5" and "checkpoint-10" in skipped and reason in skipped
    if (folder / "checkpoint-10" / MARKER).exists():
        with pytest.raises(ValueError, match=reason):
            grpo(folder).find_checkpoint(str(folder / "checkpoint-10"))


def test_a_complete_checkpoint_without_its_name_gets_it(folder):
    """Killed between the marker and the rename."""
    (folder / SAVING).mkdir()
    (folder / "checkpoint-5").rename(folder / SAVING / "checkpoint-5")
    shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-5")  # half of an older one that was being replaced
    cut(folder / "checkpoint-5" / "model.safetensors")
    assert newest_complete(folder) == (folder / "checkpoint-5", [])
    assert why_incomplete(folder / "checkpoint-5") is None and not (folder / SAVING).exists()


def test_a_checkpoint_is_uploaded_under_its_name(tmp_path, monkeypatch):
    """The upload goes on while the run does: a folder that is renamed meanwhile would be lost to it."""
    uploaded = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, checkpoint_folder: uploaded.append(checkpoint_folder)
    )
    trainer = grpo(tmp_path, max_steps=1)
    trainer.args.push_to_hub = True
    trainer.train()
    assert uploaded == [str(tmp_path / "checkpoint-1")]

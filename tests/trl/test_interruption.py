"""A killed run can be resumed: from the last complete checkpoint, to the weights of the uninterrupted run.

Runs that die are children of a fork server that has imported everything, so that each takes about a second.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from repository import IMPORT_PATH
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer
from troll_trl.resilience.checkpoint_folder import MARKER, SAVING, newest_complete, publish, why_incomplete

OPTIONS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "learning_rate": 2e-2, "kl_bound": 0.01}


def grpo(folder, **options):
    return make_trainer(TrollGRPOTrainer, TrollGRPOConfig, folder, **OPTIONS | options)


def train(folder, resume=True, **options):
    """As a cluster's job would: from the newest complete checkpoint, or from the start."""
    trainer = grpo(folder, **options)
    trainer.train(resume_from_checkpoint=resume and newest_complete(Path(folder))[0] is not None)
    return trainer


def final_weights(folder, step=5):
    return load_file(Path(folder, f"checkpoint-{step}", "model.safetensors"))


def assert_same_weights(expected, actual):
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def start():
    """Start `function(*args)` in a process that has imported this module; its errors go to the file `errors`."""
    # The server does not get pytest's own additions to the path
    os.environ["PYTHONPATH"] = IMPORT_PATH
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(function, *args, errors=os.devnull):
        process = context.Process(target=with_stderr, args=(str(errors), function, *args))
        process.start()
        return process

    return start


def with_stderr(errors, function, *args):
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    function(*args)


# -- SIGKILL ----------------------------------------------------------------------------------------------------------


class DuringSave:
    """Calls `act(n)` before the nth access to files of the save after update 4."""

    def __init__(self, trainer, act):
        self.trainer, self.act, self.count = trainer, act, 0
        sys.addaudithook(self)

    def __call__(self, event, args):
        if not event.startswith(("open", "os.", "shutil.")) or self.trainer.state.global_step != 4:
            return
        if args and isinstance(args[0], str | os.PathLike) and self.trainer.args.output_dir in str(args[0]):
            self.count += 1
            self.act(self.count)


def count_accesses(folder):
    trainer = grpo(folder)
    during = DuringSave(trainer, lambda n: None)
    trainer.train()
    Path(folder, "accesses").write_text(str(during.count))


def die_at_access(folder, point, stale):
    """Killed before the nth access. With `stale`, a complete checkpoint of an older run is in the way."""
    trainer = grpo(folder)
    DuringSave(trainer, lambda n: n == point and os.kill(os.getpid(), signal.SIGKILL))
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")) if stale else None)


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True], ids=["new", "replacing"])
def test_killed_at_points_of_a_save(stale, start, uninterrupted, tmp_path):
    counting = start(count_accesses, str(tmp_path / "count"))
    counting.join(120)
    accesses = int((tmp_path / "count" / "accesses").read_text())
    assert accesses >= 12
    points = {1 + i * (accesses - 1) // 8 for i in range(9)} if not stale else range(accesses - 3, accesses + 1)
    seen = set()
    for point in points:
        folder = tmp_path / str(point)
        if stale:
            shutil.copytree(uninterrupted / "checkpoint-2", folder / "checkpoint-2")
            shutil.copytree(uninterrupted / "checkpoint-4", folder / "checkpoint-4")
        killed = start(die_at_access, str(folder), point, stale)
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL
        found, _ = newest_complete(folder)
        assert found is not None and why_incomplete(folder / "checkpoint-2") is None
        assert get_last_checkpoint(folder) == str(found), "stock transformers, too, finds a complete one"
        seen.add(found.name)
        train(folder)
        assert_same_weights(final_weights(uninterrupted), final_weights(folder))
        assert not (folder / SAVING).exists()
    assert seen == ({"checkpoint-4"} if stale else {"checkpoint-2", "checkpoint-4"})


def train_on(folder):
    train(folder, save_steps=1, max_steps=10_000, save_total_limit=3)


@pytest.mark.slow
def test_killed_at_fifty_random_times(start, tmp_path):
    """One run, killed again and again, and resumed from wherever it was; three checkpoints are kept."""
    times, last = random.Random(0), 0
    for _ in range(50):
        process = start(train_on, str(tmp_path))
        time.sleep(times.uniform(0.5, 3.0))
        assert process.exitcode is None, "killed, not ended"
        process.kill()
        process.join(60)
        found = newest_complete(tmp_path)[0]
        step = int(found.name.split("-")[1]) if found else 0
        assert step >= last, "a complete checkpoint is never lost"
        last = step
    assert last > 20
    trainer = train(tmp_path, save_steps=1, max_steps=last + 3, save_total_limit=3)
    straight = grpo(tmp_path / "straight", save_strategy="no", max_steps=last + 3)
    straight.train()
    for name, value in straight.model.named_parameters():
        assert torch.equal(value, trainer.model.get_parameter(name)), name


# -- Disk full --------------------------------------------------------------------------------------------------------


def train_without_room(folder, limit):
    """From update 4 on, no file may grow beyond `limit` bytes."""
    trainer = grpo(folder)

    class Full(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    trainer.add_callback(Full())
    trainer.train()


def test_a_file_that_cannot_be_written_leaves_the_last_checkpoint(start, uninterrupted, tmp_path):
    limit = 60_000
    sizes = {path.name: path.stat().st_size for path in (uninterrupted / "checkpoint-4").iterdir()}
    assert sizes["model.safetensors"] < limit < sizes["optimizer.pt"], sizes
    process = start(train_without_room, str(tmp_path / "run"), limit, errors=tmp_path / "errors")
    process.join(120)
    assert process.exitcode == 1
    said = (tmp_path / "errors").read_text()
    assert "checkpoint-4 could not be saved in" in said and "MiB free" in said
    assert not (tmp_path / "run" / SAVING).exists(), "what was written takes no room"
    train(tmp_path / "run")
    assert_same_weights(final_weights(uninterrupted), final_weights(tmp_path / "run"))


def test_a_marker_that_cannot_be_written_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """The disk fills up with the last file."""
    trainer = grpo(tmp_path)
    write_text = Path.write_text

    def full(self, *args, **kwargs):
        if self.name == MARKER and trainer.state.global_step == 4:
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as error:
        trainer.train()
    assert f"checkpoint-4 could not be saved in {tmp_path} (" in error.value.__notes__[0]
    assert not (tmp_path / SAVING).exists() and not (tmp_path / "checkpoint-4").exists()


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


def signal_during(trainer, step, number=signal.SIGTERM):
    class Send(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), number)

    trainer.add_callback(Send())


@pytest.mark.parametrize("jit", [False, True], ids=["default", "transformers_option"])
def test_sigterm_saves_and_stops(jit, uninterrupted, tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    trainer = grpo(tmp_path, enable_jit_checkpoint=jit)
    signal_during(trainer, 2)
    with caplog.at_level("WARNING"), pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 143
    assert "SIGTERM: saving after update 3 of 5" in caplog.text
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-3"
    assert signal.getsignal(signal.SIGTERM) == before
    train(tmp_path)
    assert_same_weights(final_weights(uninterrupted), final_weights(tmp_path))


def test_sigterm_in_the_last_update_is_no_interruption(tmp_path):
    trainer = grpo(tmp_path)
    signal_during(trainer, 4)
    trainer.train()
    assert trainer.state.global_step == 5 and why_incomplete(tmp_path / "checkpoint-5") is None


def test_a_run_without_checkpoints_leaves_sigterm_alone(tmp_path):
    trainer = grpo(tmp_path, save_strategy="no", max_steps=2)
    seen = []

    class Look(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer.add_callback(Look())
    before = signal.getsignal(signal.SIGTERM)
    trainer.train()
    assert seen == [before, before]


def terminate_twice(folder):
    trainer = grpo(folder)
    signal_during(trainer, 2)
    signal_during(trainer, 2)
    trainer.train()


def test_a_second_sigterm_ends_at_once(start, tmp_path):
    process = start(terminate_twice, str(tmp_path))
    process.join(120)
    assert process.exitcode == -signal.SIGTERM
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-2"


# -- Folders ----------------------------------------------------------------------------------------------------------


def checkpoint_at(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "part").mkdir()
    (folder / "part" / "0").write_bytes(b"shard")
    return folder


def published(output_dir: Path, step: int) -> Path:
    destination = output_dir / f"checkpoint-{step}"
    publish(checkpoint_at(output_dir / SAVING / destination.name), destination)
    return destination


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "has no complete.json"),
        (lambda folder: (folder / MARKER).write_text("{"), "complete.json cannot be read"),
        (lambda folder: (folder / MARKER).write_text("[]"), "complete.json cannot be read"),
        (lambda folder: cut(folder / "part" / "0"), "part/0 has 4 bytes instead of 5"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    ],
)
def test_what_is_skipped_and_why(damage, reason, tmp_path):
    good, bad = published(tmp_path, 9), published(tmp_path, 10)  # as text, 9 would be the newer
    (tmp_path / "checkpoint-final").mkdir()
    damage(bad)
    found, skipped = newest_complete(tmp_path)
    assert found == good
    assert len(skipped) == 1 and "checkpoint-10" in skipped[0] and reason in skipped[0]
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_a_complete_checkpoint_without_its_name_gets_it(tmp_path):
    """Killed between the marker and the rename."""
    published(tmp_path, 2)
    waiting = published(tmp_path, 4)
    (tmp_path / SAVING).mkdir()
    waiting.rename(tmp_path / SAVING / "checkpoint-4")
    shutil.copytree(tmp_path / "checkpoint-2", waiting)  # half of an older one that was being replaced
    cut(waiting / "model.safetensors")
    assert newest_complete(tmp_path) == (waiting, [])
    assert why_incomplete(waiting) is None and not (tmp_path / SAVING).exists()


def test_a_damaged_checkpoint_given_by_its_path_is_refused(uninterrupted, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(uninterrupted / "checkpoint-4", folder)
    cut(folder / "optimizer.pt")
    trainer = grpo(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint-4 is damaged.*: optimizer\.pt has .* bytes instead of"):
        trainer.train(str(folder))
    with pytest.raises(ValueError, match=r"no complete checkpoint .* Skipped: checkpoint-4 \(optimizer\.pt has"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint-5 is damaged, or is not there"):
        trainer.train(str(tmp_path / "checkpoint-5"))


def test_a_checkpoint_is_uploaded_under_its_name(tmp_path, monkeypatch):
    """The upload goes on while the run does: a folder that is renamed meanwhile would be lost to it."""
    uploaded = []

    def push(self, checkpoint_folder):
        uploaded.append((checkpoint_folder, why_incomplete(Path(checkpoint_folder))))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    trainer = grpo(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert uploaded == [(str(tmp_path / "checkpoint-2"), None)]

"""Checkpoints that are either complete or absent, the one to resume from, and SIGTERM as "save, then stop"."""

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint, rotate_checkpoints

from troll_trl.resilience.best_model import FindBestCheckpoint
from troll_trl.resilience.checkpoint_folder import (
    CHECKPOINT,
    MARKER,
    SAVING,
    newest_complete,
    publish,
    unmarked,
    why_incomplete,
)

if TYPE_CHECKING:  # the trainer, which follows in the list of bases
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class CheckpointedTrainer(_Trainer):
    """Mixin for a Trainer whose checkpoints are complete or absent, and which saves and ends on SIGTERM. The Trainer
    writes each into a folder aside, which is renamed once it is complete. The Trainer's `enable_jit_checkpoint` must be
    off. `__init__` calls [`set_up_checkpoints`] last."""

    _whole_checkpoints = True  # if false, the Trainer saves and finds them in its own way
    _is_saving = False
    stop_signal: "StopSignal"
    best_checkpoint: FindBestCheckpoint

    def set_up_checkpoints(self) -> None:
        self.best_checkpoint = FindBestCheckpoint()
        self.add_callback(self.best_checkpoint)
        self.stop_signal = StopSignal(self.accelerator)
        if self.args.save_strategy != SaveStrategy.NO:
            self.add_callback(self.stop_signal)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Train as [`~transformers.Trainer.train`] does, from the checkpoint that [`find_checkpoint`] gives. After
        SIGTERM, all ranks raise a `SystemExit` with code 143: the run was saved and can be resumed."""
        self.best_checkpoint.resumes_from = checkpoint = self.find_checkpoint(resume_from_checkpoint)
        try:
            output = super().train(checkpoint, *args, **kwargs)
        finally:
            self.stop_signal.restore()
        if self.stop_signal.stopped:
            raise SystemExit(128 + signal.SIGTERM)
        return output

    def find_checkpoint(self, resume: str | bool | None) -> str | None:
        """
        The checkpoint that `train(resume)` resumes from, the same on all ranks: the given one, for `True` the newest
        complete one, for `"newest"` that one if there is any. A warning names newer ones that are not complete. A
        `ValueError` says that there is none, or why a given one is known to be incomplete.
        """
        if not resume:
            return None
        if resume not in (True, "newest"):
            if self._whole_checkpoints:
                _check_given(Path(str(resume)))
            return str(resume)
        folder = Path(self.args.output_dir)
        if self._whole_checkpoints:  # one process looks, and all take what it found
            found = [(*newest_complete(folder), unmarked(folder))] if self.accelerator.is_main_process else [None]
            path, skipped, other = broadcast_object_list(found)[0]
        else:  # none is marked as complete
            path, skipped, other = get_last_checkpoint(str(folder)) if folder.is_dir() else None, [], None
        for line in skipped:
            logger.warning(f"The run does not resume from {line}.")
        if path is None and resume is True:
            seen = f" Skipped: {'; '.join(skipped)}. One of them can still be given by its path." if skipped else ""
            raise ValueError(f"There is no complete checkpoint in {folder}.{seen}")
        if path is None and other is not None:  # a new run would replace it
            raise ValueError(
                f"There is no complete checkpoint in {folder}, but {other.name}, which TRL's own trainer seems to have "
                f"written. Continue from it with `--resume_from_checkpoint {other}`, or name another `output_dir`."
            )
        self.accelerator.print(f"Resuming from {path}." if path else f"No checkpoint in {folder}: starting.")
        return path and str(path)

    def _add_to_checkpoint(self, folder: Path) -> None:
        """Write what a checkpoint holds next to the Trainer's own files, on every rank."""

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        if not self._whole_checkpoints:
            return super()._save_checkpoint(model, trial, *args, **kwargs)
        destination = Path(self._get_output_dir(trial), f"{CHECKPOINT}{self.state.global_step}")
        with self._saving_to(destination) as folder:
            super()._save_checkpoint(model, trial, *args, **kwargs)
            self._add_to_checkpoint(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(destination))

    @contextmanager
    def _saving_to(self, destination: Path) -> Iterator[Path]:
        """Around the saving of a checkpoint into the yielded folder."""
        accelerator, state, aside = self.accelerator, self.state, destination.parent / SAVING / destination.name
        if accelerator.is_local_main_process:
            shutil.rmtree(aside.parent, ignore_errors=True)  # a run that was killed left it
        accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            yield aside
            if state.best_model_checkpoint == str(aside):
                state.best_model_checkpoint = str(destination)
                if self.args.should_save:
                    state.save_to_json(str(aside / "trainer_state.json"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                publish(aside, destination)
        except Exception as error:
            free = shutil.disk_usage(destination.parent).free
            error.add_note(
                f"{destination.name} could not be saved in {destination.parent} ({free / 2**20:,.0f} MiB free there). "
                "What was written of it is removed. Make room, then resume with `resume_from_checkpoint=True`."
            )
            if why_incomplete(aside) is not None:
                shutil.rmtree(aside.parent, ignore_errors=True)
            raise
        finally:
            self._is_saving = False
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and aside.exists():  # nodes that share no file system
            publish(aside, destination)
        if self.args.should_save:
            best, limit = state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(destination.parent), limit, best, use_mtime=True)

    def _get_output_dir(self, *args, **kwargs):
        folder = super()._get_output_dir(*args, **kwargs)
        return str(Path(folder, SAVING)) if self._is_saving else folder

    def _push_from_checkpoint(self, *args, **kwargs):
        if not self._is_saving:  # the Trainer calls it before the folder has its name
            super()._push_from_checkpoint(*args, **kwargs)


def _check_given(folder: Path) -> None:
    """Refuse a checkpoint that is known to be incomplete, and warn of one that may be."""
    if (reason := why_incomplete(folder)) is None:
        return
    if (folder / MARKER).exists() or not folder.is_dir():
        raise ValueError(f"The checkpoint {folder} is damaged, or is not there: {reason}. Give another one.")
    logger.warning(f"Resuming from {folder}, which may be incomplete: {reason}.")


class StopSignal(TrainerCallback):
    """
    On SIGTERM, which a cluster sends before it takes a machine back: finish the update, save, and end the training. A
    second SIGTERM ends the process at once. One rank's signal stops all.

    transformers' own callback (`enable_jit_checkpoint`) saves at once, on the rank that got the signal. That is not
    exact, and not safe with several ranks. This callback replaces it.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.received = self.stopped = False
        self._previous: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.received = self.stopped = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum, frame):
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_step_end(self, args, state, control, **kwargs):
        received = torch.tensor([self.received], device=args.device)
        if self.accelerator.gather(received).any():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be little time
            logger.warning(f"SIGTERM: saving after update {state.global_step} of {state.max_steps}.")

    def restore(self):
        """Give SIGTERM back its earlier handler."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

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

from troll_trl.resilience.checkpoint_folder import (
    CHECKPOINT,
    MARKER,
    SAVING,
    newest_complete,
    publish,
    why_incomplete,
)

if TYPE_CHECKING:  # the trainer, which follows in the list of bases
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class Checkpoints:
    """The checkpoints of a run. The Trainer writes each into a folder aside, which is renamed once it is complete."""

    def __init__(self, accelerator: Accelerator, args: Any):
        self.accelerator, self.args = accelerator, args
        self.saving = False
        self.stop_signal = StopSignal(accelerator)

    def find(self, resume: str | bool | None) -> str | None:
        """
        The checkpoint that `train(resume)` resumes from, the same on all ranks: the given one, for `True` the newest
        complete one, for `"newest"` that one if there is any. A warning names newer ones that are not complete. A
        `ValueError` says that there is none, or why a given one is known to be incomplete.
        """
        if not resume:
            return None
        if resume not in (True, "newest"):
            folder = Path(str(resume))
            reason = why_incomplete(folder)
            if reason is not None and ((folder / MARKER).exists() or not folder.is_dir()):
                raise ValueError(f"The checkpoint {folder} is damaged, or is not there: {reason}. Give another one.")
            if reason is not None:
                logger.warning(f"Resuming from {folder}, which may be incomplete: {reason}.")
            return str(resume)
        # One process looks, and all take what it found
        found = [newest_complete(Path(self.args.output_dir))] if self.accelerator.is_main_process else [None]
        path, skipped = broadcast_object_list(found)[0]
        for line in skipped:
            logger.warning(f"The run does not resume from {line}.")
        if path is None and resume is True:
            seen = f" Skipped: {'; '.join(skipped)}. One of them can still be given by its path." if skipped else ""
            raise ValueError(f"There is no complete checkpoint in {self.args.output_dir}.{seen}")
        self.accelerator.print(
            f"Resuming from {path}." if path else f"No checkpoint in {self.args.output_dir}: starting."
        )
        return path and str(path)

    def folder(self, output_dir: str) -> str:
        """The folder for what the Trainer writes into `output_dir`: aside, while it saves a checkpoint."""
        return str(Path(output_dir, SAVING)) if self.saving else output_dir

    @contextmanager
    def saving_to(self, destination: Path, state: Any) -> Iterator[Path]:
        """Around the saving of a checkpoint into the yielded folder; the Trainer's `state` names the best one."""
        aside = destination.parent / SAVING / destination.name
        if self.accelerator.is_local_main_process:
            shutil.rmtree(aside.parent, ignore_errors=True)  # of a run that was killed
        self.accelerator.wait_for_everyone()
        self.saving = True
        try:
            yield aside
            if state.best_model_checkpoint == str(aside):
                state.best_model_checkpoint = str(destination)
                if self.args.should_save:
                    state.save_to_json(str(aside / "trainer_state.json"))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
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
            self.saving = False
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and aside.exists():  # nodes that share no file system
            publish(aside, destination)
        if self.args.should_save:
            best, limit = state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(destination.parent), limit, best, use_mtime=True)


class CheckpointedTrainer(_Trainer):
    """Mixin for a Trainer whose checkpoints are complete or absent, and which saves and ends on SIGTERM. The Trainer's
    `enable_jit_checkpoint` must be off. `__init__` calls [`set_up_checkpoints`] last."""

    checkpoints: Checkpoints
    _whole_checkpoints = True  # or the Trainer saves and finds them as it does

    def set_up_checkpoints(self) -> None:
        self.checkpoints = Checkpoints(self.accelerator, self.args)
        if self.args.save_strategy != SaveStrategy.NO:
            self.add_callback(self.checkpoints.stop_signal)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        As [`~transformers.Trainer.train`], except how it resumes and ends.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint; or `True` for the newest complete one in `output_dir`.

        Raises:
            ValueError: no complete checkpoint, or a given one that is known to be incomplete, with the reason.
            SystemExit: with code 143, on all ranks, after SIGTERM: the run was saved and can be resumed.
        """
        stop_signal = self.checkpoints.stop_signal
        try:
            output = super().train(self.find_checkpoint(resume_from_checkpoint), *args, **kwargs)
        finally:
            stop_signal.restore()
        if stop_signal.stopped:
            raise SystemExit(128 + signal.SIGTERM)
        return output

    def find_checkpoint(self, resume: str | bool | None) -> str | None:
        """The checkpoint that `train(resume)` resumes from: as [`Checkpoints.find`]."""
        if self._whole_checkpoints:
            return self.checkpoints.find(resume)
        if resume not in (True, "newest"):
            return str(resume or "") or None
        folder = self.args.output_dir  # none in it is marked as complete
        newest = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if newest is None and resume is True:
            raise ValueError(f"There is no checkpoint in {folder}.")
        return newest

    def _add_to_checkpoint(self, folder: Path) -> None:
        """Write what a checkpoint holds next to the Trainer's own files, on every rank."""

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        if not self._whole_checkpoints:
            return super()._save_checkpoint(model, trial, *args, **kwargs)
        destination = Path(self._get_output_dir(trial), f"{CHECKPOINT}{self.state.global_step}")
        with self.checkpoints.saving_to(destination, self.state) as folder:
            super()._save_checkpoint(model, trial, *args, **kwargs)
            self._add_to_checkpoint(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(destination))

    def _get_output_dir(self, *args, **kwargs):
        return self.checkpoints.folder(super()._get_output_dir(*args, **kwargs))

    def _push_from_checkpoint(self, *args, **kwargs):
        if not self.checkpoints.saving:  # the Trainer calls it before the folder has its name
            super()._push_from_checkpoint(*args, **kwargs)


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

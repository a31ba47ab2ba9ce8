"""CheckpointMixin: checkpoints that are complete or not there, exact resuming, and SIGTERM as "save, then stop"."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from troll_trl.resilience import rollout_state
from troll_trl.resilience.checkpoint_folder import MARKER, SAVING, newest_complete, publish, why_incomplete

if TYPE_CHECKING:  # what stands behind the mixin
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

# What the saved rollout batch must agree with: its cut into updates, and what its log-probabilities were computed by.
# RLOO has not all of them.
_LAYOUT = (
    *("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "temperature", "cast_lm_head_to_fp32", "bf16", "fp16", "use_vllm"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)


class CheckpointMixin(_Trainer):
    """
    Stands before a TRL trainer in the list of bases. A checkpoint is the Trainer's own, with one more file for every
    rank (see `rollout_state`) and a marker (see `checkpoint_folder`).

    Overridden are

    - `train`: `resume_from_checkpoint=True` takes the newest complete checkpoint; SIGTERM saves and stops;
    - `_run_epoch`: a finished run takes no further update; the sampler's shuffling is brought to the resumed epoch;
    - `_save_checkpoint`, `_get_output_dir`, `_push_from_checkpoint`: a checkpoint is written aside, then renamed;
    - `_save_rng_state`, `_load_rng_state`: the rank's own file;
    - `_issue_warnings_after_load`: tied weights are not missing;
    - `_get_train_sampler`: kept, to be brought to the resumed epoch.
    """

    trust_region: Any  # TrustRegionMixin's

    def __init__(self, *args, **kwargs):
        # By mode and name, what is counted since the last log line: objects with `pop`, `state_dict` and
        # `load_state_dict`. The other mixins add theirs; those of the training are kept in checkpoints.
        self.counters: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
        super().__init__(*args, **kwargs)
        self._saving = False
        self._train_sampler: Any = None
        self._stop_signal = StopSignal(self)
        if self.args.save_strategy != SaveStrategy.NO:
            self.add_callback(self._stop_signal)
        if (other := self.pop_callback(JITCheckpointCallback)) is not None:
            other.on_train_end(self.args, self.state, self.control)  # takes its handler back

    # -- Train and resume -------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        As [`~transformers.Trainer.train`], but for how it resumes and ends.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint; or `True` for the newest complete one in `output_dir`.

        Raises:
            ValueError: no complete checkpoint, or a given one that is known to be incomplete, with the reason.
            SystemExit: with code 143, on all ranks, after SIGTERM: the run was saved and can be resumed.
        """
        try:
            output = super().train(self.find_checkpoint(resume_from_checkpoint), *args, **kwargs)
        finally:
            self._stop_signal.restore()
        if self._stop_signal.stopped:
            raise SystemExit(128 + signal.SIGTERM)
        return output

    def find_checkpoint(self, resume: str | bool | None) -> str | None:
        """
        The checkpoint that `train(resume)` goes on from. Newer ones that are not complete are named in a warning.

        Args:
            resume (`str` or `bool`, *optional*):
                A checkpoint; `True` for the newest complete one; `"newest"` for that one if there is any.

        Returns:
            `str` or `None`: its folder, the same on all ranks.

        Raises:
            ValueError: as [`train`].
        """
        if not resume:
            return None
        if resume is not True and resume != "newest":
            self._check_given(Path(resume))
            return resume
        # One process looks and says, so that all take the same
        found = [newest_complete(Path(self.args.output_dir))] if self.accelerator.is_main_process else [None]
        path, skipped = broadcast_object_list(found)[0]
        for line in skipped:
            logger.warning(f"Not resumed from {line}.")
        if path is None and resume is True:
            seen = f" Skipped: {'; '.join(skipped)}. One of them can still be given by its path." if skipped else ""
            raise ValueError(f"There is no complete checkpoint in {self.args.output_dir}.{seen}")
        self.accelerator.print(
            f"Resuming from {path}." if path else f"No checkpoint in {self.args.output_dir}: starting."
        )
        return path and str(path)

    def _check_given(self, folder: Path):
        if not folder.is_dir():
            raise ValueError(f"`resume_from_checkpoint` is {str(folder)!r}, but there is no such folder.")
        reason = why_incomplete(folder)
        if reason is None:
            return
        if (folder / MARKER).exists():
            raise ValueError(f"The checkpoint {folder} is damaged: {reason}. Give another one.")
        logger.warning(f"Resuming from {folder}, of which it is not known whether it is complete: {reason}.")

    def _issue_warnings_after_load(self, load_result):
        # A tied head is in no file: the Trainer would report it as a missing key, which looks like a damaged checkpoint
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _get_train_sampler(self, *args, **kwargs):
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _run_epoch(self, **arguments):
        if self.state.global_step >= self.state.max_steps:  # the Trainer looks only after its next update
            self.control.should_training_stop = True
            return
        first = arguments["epochs_trained"]
        if arguments["resume_from_checkpoint"] is not None and arguments["epoch"] == first:
            # TRL's sampler draws a new order whenever it is iterated, from a generator that the process starts over
            for _ in range(first if self._train_sampler is not None else 0):
                next(iter(self._train_sampler), None)
            # Unless a saved state says otherwise: in step with the data, and with a fresh rollout batch at once
            self._step = first * arguments["steps_in_epoch"] + arguments["steps_trained_in_current_epoch"]
            self._buffered_inputs = None
        super()._run_epoch(**arguments)

    # -- Save -------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, SAVING) if self._saving else folder

    def _save_checkpoint(self, model, trial):
        destination = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        aside = destination.parent / SAVING / destination.name
        if self.accelerator.is_local_main_process:
            shutil.rmtree(aside.parent, ignore_errors=True)  # of a run that was killed
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
            self._name_best_checkpoint(aside, destination)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                publish(aside, destination)
        except Exception as error:
            error.add_note(self._explain_failed_save(destination))
            if why_incomplete(aside) is not None:
                shutil.rmtree(aside.parent, ignore_errors=True)
            raise
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and aside.exists():  # nodes that share no file system
            publish(aside, destination)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(destination.parent), self.args.save_total_limit, best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(destination))

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self._saving:  # the Trainer calls it before the folder has its name
            super()._push_from_checkpoint(checkpoint_folder)

    def _name_best_checkpoint(self, aside: Path, destination: Path):
        if self.state.best_model_checkpoint == str(aside):
            self.state.best_model_checkpoint = str(destination)
            if self.args.should_save:
                self.state.save_to_json(str(aside / "trainer_state.json"))

    def _explain_failed_save(self, destination: Path) -> str:
        free = shutil.disk_usage(destination.parent).free
        last = newest_complete(destination.parent).path if self.accelerator.is_main_process else None
        return (
            f"{destination.name} could not be saved in {destination.parent} ({free / 2**20:,.0f} MiB free there). What "
            f"was written of it is removed. The last good checkpoint is {last or 'not known to this rank'}: make "
            "room, then resume with `resume_from_checkpoint=True`."
        )

    # -- The rank's own file ----------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)  # for other programs
        generate_every = self.args.steps_per_generation * self.num_iterations
        unfinished = self._step % generate_every != 0
        info = {
            "step": self._step,
            "unfinished": unfinished,
            "layout": self._layout(),
            "trust_region": self.args.trust_region_options(),
            "support": self.trust_region.needs_support,
            "loss": self._tr_loss.item(),
            "metrics": dict(self._metrics["train"]),
            "last_logged": self._globalstep_last_logged,
            "counters": {name: counter.state_dict() for name, counter in self.counters["train"].items()},
        }
        rollout_state.save(
            self._state_file(output_dir),
            info,
            self._buffered_inputs if unfinished and self.args.save_rollouts else None,
        )

    def _load_rng_state(self, checkpoint):
        if checkpoint is None:
            return
        # A rank alone with its file would generate when others do not, or not when they do
        path = self._state_file(checkpoint)
        found = torch.tensor([path.is_file()], device=self.accelerator.device)
        if not self.accelerator.gather(found).all():
            super()._load_rng_state(checkpoint)
            others = sorted(file.name for file in Path(checkpoint).glob("rollout-state-*"))
            seen = f" It has {', '.join(others)}." if others else ""
            self._warn_of_a_fresh_batch(f"{path.name} is not in {checkpoint} for every rank.{seen}")
            return
        if getattr(self.args, "sync_ref_model", False):
            logger.warning(
                "`sync_ref_model`: no checkpoint holds the reference model; it starts over as the initial model."
            )
        info, batches = rollout_state.load(path, self.accelerator.device)
        self._tr_loss.fill_(info["loss"])
        self._metrics["train"].update(info["metrics"])
        self._globalstep_last_logged = info["last_logged"]
        for name, counter in self.counters["train"].items():
            counter.load_state_dict(info["counters"][name])
        self._warn_of_another_trust_region(info["trust_region"])
        changed = [name for name, value in self._layout().items() if info["layout"].get(name) != value]
        if changed:
            self._warn_of_a_fresh_batch(f"The checkpoint was made with another {', '.join(changed)}.")
        elif info["unfinished"] and batches is None:
            self._warn_of_a_fresh_batch("The checkpoint was made with `save_rollouts=False`.")
        elif info["unfinished"] and self.trust_region.needs_support and not info["support"]:
            self._warn_of_a_fresh_batch("The checkpoint keeps no support, which this trust region needs.")
        else:
            self._step, self._buffered_inputs = info["step"], batches

    def _warn_of_another_trust_region(self, saved: dict[str, Any]):
        options = self.args.trust_region_options()
        changed = [
            f"`{name}` {saved.get(name, 'unused')} (now {options.get(name, 'unused')})"
            for name in saved | options
            if saved.get(name, "unused") != options.get(name, "unused")
        ]
        if changed:
            logger.warning(f"The checkpoint was made with another trust region: {', '.join(changed)}.")

    def _warn_of_a_fresh_batch(self, reason: str):
        if self._step % (self.args.steps_per_generation * self.num_iterations) != 0:
            reason += (
                " The rollout batch that was under way cannot be continued: a fresh one is generated for its prompts, "
                "and serves the updates that it had left. The run will differ from one that was not interrupted."
            )
        logger.warning(reason)

    def _layout(self) -> dict[str, Any]:
        layout = {name: getattr(self.args, name) for name in _LAYOUT if hasattr(self.args, name)}
        return layout | {"beta": self.beta != 0}  # without it there is no reference log-probability

    def _state_file(self, checkpoint) -> Path:
        return Path(checkpoint, rollout_state.file_name(self.args.process_index, self.args.world_size))


class StopSignal(TrainerCallback):
    """
    On SIGTERM, which a cluster sends before it takes a machine back: finish the update, save, and end the training. A
    second SIGTERM ends the process at once. One rank's signal stops all.

    transformers' own callback (`enable_jit_checkpoint`) saves where the signal finds the run, on the rank that got it,
    which is neither exact nor safe with several ranks; this one takes its place.

    Args:
        trainer ([`CheckpointMixin`]):
            The trainer.
    """

    def __init__(self, trainer: CheckpointMixin):
        self.trainer = trainer
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
        if self.trainer.accelerator.gather(received).any():
            finished = state.global_step >= state.max_steps
            self.stopped = not finished
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be little time
            logger.warning(
                f"SIGTERM: saving after update {state.global_step}"
                + (", the last." if finished else f" of {state.max_steps}; resume from there.")
            )

    def restore(self):
        """Give SIGTERM back to whom it was taken from."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

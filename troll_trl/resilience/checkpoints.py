"""CheckpointedTrainer: checkpoints that are complete or absent, exact resuming, and SIGTERM as "save, then stop".

In addition to the Trainer's files, a checkpoint has `options.json`, with which a resumed run is compared, and a file
for each rank: counters and, between the updates of a rollout batch, the batch. A token of the batch takes 8·K + 4 bytes
for the old policy's K kept tokens, and 24 to 32 bytes for ids, mask and log-probabilities. `checkpoint_folders.py`
decides which folders are complete.
"""

import json
import math
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import SaveStrategy, has_length, rotate_checkpoints

from troll_trl.resilience.checkpoint_folders import (
    CHECKPOINT,
    SAVING,
    check_given,
    checkpoints,
    date_last,
    newest_complete,
    publish,
)
from troll_trl.resilience.resumed_options import (
    BATCH_OPTIONS,
    OPTIONS,
    check_weights,
    compare_options,
    options_of,
    warn_of_a_fresh_optimizer,
)

if TYPE_CHECKING:  # the trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer  # or another of TRL's
else:
    _Trainer = object

logger = get_logger(__name__)


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class CheckpointedTrainer(_Trainer):
    """
    Mixin for a TRL trainer whose checkpoints are complete or absent, and which resumes exactly, even inside a rollout
    batch. It warns about options that differ in a resumed run. On SIGTERM, it saves and ends with code 143.

    - `__init__` replaces transformers' callback for SIGTERM;
    - `train` resumes from the checkpoint that [`find_checkpoint`] finds;
    - `_save_checkpoint`, `_get_output_dir` and `_push_from_checkpoint` write to a temporary folder, then rename it;
    - `_run_epoch` restores TRL's rollout batch and its position in the data;
    - `evaluate` gives NaN for a metric without a value.

    A trainer defines `stateful`, names of attributes that a checkpoint saves through `state_dict` and
    `load_state_dict`. Such an attribute may be a dictionary of objects. Those that `equal_on_ranks` names continue on
    another number of ranks, through `load_from_first_rank`, and their `begin_batch` is called if a rollout batch is
    lost. The config needs the field `save_rollouts`.
    """

    stateful: ClassVar[tuple[str, ...]]
    equal_on_ranks: ClassVar[tuple[str, ...]]
    _is_saving = False
    _buffered_inputs: Any  # TRL's, declared for the type checker

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if (callback := self.pop_callback(JITCheckpointCallback)) is not None:  # `enable_jit_checkpoint`
            callback.on_train_end(self.args, self.state, self.control)  # restores the handler of SIGTERM
        self.stop_signal = StopSignal(self.accelerator)
        if self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint:
            self.add_callback(self.stop_signal)
        self._options: dict[str, Any] = {}  # the content of `options.json`
        self._other_metric = ""  # if another metric chose the best checkpoint: the change, in words
        self._other_batch = False  # whether the checkpoint's rollout batch depends on options that differ

    # -- Resume -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Train as [`~transformers.Trainer.train`] does, from the checkpoint that [`find_checkpoint`] gives. After
        SIGTERM, all ranks raise a `SystemExit` with code 143: the run was saved and can be resumed."""
        checkpoint = self.find_checkpoint(resume_from_checkpoint)
        self._options = options_of(self)
        if checkpoint is not None:
            check_weights(self.model, Path(checkpoint))
            warn_of_a_fresh_optimizer(self, Path(checkpoint))
            changed = compare_options(self._options, Path(checkpoint))
            self._other_metric = changed.get("metric_for_best_model", changed.get("greater_is_better", ""))
            self._other_batch = not changed.keys().isdisjoint(BATCH_OPTIONS)
        try:
            output = super().train(checkpoint, *args, **kwargs)
        finally:
            self.stop_signal.restore()
        if self.stop_signal.stopped:
            raise SystemExit(128 + signal.SIGTERM)
        return output

    def find_checkpoint(self, resume: str | bool | None) -> str | None:
        """
        Find the checkpoint from which `train(resume_from_checkpoint=resume)` resumes. It is the same on all ranks: a
        given path; for `True`, the newest complete one; for `"newest"`, the newest complete one, or `None` if there are
        no checkpoints. Warns about newer ones that are not complete. Raises a `ValueError` if none is complete, or if a
        given one is known to be incomplete.
        """
        if not resume:
            return None
        if resume not in (True, "newest"):
            check_given(Path(str(resume)))
            return str(resume)
        folder = Path(self.args.output_dir)
        found = [newest_complete(folder)] if self.accelerator.is_main_process else [None]  # for all ranks
        path, skipped = broadcast_object_list(found)[0]
        for line in skipped:
            logger.warning(f"The run does not resume from {line}.")
        if path is None and (resume is True or checkpoints(folder)):  # a new run would replace them
            raise ValueError(
                f"There is no complete checkpoint in {folder}. {''.join(f'Skipped: {line}. ' for line in skipped)}"
                "Name one by its path (`resume_from_checkpoint`), or start a new run in another `output_dir`."
            )
        self.accelerator.print(f"Resuming from {path}." if path else f"No checkpoint in {folder}: starting a new run.")
        return path and str(path)

    def _run_epoch(self, *args, **arguments):
        checkpoint = arguments["resume_from_checkpoint"]
        resumes = checkpoint is not None and arguments["epoch"] == arguments["epochs_trained"]
        if resumes:
            self._find_best(Path(checkpoint))
        if self.state.global_step >= self.state.max_steps:  # the Trainer would check only after another update
            self.control.should_training_stop = True
            return
        if resumes:
            self._take_position(Path(checkpoint), arguments)
        super()._run_epoch(*args, **arguments)

    def _find_best(self, checkpoint: Path) -> None:
        """Take the best checkpoint next to the `checkpoint` that the run resumes from: the recorded path is wrong once
        the folder has moved. Forget the best one if it is gone, or was chosen by another metric."""
        state = self.state
        folder = checkpoint.absolute().parent
        own = Path(self.args.output_dir)
        if state.best_global_step is None:
            return
        if own.is_dir() and own.samefile(folder):
            folder = own  # transformers compares the paths' text
        best = folder / f"{CHECKPOINT}{state.best_global_step}"
        if best.is_dir() and not self._other_metric:
            state.best_model_checkpoint = str(best)
        elif self._other_metric or state.best_model_checkpoint is None:  # transformers drops a path that is gone
            reason = (
                f"was chosen by another metric: {self._other_metric}" if self._other_metric else f"is not in {folder}"
            )
            logger.warning(f"The best checkpoint so far, {best.name}, {reason}. A later one will replace it.")
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _take_position(self, checkpoint: Path, arguments: dict[str, Any]) -> None:
        """Restore the state of a `checkpoint`, in the epoch that the `arguments` of `_run_epoch` resume."""
        first, steps = arguments["epochs_trained"], arguments["steps_trained_in_current_epoch"]
        if not has_length(self.train_dataset) and self.state.epoch >= 1:
            logger.warning("transformers counts a stream's epochs as one: this run resumes at the start of an epoch.")
        batches = arguments["train_dataloader"].batch_sampler
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", ())  # in a shard on several ranks
        # TRL's sampler draws a new order whenever it is iterated, and starts over in a new process
        for _ in range(first):
            next(iter(sampler), None)
        # Unless a saved state says otherwise, the run is in step with the data, and generates a rollout batch at once
        self._step = steps + first * arguments["steps_in_epoch"]
        self._buffered_inputs = None
        if steps == 0 or not self.args.ignore_data_skip:  # the Trainer's condition for loading its generators' state
            self._load_state(checkpoint)

    # -- The state of a rank ----------------------------------------------------------------------------------------

    def _state_file(self, folder: Path) -> Path:
        return folder / f"rollout-state-{self.args.process_index}-of-{self.args.world_size}.pt"

    def _is_unfinished(self) -> bool:
        """Whether a rollout batch has served only some of its updates."""
        return self._step % (self.args.steps_per_generation * self.args.num_iterations) != 0

    def _parts(self, name: str) -> list[tuple[str, Any]]:
        """Return the objects of an attribute in `stateful`, by name; a single object has the name ''."""
        value = getattr(self, name)
        if value is None:
            return []
        return [*value.items()] if isinstance(value, dict) else [("", value)]

    def _save_state(self, folder: Path) -> None:
        """Write this rank's counters, and its rollout batch if that is unfinished."""
        info = {
            "step": self._step,
            "loss": self._tr_loss.item(),
            "metrics": dict(self._metrics["train"]),
            "last_logged": self._globalstep_last_logged,
            "stateful": {name: {key: x.state_dict() for key, x in self._parts(name)} for name in self.stateful},
        }
        batches = None
        if self._is_unfinished() and self.args.save_rollouts:
            batches = self._buffered_inputs
        # JSON, since a safe load refuses the numbers of other libraries
        torch.save({"info": json.dumps(info), "batches": batches}, self._state_file(folder))

    def _load_state(self, checkpoint: Path) -> None:
        """Restore what [`_save_state`] wrote, if every rank can read its file. Every rank must call this."""
        state = _read(self._state_file(checkpoint))
        # All ranks decide together. Otherwise some would generate, and others would not
        answers = torch.tensor([[state is not None, not self._other_batch]], device=self.accelerator.device)
        readable, same = self.accelerator.gather(answers).all(0).tolist()
        if state is None or not readable:
            self._load_from_first_rank(checkpoint)
            name = self._state_file(checkpoint).name
            return self._begin_a_fresh_batch(f"{checkpoint} lacks the file of at least one rank, named like {name}.")
        info = json.loads(state["info"])
        batches = state["batches"]
        self._tr_loss.fill_(info["loss"])
        self._metrics["train"].update(info["metrics"])
        self._globalstep_last_logged = info["last_logged"]
        for name in info["stateful"].keys() & {*self.stateful}:
            saved = info["stateful"][name]
            for key, part in self._parts(name):
                if key in saved:
                    part.load_state_dict(saved[key])
        if not same:
            return self._begin_a_fresh_batch("The checkpoint's rollout batch depends on options that differ.")
        self._step = info["step"]
        if batches is not None:
            to_device = lambda value: value.to(self.accelerator.device) if isinstance(value, torch.Tensor) else value
            self._buffered_inputs = [{name: to_device(value) for name, value in batch.items()} for batch in batches]
        elif self._is_unfinished():
            self._begin_a_fresh_batch("The checkpoint was made with `save_rollouts=False`.")

    def _load_from_first_rank(self, checkpoint: Path) -> None:
        """Restore what is equal on all ranks from the first rank's file, for any number of ranks."""
        parts = [(name, key, part) for name in self.equal_on_ranks for key, part in self._parts(name)]
        if not parts:
            return
        of_any = next(iter(sorted(checkpoint.glob("rollout-state-0-of-*.pt"))), None)
        state = _read(of_any) if of_any else None
        saved = json.loads(state["info"])["stateful"] if state else {}
        # Without a shared folder, a node may lack the file: ranks would train with different states
        saved = broadcast_object_list([saved])[0]
        for name, key, part in parts:
            part.load_from_first_rank(saved.get(name, {}).get(key), checkpoint)

    def _begin_a_fresh_batch(self, reason: str) -> None:
        """Have the parts in `equal_on_ranks` begin a rollout batch, and log the `reason`. If the saved rollout batch is
        unfinished, log the consequence, too."""
        for name in self.equal_on_ranks:
            for _, part in self._parts(name):
                part.begin_batch()
        if self._is_unfinished():
            reason += (
                " The unfinished rollout batch cannot be continued: a fresh one is generated for its prompts, and "
                "serves the remaining updates. The run will differ from one that was not interrupted."
            )
        logger.warning(reason)

    # -- Save -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        destination = Path(self._get_output_dir(trial), f"{CHECKPOINT}{self.state.global_step}")
        accelerator = self.accelerator
        state = self.state
        aside = destination.parent / SAVING / destination.name
        if accelerator.is_local_main_process:
            shutil.rmtree(aside.parent, ignore_errors=True)  # a run that was killed left it
        accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial, *args, **kwargs)
            if not self.args.save_only_model:
                self._save_state(aside)
            if state.best_model_checkpoint == str(aside):
                state.best_model_checkpoint = str(destination)
            if self.args.should_save:
                state.save_to_json(str(aside / TRAINER_STATE_NAME))
                (aside / OPTIONS).write_text(json.dumps(self._options, indent=1), encoding="utf-8")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                publish(aside, destination)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError if the disk is full
            raise CheckpointError(
                f"{destination.name} was not saved: {error} ({aside}). Make this folder writable, with room for a "
                "checkpoint, and resume from an earlier one."
            ) from error
        finally:
            self._is_saving = False
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and aside.exists():  # nodes without a shared file system
            publish(aside, destination)
        if self.args.should_save:
            best = state.best_model_checkpoint
            limit = self.args.save_total_limit
            date_last(destination)
            rotate_checkpoints(str(destination.parent), limit, best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(destination))

    def _get_output_dir(self, *args, **kwargs):
        folder = super()._get_output_dir(*args, **kwargs)
        return str(Path(folder, SAVING)) if self._is_saving else folder

    def _push_from_checkpoint(self, *args, **kwargs):
        if not self._is_saving:  # the Trainer calls this before the folder has its final name
            super()._push_from_checkpoint(*args, **kwargs)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Evaluate as [`~transformers.Trainer.evaluate`] does. TRL gives `None` for a reward without any value, which
        transformers cannot compare. `None` becomes NaN, which is never the best."""
        metrics = super().evaluate(*args, **kwargs)
        if missing := [name for name, value in metrics.items() if value is None]:
            logger.warning(f"The evaluation at step {self.state.global_step} has no value for {', '.join(missing)}.")
        return metrics | dict.fromkeys(missing, math.nan)


class StopSignal(TrainerCallback):
    """
    On SIGTERM to any rank, which a cluster sends before it takes a machine back: finish the update, save, and end the
    training on all ranks. A second SIGTERM ends the process at once. transformers' own callback, which this one
    replaces, saves at once, on the rank that got the signal. Such a save is not exact, and not safe with several ranks.
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
        """Restore the earlier handler of SIGTERM."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


def _read(file: Path) -> dict[str, Any] | None:
    """Read the state of a rank; `None` if there is no such file."""
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None

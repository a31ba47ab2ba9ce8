"""ResilientTrainer: what keeps a run alive, around a trainer that has the method. Left out, the method still trains."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import has_length

from troll_trl.resilience import CHECKPOINTS, GUARD, RESUME, TIED
from troll_trl.resilience.checkpoint import CheckpointedTrainer
from troll_trl.resilience.finite_guard import ENTROPY_CONTROL, FiniteGuard, SkipUpdates, some
from troll_trl.resilience.resume import epochs_of_stream, load_state, save_state
from troll_trl.resilience.trainable import check_trainable

if TYPE_CHECKING:  # the trainer with the method, which follows in the list of bases
    from troll_trl.trainers.troll_trainer import TrollTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class ResilientTrainer(CheckpointedTrainer, _Trainer):
    """
    Mixin for a [`~troll_trl.trainers.troll_trainer.TrollTrainer`], which it precedes in the list of bases. A run then
    skips updates that are not finite, saves checkpoints that are complete or absent, resumes exactly, and stops on
    SIGTERM. As long as nothing goes wrong, it changes no weight.

    - `finite_guard` ([`FiniteGuard`]): what was not finite, and which updates are skipped;
    - `stop_signal` ([`StopSignal`]): whether SIGTERM has come. [`CheckpointedTrainer`] saves, finds checkpoints and
      stops;
    - `switched_off` (`frozenset[str]`), the trainer's: our parts without effect, since parts of TRL have moved.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._whole_checkpoints = CHECKPOINTS not in self.switched_off
        self._entropy_control: dict[str, float] = {}  # TRL's, as it was before the last loss
        self.finite_guard = FiniteGuard(self.accelerator, self.args, self.columns_of_old_policy)
        if GUARD not in self.switched_off:
            self.reward_funcs = self.finite_guard.watch_rewards(self.reward_funcs, self.reward_func_names)
            self.add_callback(SkipUpdates(self))
        self.set_up_checkpoints()

    def _own_config(self, *args):
        config = super()._own_config(*args)
        config.enable_jit_checkpoint = False  # our handler of SIGTERM takes its place
        return config

    # -- Start and resume -------------------------------------------------------------------------------------------

    def train(self, *args, **kwargs):
        check_trainable(self.model)
        self.finite_guard.start_training()
        return super().train(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result, *args, **kwargs):
        if TIED in self.switched_off:
            return super()._issue_warnings_after_load(load_result, *args, **kwargs)
        # A tied head is in no file: the Trainer would report it as a missing key, which looks like a damaged checkpoint
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing), *args, **kwargs)

    def _run_epoch(self, *args, **arguments):
        self.check_running_parts()
        if RESUME in self.switched_off:
            return super()._run_epoch(*args, **arguments)
        if self.state.global_step >= self.state.max_steps:  # the Trainer would look only after another update
            self.control.should_training_stop = True
            return
        if (checkpoint := arguments["resume_from_checkpoint"]) is not None:
            if (trained := epochs_of_stream(self, checkpoint)) is not None:
                arguments["epochs_trained"], arguments["steps_trained_in_current_epoch"] = trained
            if arguments["epoch"] < arguments["epochs_trained"]:  # a stream: the Trainer begins with its first epoch
                return
            if arguments["epoch"] == arguments["epochs_trained"]:
                self._continue(checkpoint, arguments)
        super()._run_epoch(*args, **arguments)

    def _continue(self, checkpoint: str, arguments: dict[str, Any]) -> None:
        """Take over the state of a `checkpoint`, in the epoch that the `arguments` of `_run_epoch` resume."""
        first, steps = arguments["epochs_trained"], arguments["steps_trained_in_current_epoch"]
        batches = arguments["train_dataloader"].batch_sampler
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", ())  # in a shard on several ranks
        # TRL's sampler draws a new order whenever it is iterated, and starts over in a new process
        for _ in range(first):
            next(iter(sampler), None)
        # Unless a saved state says otherwise, the run is in step with the data, and generates a rollout batch at once.
        # An epoch of a stream has no length, but it has whole rollout batches.
        self._step = steps + (first * arguments["steps_in_epoch"] if has_length(self.train_dataset) else 0)
        self._buffered_inputs = None
        if steps == 0 or not self.args.ignore_data_skip:  # the Trainer's condition for loading its generators' state
            load_state(self, checkpoint)

    def _add_to_checkpoint(self, folder: Path) -> None:
        if RESUME not in self.switched_off and not self.args.save_only_model:
            save_state(self, folder)

    # -- Guard ------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        training = self.model.training
        output = super()._generate_and_score_completions(*args, **kwargs)
        bad = self.finite_guard.gather_bad_rewards(len(output["completion_ids"]))
        if not training:
            if bad:
                logger.warning(f"In the evaluation at step {self.state.global_step}, not finite: {some(bad)}.")
            return output
        self.finite_guard.nothing_scored, self.finite_guard.bad_rewards = self.recorder.nothing_scored, bad
        if bad:
            # The other rewards of the group, or of the batch, were normalised with it. NaN stays with the rollout
            # batch, also in a checkpoint, until its last update has been skipped.
            output["advantages"] = torch.full_like(output["advantages"], torch.nan)
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return *self.finite_guard.hide_masked(log_probs, entropies), aux_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        training = self.model.training
        if training:
            self._entropy_control = {name: getattr(self, name) for name in ENTROPY_CONTROL if hasattr(self, name)}
        with self.finite_guard.watch_loss(inputs, training) as inputs:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if training and GUARD not in self.switched_off:
            self.finite_guard.check_loss(loss, self.state.global_step + 1)
        return loss

    def _bounded_loss(self, trust_region_model, *args, **kwargs) -> torch.Tensor:
        loss = super()._bounded_loss(trust_region_model, *args, **kwargs)
        self.finite_guard.count_bounded(trust_region_model.bad_tokens)
        return loss

    def restore_entropy_coef(self) -> None:
        """Undo, after an update was skipped, what its loss did to TRL's entropy bonus: its entropy says nothing."""
        for name, value in self._entropy_control.items():
            setattr(self, name, value)

    def _counters(self) -> dict[str, Any]:
        return {**super()._counters(), "skipped_updates": self.finite_guard}

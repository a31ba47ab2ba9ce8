"""TrollTrainer: every method of TRL's trainers that TROLL overrides, in the order in which TRL calls them."""

import copy
import inspect
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers.trainer_utils import has_length

from troll_trl.resilience.best_model import warn_of_several_sets
from troll_trl.resilience.checkpoint import CheckpointedTrainer
from troll_trl.resilience.finite_guard import ENTROPY_CONTROL, FiniteGuard, SkipUpdates, some
from troll_trl.resilience.prompt_room import check_prompts
from troll_trl.trainers.arithmetic_check import check_arithmetic
from troll_trl.trainers.bounded_policy import BoundedPolicy, apply_trust_region
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.engine_policy import EngineRecorder, lower_rest
from troll_trl.trainers.evaluation_means import CountedEvaluation
from troll_trl.trainers.kernel_choice import add_head
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.nameless import check_names
from troll_trl.trainers.old_policy import COLUMN, LOG_PROBS, OLD_LOG_PROBS, TOKEN_IDS, Recorder, join_rows, with_dense
from troll_trl.trainers.resume import epochs_of_stream, load_state, save_state
from troll_trl.trainers.reward_models import whole_reward_models
from troll_trl.trainers.rollout_check import checked_rollouts
from troll_trl.trainers.rollout_sampling import SampledAsConfigured, warn_of_unused_options
from troll_trl.trainers.run_start import check_trainable, print_batches, warn_of_noise
from troll_trl.trainers.sharding import keep_output_dtypes, reshard
from troll_trl.trainers.step_check import check_steps
from troll_trl.trainers.trl_compat import (
    CHECKPOINTS,
    GUARD,
    METRICS,
    PROMPTS,
    RESUME,
    TIED,
    check_made,
    check_running,
    check_trl,
)
from troll_trl.trainers.vllm import check_server, check_vllm, explain_lost_server, server_url
from troll_trl.trust_region.regions import Bounded, TrustRegion

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)


class TrollTrainer(CheckpointedTrainer, CountedEvaluation, SampledAsConfigured, _Trainer):
    """
    Mixin that turns a TRL trainer into its TROLL counterpart, for trainers that sample completions and clip a ratio.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as the trainer's is. TRL's own `compute_loss` computes it from
    `log π(a)` in place of `log p(a)`, with an infinite clip range. With DPPO's mask it gets `log p(a)` with less
    gradient (see `trust_region/regions.py`), and with the penalty `log p(a)` itself and a finite clip range.

    The methods below override TRL's and the Trainer's. They are thin, and hand on arguments that a newer TRL may add.
    Each piece of state has one owner:

    - `trust_region`: what bounds the policy;
    - `finite_guard` ([`FiniteGuard`]): what was not finite, and which updates are skipped;
    - `recorder` ([`Recorder`]): the old policy of a rollout;
    - `troll_metrics` (`dict[str, TrollMetrics]`): by mode, what the trust region did since the last log line;
    - `stop_signal` ([`StopSignal`]): whether SIGTERM has come. [`CheckpointedTrainer`] saves, resumes and stops;
    - `_evaluation` ([`EvaluationTotals`]): what a running evaluation has counted, for [`CountedEvaluation`];
    - `switched_off` (`frozenset[str]`): the parts of `trl_compat.RELIABILITY` that have moved: without effect.

    A trainer defines `_config_class`, `_name` and `_aggregate`.
    """

    _config_class: type[TrollOptions]
    _name: str
    # TRL's, declared for the type checker
    beta: float
    reward_funcs: list[Any]
    _buffered_inputs: Any

    # -- Construction -----------------------------------------------------------------------------------------------

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        if args is None:
            model_id = model if isinstance(model, str) else model.config.name_or_path
            args = self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self._config_class):
            args = self._config_class.from_trl(args)
        self.switched_off = check_trl(type(self), engine=args.old_policy == "engine")
        self._whole_checkpoints = CHECKPOINTS not in self.switched_off
        args = copy.copy(args)  # the caller's stays as it is
        args.enable_jit_checkpoint = False  # our handler of SIGTERM takes its place
        check_vllm(args)
        self.trust_region = self._make_trust_region(args)
        reward_funcs = whole_reward_models(reward_funcs, args)
        given = inspect.signature(super().__init__).bind(model, reward_funcs, args, *others, **kwargs)
        if rollout_func := given.arguments.get("rollout_func"):
            corrects = bool(args.use_vllm and args.vllm_importance_sampling_correction)
            given.arguments["rollout_func"] = checked_rollouts(rollout_func, corrects)
        check_names(given.arguments)
        super().__init__(*given.args, **given.kwargs)
        self.switched_off |= check_made(self, engine=args.old_policy == "engine")
        self.switched_off = check_steps(self, self.switched_off)
        for function in getattr(self, "reward_funcs", ()):  # in the background, while the model is prepared
            getattr(function, "start_workers", lambda: None)()

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # Without a support TRL's own head serves
        self.support_size = add_head(self.accelerator, base_model, args) if self.trust_region.needs_support else 0
        if not self.trust_region.clips:  # the trust region takes the place of the clip, whose range becomes infinite
            self.epsilon_low = self.epsilon_high = math.inf

        self.troll_metrics = {mode: TrollMetrics(self.accelerator, self.trust_region) for mode in ("train", "eval")}
        self.recorder = self._make_recorder(args)
        self.finite_guard = FiniteGuard(self.accelerator, args, [LOG_PROBS])
        if GUARD not in self.switched_off:
            self.reward_funcs = self.finite_guard.watch_rewards(self.reward_funcs, self.reward_func_names)
            self.add_callback(SkipUpdates(self))
        self._bounded_policy: BoundedPolicy | None = None  # while TRL's loss runs
        self._arithmetic_checked: set[str] = set()  # modes, "train" and "eval"
        self._entropy_control: dict[str, float] = {}  # TRL's, as it was before the last loss
        print_batches(self.accelerator, args, self.trust_region, self.support_size)
        warn_of_several_sets(args, self.eval_dataset)
        warn_of_unused_options(self.model, getattr(self, "generation_config", None))
        warn_of_noise(self.model, args, base_model.config.get_text_config())
        makers = {"rollout_func", "environment_factory"}  # of what the model reads in place of the prompts
        if PROMPTS not in self.switched_off and not any(given.arguments.get(name) for name in makers):
            check_prompts(self)
        self.set_up_checkpoints()

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _make_trust_region(self, args: Any) -> TrustRegion:
        """What bounds the policy. A subclass may return a trust region of its own; the config's is then unused."""
        return args.make_trust_region()

    def _make_recorder(self, args: Any) -> Recorder:
        selection = (self.support_size, args.tail_mass, args.temperature)
        if args.old_policy == "trainer":
            return Recorder(*selection)
        if args.vllm_mode == "server" and self.accelerator.is_main_process:
            check_server(self.vllm_generation.vllm_client.get_server_info(), server_url(args), self.support_size)
        return EngineRecorder(self.accelerator, self.vllm_generation, *selection)

    def _trl_scores_rollouts(self) -> bool:
        """Whether TRL asks for the scores of every rollout, by the current weights."""
        return True

    def _has_old_policy(self) -> bool:
        """Whether TRL scores the next rollout with the current weights. If it does not, neither do we."""
        return not self.args.trust_region_idle

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """The loss that TRL's `compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`."""
        raise NotImplementedError

    def _reference_term(
        self, log_probs: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor | float:
        """The reference KL in TRL's loss, if there is one, of a policy with `log p(a)` `(B, C)`."""
        return 0.0

    def _terms_of_policy(
        self, bounded_policy: BoundedPolicy, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        """What is added to TRL's surrogate, a scalar: the regression of the trust region, if it has one."""
        regression = bounded_policy.bounded.regression
        if regression is None or self.args.regression_coef == 0:
            return torch.zeros((), device=mask.device)
        return self.args.regression_coef * self._aggregate(regression, mask, inputs, mode)

    # -- Start of a training ----------------------------------------------------------------------------------------

    def train(self, *args, **kwargs):
        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        check_trainable(self.model, base_model.get_output_embeddings())
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
        self.switched_off = check_running(self, self.switched_off)
        if RESUME in self.switched_off:
            return super()._run_epoch(*args, **arguments)
        if self.state.global_step >= self.state.max_steps:  # the Trainer looks only after its next update
            self.control.should_training_stop = True
            return
        if (checkpoint := arguments["resume_from_checkpoint"]) is not None:
            if (trained := epochs_of_stream(self, checkpoint)) is not None:
                arguments["epochs_trained"], arguments["steps_trained_in_current_epoch"] = trained
            if arguments["epoch"] < arguments["epochs_trained"]:  # of a stream: the Trainer begins with its first
                return
            if arguments["epoch"] == arguments["epochs_trained"]:
                self._continue(checkpoint, arguments)
        super()._run_epoch(*args, **arguments)

    def _continue(self, checkpoint: str, arguments: dict[str, Any]) -> None:
        """Be in the state of a `checkpoint` in the epoch that the `arguments` of `_run_epoch` resume."""
        first, steps = arguments["epochs_trained"], arguments["steps_trained_in_current_epoch"]
        batches = arguments["train_dataloader"].batch_sampler
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", ())  # under a shard of several ranks'
        for _ in range(first):  # TRL's draws a new order whenever it is iterated, and the process starts it over
            next(iter(sampler), None)
        # Unless a saved state says otherwise: in step with the data, and with a fresh rollout batch at once. An epoch
        # of a stream has no length, but whole rollout batches.
        self._step = steps + (first * arguments["steps_in_epoch"] if has_length(self.train_dataset) else 0)
        self._buffered_inputs = None
        if steps == 0 or not self.args.ignore_data_skip:  # as the Trainer loads the state of its generators
            load_state(self, checkpoint)

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _prepare_inputs(self, *args, **kwargs):
        inputs = super()._prepare_inputs(*args, **kwargs)
        device = self.accelerator.device
        # All of a rollout batch at once: each row keeps the whole batch in memory until it is joined
        join_rows((getattr(self, "_buffered_inputs", None) or [inputs]) if self.model.training else [inputs], device)
        return with_dense(inputs, inputs[COLUMN].to(device, non_blocking=True)) if COLUMN in inputs else inputs

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        training = self.model.training
        records = self.trust_region.needs_support and self._has_old_policy()
        reshard(self.model)
        waits = self._trl_scores_rollouts() if self.args.old_policy == "engine" else records
        with explain_lost_server(self.args), self.recorder.recording(waits):
            output = super()._generate_and_score_completions(*args, **kwargs)
        old, self.recorder.recorded = self.recorder.recorded, None  # or the host would hold it twice
        if (old is not None) != records and self.args.old_policy == "trainer":
            raise RuntimeError(
                "TRL scored the old policy under another condition than troll_trl expects; see trainers/trl_compat.py."
            )
        if isinstance(self.recorder, EngineRecorder):
            unscored = self.recorder.add_to(output)
            if training:
                self.finite_guard.nothing_scored = self.recorder.scored_nothing
            self._metrics_of("train" if training else "eval")["troll/unscored_tokens"].append(unscored)
        elif old is not None:
            if "tool_mask" in output:  # a tool's tokens are scored, but not trained on
                old = old.keep(output["tool_mask"].cpu().bool())
            output[COLUMN] = old.rows()
        bad = self.finite_guard.gather_bad_rewards(len(output["completion_ids"]))
        if training:
            self.finite_guard.bad_rewards = bad
        elif bad:
            logger.warning(f"In the evaluation at step {self.state.global_step}, not finite: {some(bad)}.")
        if training and bad:
            # The other rewards of the group, or of the batch, were normalised with it. NaN stays with the rollout
            # batch, also in a checkpoint, until its last update has been skipped.
            output["advantages"] = torch.full_like(output["advantages"], torch.nan)
        return output

    def _generate(self, *args, **kwargs):
        generated = super()._generate(*args, **kwargs)
        if isinstance(self.recorder, EngineRecorder):
            self._keep_engine_policy(self.recorder, *generated)
        return generated

    def _keep_engine_policy(self, recorder: EngineRecorder, *generated: Any) -> None:
        """Have `recorder` keep what TRL's `_generate` returned."""
        raise NotImplementedError

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        recorder: Any = self.recorder
        if isinstance(recorder, EngineRecorder) and recorder.waits:
            return recorder.answer(logits_to_keep), None, None
        scored_by, records = model, recorder.waits
        if self._bounded_policy is not None:  # in the loss
            scored_by, records = self._bounded_policy.wrap(model, logits_to_keep), False
        elif records:
            scored_by = recorder.wrap(model, logits_to_keep)
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            scored_by, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if records:
            recorder.finish(log_probs)
        elif self._bounded_policy is None:
            log_probs = recorder.equal_where_rounded(log_probs)
        return *self.finite_guard.hide_masked(log_probs, entropies), aux_loss

    # -- Loss: replace the ratio's policy by the bounded one --------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        training = self.model.training
        if training:
            self._entropy_control = {name: getattr(self, name) for name in ENTROPY_CONTROL if hasattr(self, name)}
        with self.finite_guard.watch_loss(inputs, training) as (inputs, live):
            if (old := self._old_policy_of(inputs)) is None:  # idle: π = p, with divergences and regression 0
                self.troll_metrics["train" if training else "eval"].add_idle(live)
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            else:
                loss = self._bounded_loss(old, live, model, inputs, *args, **kwargs)
        if training and GUARD not in self.switched_off:
            self.finite_guard.check_loss(loss, self.state.global_step + 1)
        return loss

    def _bounded_loss(
        self, old: tuple[torch.Tensor, torch.Tensor | None], live: torch.Tensor, model, inputs, *args, **kwargs
    ) -> torch.Tensor:
        """TRL's loss of a micro-batch with the policy bounded around the `old` one, and the terms that it lacks."""
        mode = "train" if self.model.training else "eval"
        if mode not in self._arithmetic_checked:
            check_arithmetic(self, inputs, mode)
            self._arithmetic_checked.add(mode)
        advantages = inputs["advantages"].reshape(len(live), -1)  # (B, 1) or (B, C)
        self._bounded_policy = policy = BoundedPolicy(self._bound, *old, live, advantages)
        # A reference KL in TRL's loss would be the bounded policy's; `_terms_of_policy` adds the policy's own
        beta, self.beta = self.beta, 0.0
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.beta, self._bounded_policy = beta, None
        if not hasattr(policy, "bounded"):
            raise RuntimeError(
                "The loss has not scored the policy with the model, so nothing bounds it. If you override "
                "`_compute_loss`, call TRL's in it. For a loss of your own, override `compute_loss`."
            )
        self.finite_guard.count_bounded(policy.not_finite)
        self.troll_metrics[mode].add(live, policy.bounded.counted)
        return loss + self._terms_of_policy(policy, live, inputs, mode)

    def _bound(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> Bounded:
        """The trust region. An engine's floor of the rest says only that it is small."""
        if self.args.old_policy == "engine" and self.trust_region.needs_support:
            old = lower_rest(old, policy)
        return apply_trust_region(self.trust_region, policy, old, advantages)

    def _old_policy_of(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Old log-probabilities `(B, C, S)` of a micro-batch and their support; `None` if policies are equal."""
        column = LOG_PROBS if self.trust_region.needs_support else OLD_LOG_PROBS
        if column in inputs:
            old = inputs[column]
            return (old, inputs[TOKEN_IDS]) if self.trust_region.needs_support else (old.unsqueeze(-1), None)
        if self._has_old_policy():
            raise ValueError(
                f"A batch lacks `{column}`, its old policy: neither a trust region nor a clip would limit its ratios. "
                "Keep the columns of the rollout batch."
            )
        return None

    # -- Evaluate, update and log -------------------------------------------------------------------------------------

    def evaluation_loop(self, *args, **kwargs):
        self.troll_metrics["eval"].pop()  # of a prediction, or of an evaluation that failed
        return super().evaluation_loop(*args, **kwargs)

    def put_entropy_control_back(self) -> None:
        """After an update was skipped: the loss has moved it by an entropy that says nothing."""
        for name, value in self._entropy_control.items():
            setattr(self, name, value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics and the `troll/…` ones, reduced over ranks, so every rank must call it. Without a clip there is
        no `clip_ratio/…`."""
        mode = "train" if self.model.training else "eval"
        metrics, prefix = self._metrics_of(mode), "eval_" if mode == "eval" else ""
        if not self.trust_region.clips:
            for name in [name for name in metrics if name.startswith("clip_ratio/")]:  # always 0
                del metrics[name]
        for counter in self._counters().values() if mode == "train" else [self.troll_metrics["eval"]]:
            logs.update({prefix + name: value for name, value in counter.pop().items()})
        super().log(logs, start_time)

    def _metrics_of(self, mode: str) -> dict[str, list[float]]:
        """TRL's metrics since the last log line; if they have moved, a dictionary that nobody reads."""
        return defaultdict(list) if METRICS in self.switched_off else self._metrics[mode]

    def _counters(self) -> dict[str, Any]:
        """By name, what is counted between two log lines of the training, and kept in checkpoints."""
        return {"trust_region": self.troll_metrics["train"], "skipped_updates": self.finite_guard}

    # -- Save -------------------------------------------------------------------------------------------------------

    def _add_to_checkpoint(self, folder: Path) -> None:
        if RESUME not in self.switched_off and not self.args.save_only_model:
            save_state(self, folder)

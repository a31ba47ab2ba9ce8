"""TrollTrainer: every method of TRL's trainers that TROLL overrides, in the order in which TRL calls them."""

import math
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers.trainer_utils import has_length
from trl.trainer.utils import get_config_model_id

from troll_trl.resilience.checkpoint import CheckpointedTrainer
from troll_trl.resilience.finite_guard import ENTROPY_CONTROL, FiniteGuard, nan_to_inf, some
from troll_trl.resilience.prompt_room import check_prompts
from troll_trl.trainers.bounded_policy import BoundedPolicy
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.engine_policy import EngineRecorder
from troll_trl.trainers.kernel_choice import add_head
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.old_policy import COLUMN, LOG_PROBS, OLD_LOG_PROBS, TOKEN_IDS, Recorder, join_rows, with_dense
from troll_trl.trainers.resume import epochs_of_stream, load_state, save_state
from troll_trl.trainers.run_start import check_trainable, print_batches, warn_of_noise
from troll_trl.trainers.sharding import keep_output_dtypes, reshard
from troll_trl.trainers.trl_compat import check_trl
from troll_trl.trainers.vllm import check_server, check_vllm, explain_lost_server, server_url
from troll_trl.trust_region.regions import TrustRegion

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = get_logger(__name__)

EvalDataset = Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]


class TrollTrainer(CheckpointedTrainer, _Trainer):
    """
    Mixin that turns a TRL trainer into its TROLL counterpart, for trainers that sample completions and clip a ratio.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as the trainer's is. TRL's own `_compute_loss` computes it from
    `log π(a)` in place of `log p(a)`, with an infinite clip range. With DPPO's mask it gets `log p(a)` with less
    gradient (see `trust_region/regions.py`).

    The methods below override TRL's and the Trainer's. They are thin; each piece of state has one owner:

    - `trust_region`: what bounds the policy;
    - `finite_guard` ([`FiniteGuard`]): what was not finite, and which updates are skipped;
    - `recorder` ([`Recorder`]): the old policy of a rollout;
    - `troll_metrics` (`dict[str, TrollMetrics]`): by mode, what the trust region did since the last log line;
    - `checkpoints` ([`Checkpoints`]): saving, resuming, SIGTERM, by the methods of [`CheckpointedTrainer`].

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
        check_trl(type(self))
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self._config_class):
            args = self._config_class.from_trl(args)
        args.enable_jit_checkpoint = False  # our handler of SIGTERM takes its place
        check_vllm(args)
        self.trust_region = self._make_trust_region(args)
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        for function in self.reward_funcs:  # in the background, while the model is prepared
            getattr(function, "start_workers", lambda: None)()

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # Without a support TRL's own head serves
        self.support_size = add_head(self.accelerator, base_model, args) if self.trust_region.needs_support else 0
        # The trust region takes the place of the clip, whose range becomes infinite
        self.epsilon_low = self.epsilon_high = math.inf

        self.troll_metrics = {mode: TrollMetrics(self.accelerator, self.trust_region) for mode in ("train", "eval")}
        self.recorder = self._make_recorder(args, base_model.config.get_text_config().vocab_size)
        self.finite_guard = FiniteGuard(self.accelerator, args, [LOG_PROBS])
        self._bounded_policy: BoundedPolicy | None = None  # while TRL's loss runs
        self._entropy_control: dict[str, float] = {}  # TRL's, as it was before the last loss
        self._train_sampler: Any = None
        print_batches(self.accelerator, args, self.trust_region, self.support_size)
        warn_of_noise(self.model, args, base_model.config.get_text_config())
        check_prompts(self)
        self.set_up_checkpoints()

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _make_trust_region(self, args: Any) -> TrustRegion:
        """What bounds the policy. A subclass may return a trust region of its own; the config's is then unused."""
        return args.make_trust_region()

    def _make_recorder(self, args: Any, vocabulary: int) -> Recorder | EngineRecorder:
        if args.old_policy == "trainer":
            return Recorder(self.support_size, args.tail_mass, self.temperature)
        generation = self.vllm_generation
        if args.vllm_mode == "server" and self.accelerator.is_main_process:
            whole = self.support_size >= vocabulary  # then without a rest: all tokens are asked for
            check_server(generation.vllm_client.get_server_info(), server_url(args), self.support_size + whole)
        asked = self._trl_scores_rollouts()
        return EngineRecorder(self.accelerator, generation, self.support_size, args.tail_mass, vocabulary, asked)

    def _trl_scores_rollouts(self) -> bool:
        """Whether TRL asks for the scores of every rollout, by the current weights."""
        return True

    def _has_old_policy(self) -> bool:
        """Whether TRL scores the next rollout with the current weights. If it does not, neither do we."""
        return not self.args.trust_region_idle

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """The loss that TRL's `_compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`."""
        raise NotImplementedError

    def _terms_of_policy(
        self, bounded_policy: BoundedPolicy, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        """What is added to TRL's surrogate, a scalar: the regression of the trust region, if it has one."""
        regression = bounded_policy.bounded.regression
        if regression is None:
            return torch.zeros((), device=mask.device)
        return self.args.regression_coef * self._aggregate(regression, mask, inputs, mode)

    # -- Start of a training ----------------------------------------------------------------------------------------

    def train(self, *args, **kwargs):
        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        check_trainable(self.model, base_model.get_output_embeddings())
        self.finite_guard.start_training()
        return super().train(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result):
        # A tied head is in no file: the Trainer would report it as a missing key, which looks like a damaged checkpoint
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _get_train_sampler(self, *args, **kwargs):
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(self, *arguments):
        trained = super()._init_training_state(*arguments)
        return epochs_of_stream(self, checkpoint=arguments[3]) or trained

    def _run_epoch(self, **arguments):
        if self.state.global_step >= self.state.max_steps:  # the Trainer looks only after its next update
            self.control.should_training_stop = True
            return
        first = arguments["epochs_trained"]
        if arguments["resume_from_checkpoint"] is not None and arguments["epoch"] == first:
            # TRL's sampler draws a new order whenever it is iterated, from a generator that the process starts over
            for _ in range(first if self._train_sampler is not None else 0):
                next(iter(self._train_sampler), None)
            # Unless a saved state says otherwise: in step with the data, and with a fresh rollout batch at once. An
            # epoch of a stream has no length, but whole rollout batches.
            before = first * arguments["steps_in_epoch"] if has_length(self.train_dataset) else 0
            self._step = before + arguments["steps_trained_in_current_epoch"]
            self._buffered_inputs = None
        super()._run_epoch(**arguments)

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_state(self, checkpoint)

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        device = self.accelerator.device
        join_rows(self._buffered_inputs if self.model.training else [inputs], device)
        return with_dense(inputs, inputs[COLUMN].to(device, non_blocking=True)) if COLUMN in inputs else inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        if training:
            self.finite_guard.bad_rewards = []
        records = self.trust_region.needs_support and self._has_old_policy()
        reshard(self.model)
        with explain_lost_server(self.args), self.recorder.recording(records):
            output = super()._generate_and_score_completions(inputs)
        old, self.recorder.recorded = self.recorder.recorded, None  # or the host would hold it twice
        if (old is not None) != records and self.args.old_policy == "trainer":
            raise RuntimeError(
                "TRL scored the old policy under another condition than troll_trl expects; see trainers/trl_compat.py."
            )
        if isinstance(self.recorder, EngineRecorder):
            unscored = self.recorder.add_to(output)
            self._metrics["train" if training else "eval"]["troll/unscored_tokens"].append(unscored)
        elif old is not None:
            if "tool_mask" in output:  # a tool's tokens are scored, but not trained on
                old = old.keep(output["tool_mask"].cpu().bool())
            output[COLUMN] = old.rows()
        if training and self.finite_guard.bad_rewards:
            # The other rewards of the group, or of the batch, were normalised with it. NaN stays with the rollout
            # batch, also in a checkpoint, until its last update has been skipped.
            output["advantages"] = torch.full_like(output["advantages"], torch.nan)
        return output

    def _generate(self, prompts):
        generated = super()._generate(prompts)
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

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        functions, self.reward_funcs = self.reward_funcs, [nan_to_inf(function) for function in self.reward_funcs]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        bad = self.finite_guard.check_rewards(rewards, self.reward_funcs, self.reward_func_names)
        if self.model.training:
            self.finite_guard.bad_rewards = bad
        elif bad:
            logger.warning(f"In the evaluation at step {self.state.global_step}, not finite: {some(bad)}.")
        return rewards

    # -- Loss: replace the ratio's policy by the bounded one --------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self.finite_guard.check_loss(loss, self.state.global_step + 1)
        return loss

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        training = self.model.training
        mode = "train" if training else "eval"
        if training:
            self._entropy_control = {name: getattr(self, name) for name in ENTROPY_CONTROL if hasattr(self, name)}
        with self.finite_guard.watch_loss(inputs, training) as (inputs, live):
            if (old := self._old_policy_of(inputs)) is None:  # idle: π = p, with divergences and regression 0
                self.troll_metrics[mode].add_idle(live)
                return super()._compute_loss(model, inputs)

            advantages = inputs["advantages"].reshape(len(live), -1)  # (B, 1) or (B, C)
            self._bounded_policy = policy = BoundedPolicy(self.trust_region, *old, live, advantages)
            # A reference KL in TRL's loss would be the bounded policy's; `_terms_of_policy` adds the policy's own
            beta, self.beta = self.beta, 0.0
            try:
                loss = super()._compute_loss(model, inputs)
            finally:
                self.beta, self._bounded_policy = beta, None
            self.troll_metrics[mode].add(live, policy.bounded.counted)
            return loss + self._terms_of_policy(policy, live, inputs, mode)

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

    # -- Update and log ---------------------------------------------------------------------------------------------

    def _get_grad_norm(self, model, grad_norm=None):
        # The last call before the optimizer's step that knows the norm, with `max_grad_norm` 0 too
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.finite_guard.skips_update(grad_norm, model, self.optimizer, self.state.global_step + 1):
            for name, value in self._entropy_control.items():
                setattr(self, name, value)  # the loss has moved it by an entropy that says nothing
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics and the `troll/…` ones, reduced over ranks, so every rank must call it; no `clip_ratio/…`."""
        mode = "train" if self.model.training else "eval"
        metrics, prefix = self._metrics[mode], "eval_" if mode == "eval" else ""
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:  # always 0
            del metrics[name]
        for counter in self._counters().values() if mode == "train" else [self.troll_metrics["eval"]]:
            logs.update({prefix + name: value for name, value in counter.pop().items()})
        super().log(logs, start_time)

    def _counters(self) -> dict[str, Any]:
        """By name, what is counted between two log lines of the training, and kept in checkpoints."""
        return {"trust_region": self.troll_metrics["train"], "skipped_updates": self.finite_guard}

    # -- Save -------------------------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        save_state(self, output_dir)

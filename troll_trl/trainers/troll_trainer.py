"""TrollTrainer: what TROLL changes in TRL's trainers, and when TRL calls it. `loss.py` has the loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model

from troll_trl.compat import check_class, check_instance
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.lm_head.families import logit_transform
from troll_trl.lm_head.head_check import check_head
from troll_trl.trainers.adaptive_rate import AdaptiveLearningRate
from troll_trl.trainers.columns import OLD_LOG_PROBS, SPARSE_LOG_PROBS, TOKEN_IDS
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.engine_policy import EnginePolicy, lower_floor
from troll_trl.trainers.loss import LossInputs, Ratio, change_inputs, ignore_rounding
from troll_trl.trainers.mended_trl import MendedTRL
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.model_card import DPPO
from troll_trl.trainers.scored_model import SparseModel, needs_positions, with_positions
from troll_trl.trainers.sharding import keep_output_dtypes
from troll_trl.trainers.start_lines import describe_run
from troll_trl.trainers.vllm import check_vllm, explain_lost_server
from troll_trl.trust_region.regions import TrustRegion
from troll_trl.trust_region.sparse import Support, trimmed

logger = get_logger(__name__)

# What TRL's scoring pass returns: log-probabilities and entropies (B, C), the MoE loss, and what a later TRL may add
Scores = tuple[Any, ...]


@dataclass
class _Rollout:
    """What TRL's scoring passes over one rollout have given so far."""

    scores_old_policy: bool  # whether the first of them scores the old policy
    log_probs: torch.Tensor | None = None  # (B, C), of the sampled tokens; NaN if unknown
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # of the old policy, for the rollout batch


class TrollTrainer(MendedTRL):
    """
    Mixin that turns a TRL trainer into its TROLL counterpart, for trainers that sample completions and clip a ratio.

    In a run, TRL and the Trainer call, in this order:

    - `__init__`, which makes the support and the metrics, and in TRL's part of it
      `create_accelerator_and_postprocess`, which keeps the dtype of the model's outputs;
    - `train`, which adds the callback of the adaptive learning rate;
    - for each generation batch, here a *rollout batch*, `_generate_and_score_completions`, which adds the old policy to
      the batch, if there is one. While it runs, `_scoring` is a `_Rollout`, and TRL calls
        - `_generate`: with an `engine_policy`, the engine's answers are kept;
        - `_get_per_token_logps_and_entropies` for the old policy, and again for a reference model;
    - for each micro-batch, `compute_loss`, and in it `_compute_loss`. If the batch has an old policy, `_scoring` is the
      copy of the micro-batch that TRL reads, a `LossInputs`, while TRL's `_compute_loss` runs. TRL calls
        - `_get_per_token_logps_and_entropies` for the policy, which changes what TRL then reads from the copy:
          [`~troll_trl.trainers.loss`] says how and why;
    - for each log line, `log`, and for each evaluation, `evaluation_loop`.

    Below, `B` is the number of completions, `C` their length, and `K` the number of kept tokens, the *support*. The
    policy is `p`, the bounded policy `π`, and the sampled token `a`.

    A subclass may add a term to `super()._compute_loss(model, inputs)`, and may score again after it. A subclass that
    replaces `_compute_loss` has a loss of its own, without any limit on its ratios; a warning says this once.

    A trainer defines `_config_class`, the model card's `_name`, `_paper` and `_tag_names`, and what the section "What a
    trainer defines" has.
    """

    _config_class: type[TrollOptions]
    _name: str
    # A `CheckpointedTrainer` saves and restores the first; if the number of ranks changes, only the second
    stateful: ClassVar[tuple[str, ...]] = ("troll_metrics", "guard", "adaptive_rate")
    equal_on_ranks: ClassVar[tuple[str, ...]] = ("adaptive_rate",)
    guard: Any = None  # a `GuardedTrainer` has one, which tells the adaptive rate whether an update was skipped

    # -- Construction -----------------------------------------------------------------------------------------------

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        args = self._own_config(model, args)  # makes accelerate's state, which `check_class` needs to log
        check_class(type(self))
        if type(self)._compute_loss.__module__.startswith("trl."):  # `_compute_loss = GRPOTrainer._compute_loss`
            raise TypeError(
                f"{type(self).__name__}._compute_loss is TRL's own, which would train without a trust region and "
                "without a clip. Remove it from the class, or call `super()._compute_loss(model, inputs)`."
            )
        check_vllm(args)
        self.trust_region: TrustRegion = args.region
        if args.trust_region == "mask":
            self._name, self._paper = "DPPO", DPPO  # for the model card
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        check_instance(self)
        self.epsilon_low = self.epsilon_high = math.inf  # the trust region replaces the clip

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        text_config = base_model.config.get_text_config()
        logit_transform(text_config, args.temperature)  # raises for a model whose logits both heads would get wrong
        self.support: Support | None = None  # without one, TRL's own head is enough
        if self.trust_region.needs_support:
            self.support = args.support_within(text_config.vocab_size)
            # RLOO's config has no `cast_lm_head_to_fp32`
            add_sparse_lm_head(base_model, args.temperature, getattr(args, "cast_lm_head_to_fp32", False))
        self._old_column = OLD_LOG_PROBS if self.support is None else SPARSE_LOG_PROBS  # what the trust region reads
        self._needs_positions = needs_positions(self.model, base_model, self._is_vlm)
        self.troll_metrics = {mode: TrollMetrics(self.accelerator, self.trust_region) for mode in ("train", "eval")}
        self.adaptive_rate = AdaptiveLearningRate(self) if args.adaptive_learning_rate else None
        self.engine_policy = None
        if args.old_policy == "engine":  # from here on, vLLM's answers carry distributions
            self.engine_policy = EnginePolicy(self.accelerator, self.vllm_generation, self.support, args)
        self._scoring: _Rollout | LossInputs | None = None
        self._head_is_checked = False
        self._called_compute_loss = False  # whether a subclass's loss, if it has one, called ours
        describe_run(self, base_model)

    def _own_config(self, model: Any, args: Any) -> Any:
        """Return `args` as a TROLL config: the default for `None`, and a copy for a config of TRL."""
        if args is None:
            model_id = model if isinstance(model, str) else model.config.name_or_path
            return self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        return args if isinstance(args, self._config_class) else self._config_class.from_trl(args)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def train(self, *args, **kwargs):
        if self.adaptive_rate is not None and self.adaptive_rate not in self.callback_handler.callbacks:
            # Here, since it must follow the guard's callback, which `GuardedTrainer.__init__` adds after ours
            self.add_callback(self.adaptive_rate)
        return super().train(*args, **kwargs)

    # -- What a trainer defines, from its present options, since TRL, too, reads them anew for each rollout -----------

    @property
    def _ratio(self) -> Ratio:
        """What each ratio of TRL's loss belongs to."""
        raise NotImplementedError

    @property
    def _scores_old_policy(self) -> bool:
        """Whether TRL's rollout asks for the old policy's log-probabilities, before it asks for a reference's."""
        raise NotImplementedError

    def _keep_engine_policy(self, engine_policy: EnginePolicy, *generated: Any) -> None:
        """Have `engine_policy` keep the rollout that TRL's `_generate` returned."""
        raise NotImplementedError

    # -- Rollout: record the old policy -----------------------------------------------------------------------------

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        self._scoring = rollout = _Rollout(self._scores_old_policy)
        try:
            with explain_lost_server(self.args):
                batch = super()._generate_and_score_completions(*args, **kwargs)
        finally:
            self._scoring = None
        if rollout.scores_old_policy:
            self._check_old_policy(rollout.log_probs, batch)
        if self.engine_policy is None:
            return batch | rollout.columns
        unknown = self.engine_policy.add_to(batch)
        self._metrics[self._mode]["troll/unscored_tokens"].append(unknown)
        return batch

    def _check_old_policy(self, log_probs: torch.Tensor | None, batch: dict[str, Any]) -> None:
        """Raise a `RuntimeError` unless TRL's ratio divides by the recorded `log_probs` `(B, C)`."""
        if log_probs is not None:
            if self.engine_policy is not None:
                log_probs = log_probs.nan_to_num(0.0)  # as TRL got them
            recorded = self._ratio.old_from(log_probs, batch["completion_mask"])
            given = batch[self._ratio.old_column]
            if recorded.shape == given.shape and torch.allclose(recorded, given, rtol=0, atol=0, equal_nan=True):
                return
        raise RuntimeError(
            "The first log-probabilities that were computed in this rollout are not those that TRL's ratio "
            "divides by. Either a subclass scores before TRL does, or this untested version of TRL "
            "scores in another order."
        )

    def _generate(self, *args, **kwargs):
        generated = super()._generate(*args, **kwargs)
        if self.engine_policy is not None:
            self._keep_engine_policy(self.engine_policy, *generated)
        return generated

    # -- Score a rollout, with its policy or a reference, or the policy in a loss -----------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> Scores:
        trl = super()._get_per_token_logps_and_entropies

        def run(model: Callable) -> Scores:
            # Outside of a `SparseModel`, which passes its own inputs to the check of the head
            model = with_positions(model) if self._needs_positions else model
            return trl(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        scoring = self._scoring
        if scoring is None:  # TRL's loss without an old policy, or a user's own scoring
            return run(model)
        if isinstance(scoring, LossInputs):
            return self._score_policy(run, model, logits_to_keep, scoring)
        if scoring.scores_old_policy and scoring.log_probs is None:
            return self._score_old_policy(run, model, logits_to_keep, scoring)
        return self._score_reference(run, model, scoring)

    def _score_old_policy(self, run: Callable, model: Callable, length: int, rollout: _Rollout) -> Scores:
        """Score the policy that sampled a rollout, and keep it in `rollout`."""
        if self.engine_policy is not None:  # the engine's numbers are the old policy, so no model runs
            rollout.log_probs = self.engine_policy.log_probs(length)
            return rollout.log_probs.nan_to_num(0.0), None, None  # TRL reads no entropies and no MoE loss here
        if self.support is None:
            scores = run(model)
            rollout.columns = {OLD_LOG_PROBS: scores[0]}  # GRPO's batch has it already, RLOO's only its sum
        else:
            sparse = SparseModel(model, length, self._check_head, support=self.support)
            scores = run(sparse)
            old = trimmed(sparse.take_distributions())
            rollout.columns = {TOKEN_IDS: old.token_ids, SPARSE_LOG_PROBS: old.log_probs}
        rollout.log_probs = scores[0]
        return scores

    def _score_reference(self, run: Callable, model: Callable, rollout: _Rollout) -> Scores:
        """Score a rollout with a reference model. Remove differences from the old policy that are only rounding, which
        would enter RLOO's reward. GRPO's loss repeats this with the policy."""
        log_probs, *others = run(model)
        old = rollout.log_probs
        # TRL scores no old policy if it does not need one. A subclass may score other completions meanwhile
        if old is not None and old.shape == log_probs.shape:
            # A token whose old policy is unknown has 0 in TRL's old policy, so 0 here adds nothing to the reward
            log_probs = ignore_rounding(log_probs, old).masked_fill(old.isnan(), 0.0)
        return log_probs, *others

    def _check_head(self, model: Callable, model_inputs: dict[str, Any], length: int) -> None:
        """Compare the sparse head with the model's own logits and gradients, in the first pass that allows it."""
        assert self.support is not None
        if not self._head_is_checked:
            has_compared = check_head(model, model_inputs, length, self.support.size, self.args.temperature)
            # On all ranks or on none: a check is two passes of the model, which sharded weights need on every rank
            counts = torch.tensor(float(has_compared), device=self.accelerator.device)
            self._head_is_checked = self.accelerator.reduce(counts, reduction="sum").item() > 0

    # -- Loss: TRL's, on changed inputs -----------------------------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        self._called_compute_loss = False
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not self._called_compute_loss:  # not an error: it may be a loss without a ratio
            logger.warning_once(
                f"{type(self).__name__}._compute_loss does not call `super()._compute_loss(model, inputs)`: its loss "
                "has no trust region, and nothing limits its ratios."
            )
        return loss

    def _compute_loss(self, model, inputs):
        self._called_compute_loss = True
        if self._old_column not in inputs:
            # A subclass has dropped it, or alone TRL's is there: options have changed since the rollout
            has_old_policy = self._scores_old_policy or self.engine_policy is not None
            if has_old_policy or self._ratio.old_column in inputs:
                raise ValueError(
                    f"A batch lacks `{self._old_column}`, its old policy: neither a trust region nor a clip would "
                    "limit its ratios. Keep the columns of the rollout batch."
                )
            mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
            self.troll_metrics[self._mode].add(mask, None)  # TRL divides by the policy itself, so π = p
            return super()._compute_loss(model, inputs)
        self._scoring = inputs = LossInputs(inputs)
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._scoring = None
        if not inputs.changed_advantages_are_read:
            raise RuntimeError(
                "TRL's loss has not scored the policy, or has not read its advantages after that, "
                "so nothing bounds the policy. Install a tested version of TRL."
            )
        return loss

    def _score_policy(self, run: Callable, model: Callable, length: int, inputs: LossInputs) -> Scores:
        """Score the policy in a loss. Return the bounded policy's `log π(a)` `(B, C)` in place of `log p(a)`, and
        change what TRL's loss then reads from `inputs`."""
        if inputs.are_changed:
            raise RuntimeError(
                "The policy was scored twice in one loss: the trust region would act twice. Score after "
                "`super()._compute_loss(model, inputs)` has returned."
            )
        old = inputs[self._old_column]
        if self.support is None:
            scores = run(model)
            policy, old = scores[0].unsqueeze(-1), old.unsqueeze(-1)  # (B, C, 1)
        else:
            sparse = SparseModel(model, length, self._check_head, token_ids=inputs[TOKEN_IDS])
            scores = run(sparse)
            policy = sparse.take_distributions().log_probs  # (B, C, K + 1), as is `old`
            if self.engine_policy is not None:
                old = lower_floor(old, policy)  # the engine's rest has a floor, which would count as movement
        log_pi, token_stats = change_inputs(inputs, policy, old, self.trust_region, self._ratio, self.args)

        self.troll_metrics[self._mode].add(inputs.mask, token_stats)
        if self.adaptive_rate is not None and self._mode == "train":
            self.adaptive_rate.add(inputs.mask, token_stats["policy_kl"], inputs.before["advantages"])
        _, entropies, *others = scores
        if entropies is not None:  # TRL multiplies them by the mask, and 0·NaN is NaN
            entropies = entropies.masked_fill(~inputs.mask, 0.0)
        return log_pi, entropies, *others

    # -- Log --------------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args, **kwargs):
        self.troll_metrics["eval"].pop()  # a prediction or a failed evaluation leaves counts
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics, except `clip_ratio/…`, and the `troll/…` metrics. The latter are reduced over ranks, so
        every rank must call this."""
        for name in [name for name in self._metrics[self._mode] if name.startswith("clip_ratio/")]:  # always 0
            del self._metrics[self._mode][name]
        prefix = "" if self._mode == "train" else "eval_"
        logs.update({prefix + name: value for name, value in self.troll_metrics[self._mode].pop().items()})
        if self.adaptive_rate is not None and "loss" in logs:  # the line of an update
            logs.update(self.adaptive_rate.metrics())
        super().log(logs, start_time)

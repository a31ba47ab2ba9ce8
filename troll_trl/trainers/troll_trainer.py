"""TrollTrainer: the methods of TRL's trainers that TROLL overrides, in the order in which TRL calls them."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model

from troll_trl.compat import check_class, check_instance
from troll_trl.lm_head import SparseCausalLMOutput, add_sparse_lm_head
from troll_trl.lm_head.families import refuse_unknown_logits
from troll_trl.lm_head.head_check import check_head
from troll_trl.resilience.rollout_check import checked_rollouts
from troll_trl.trainers.adaptive_rate import AdaptiveLearningRate
from troll_trl.trainers.columns import LOG_PROBS, SAMPLED_LOG_PROBS, TOKEN_IDS
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.engine_policy import EnginePolicy, cap_rest_mass
from troll_trl.trainers.loss_inputs import LOWEST_LOG_RATIO, LossInputs, ignore_rounding, rescale_kl
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.model_card import DPPO
from troll_trl.trainers.rollout_sampling import SampledAsConfigured
from troll_trl.trainers.sharding import keep_output_dtypes, reshard
from troll_trl.trainers.start_checks import describe_run, fitting_support_size
from troll_trl.trainers.vllm import check_vllm, explain_lost_server
from troll_trl.trust_region.mask import HIGHEST_LOG_RATIO
from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput, checked_output
from troll_trl.trust_region.sparse import SparseDistribution, keep_nothing, trimmed

logger = get_logger(__name__)

# What TRL's scoring pass returns: log-probabilities and entropies (B, C), the MoE loss, and what a later TRL may add
Scores = tuple[Any, ...]


@dataclass
class _Rollout:
    """What TRL's scoring passes over one rollout have computed so far."""

    awaits_old_policy: bool  # whether the next pass is the old policy's; TRL scores references after it
    log_probs: torch.Tensor | None = None  # (B, C), of the sampled tokens under the old policy; NaN if unknown
    support: SparseDistribution | None = None  # (B, C, K)


class TrollTrainer(SampledAsConfigured):
    """
    Mixin that turns a TRL trainer into its TROLL counterpart, for trainers that sample completions and clip a ratio.

    What TRL calls, and the state that each call leaves:

    - `__init__`: `trust_region`, `support_size`, `engine_policy`, `adaptive_rate`, and `troll_metrics` by mode.
    - For each generation batch, here a *rollout batch*, `_generate_and_score_completions`: the old policy, in the
      columns of the batch that [`troll_trl.trainers.columns`] names. While this method runs, `_rollout` is set. It
      calls
        - `_generate`: the engine's answers in `engine_policy`, if there is one;
        - `_get_per_token_logps_and_entropies`, for the old policy: its support and log-probabilities in `_rollout`;
        - the same for a reference model: nothing.
    - `train`: the callback of `adaptive_rate`, which follows the guard's.
    - For each micro-batch, `compute_loss` and in it `_compute_loss`: a gradient. While `_compute_loss` runs,
      `_loss_inputs` is a copy of the micro-batch. `_compute_loss` calls
        - `_get_per_token_logps_and_entropies`, for the policy: it changes the copy's old log-probabilities, advantages
          and reference log-probabilities, which TRL's loss reads after this call.
    - For each log line, `log`, and for each evaluation, `evaluation_loop`: empty `troll_metrics`.

    Below, `B` is the number of completions, `C` their length, and `K` the number of kept tokens, the *support*. `p` is
    the policy, `q` the old policy, `π` the bounded policy, `a` the sampled token, `A` the advantage, `r` the ratio
    `π(a)/q(a)`, and `α` is `regression_coef`.

    **The loss is TRL's own.** The scoring pass returns `log π(a)` of the bounded policy in place of `log p(a)`, and the
    clip range is infinite. So TRL's surrogate is `−r·A`, with the ratio `r` that TRL forms from a token, from a
    completion's mean, or from RLOO's sum. The regression `R` `(B, C)` and a mask's weight `w` enter through the
    advantage. With `w·A − α·R/r` in place of `A`,

        −r·(w·A − α·R/r) = −r·w·A + α·R,

    in value and gradient, if the gradient flows through both `R` and `r`. TRL then multiplies both terms by its masks
    and by the vLLM correction, and averages them as its loss type does. TRL reads `inputs["advantages"]`, which may be
    `(B, C)`, after it has scored the policy, so the scoring pass puts the new advantages into the copy. `_compute_loss`
    raises a `RuntimeError` if TRL has not read them. `_score_policy` changes the copy in four steps, one method each:

    - `_bound` *masks positions that the loss ignores*, since `exp(200)` is infinite in float32, and `0·inf` is NaN.
      Then it calls the trust region, which returns the replacement for `log p(a)` (changed by the projection), the
      regression `R` (projection and penalty) and a weight of the advantage (mask): see
      [`~troll_trl.TrustRegionOutput`].
    - `_limit_log_ratio` *keeps ratios in float32's range*. If the log-ratio that TRL forms is below −40, the old
      log-probabilities in the copy are shifted to make the log-ratio −40. Far below −40, `r` underflows or `R/r`
      overflows. With a weight, log-ratios above 80 are also shifted down to 80, because an infinite ratio times a
      weight of 0 is NaN.
    - `_change_advantages` *weights the advantages and adds the regression*.
    - `_change_reference` *makes the reference KL refer to the policy*. TRL computes `d = ref − log π(a)`, and from `d`
      the estimate `k(d)`. With `log π(a) + ref − log p(a)` in the copy, with gradient, `d` is `ref − log p(a)`. With
      `use_bias_correction_kl`, TRL multiplies `k(d)` by the ratio `r`. The copy is then changed to make TRL's product
      `r_p·k(d)`, with the policy's ratio `r_p`: see [`~troll_trl.trainers.loss_inputs.rescale_kl`].

    The identity holds for TRL's `_compute_loss`. A subclass may add a term to `super()._compute_loss(model, inputs)`,
    and may score again after it. A subclass that replaces `_compute_loss` has a loss of its own, without any limit on
    its ratios; the trainer logs this once.

    A trainer defines `_config_class`, `_name`, `_old_log_probs`, `_trl_scores_old_policy`, `_is_old_policy`,
    `_log_ratio` and `_keep_engine_policy`.
    """

    _config_class: type[TrollOptions]
    _name: str
    _old_log_probs: str  # the column that TRL's ratio divides by, (B, C), or (B,) for one ratio per completion
    _sums_over_completions = False  # whether TRL's ratio is a product over a completion's tokens
    rollout_func: Any = None  # GRPO's
    guard: Any = None  # a `GuardedTrainer`'s

    # -- Construction -----------------------------------------------------------------------------------------------

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        check_class(type(self))
        if type(self)._compute_loss.__module__.startswith("trl."):
            raise TypeError(
                f"{type(self).__name__}._compute_loss is TRL's own, which would train without a trust region and "
                "without a clip. Remove it from the class, or call `super()._compute_loss(model, inputs)`."
            )
        args = self._own_config(model, args)
        check_vllm(args)
        self.trust_region = self._make_trust_region(args)
        if args.uses_mask:
            self._name, self._paper = "DPPO", DPPO  # for the model card
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        check_instance(self)
        if self.rollout_func is not None:
            corrects = bool(args.use_vllm and args.vllm_importance_sampling_correction)
            self.rollout_func = checked_rollouts(self.rollout_func, corrects)
        self.epsilon_low = self.epsilon_high = math.inf  # the trust region replaces the clip

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        refuse_unknown_logits(base_model.config.get_text_config())
        self.support_size = 0  # without a support, TRL's own head is enough
        if self.trust_region.needs_support:
            self.support_size = fitting_support_size(args, base_model)
            # RLOO's config has no `cast_lm_head_to_fp32`
            add_sparse_lm_head(base_model, args.temperature, getattr(args, "cast_lm_head_to_fp32", False))
        # A vision-language model computes its own positions if it is given none. With prompt learning, virtual tokens
        # shift the positions, so ours would differ from those in generation
        prompt_learning = is_peft_model(self.model) and self.model.active_peft_config.is_prompt_learning
        self._takes_positions = (
            not (self._is_vlm or prompt_learning)
            and "position_ids" in inspect.signature(type(base_model).forward).parameters
        )
        self.troll_metrics = {mode: TrollMetrics(self.accelerator, self.trust_region) for mode in ("train", "eval")}
        self.adaptive_rate = AdaptiveLearningRate(self) if args.adaptive_learning_rate else None
        self.engine_policy = None
        if args.old_policy == "engine":
            self.engine_policy = EnginePolicy(self.accelerator, self.vllm_generation, self.support_size, args)
        self._rollout: _Rollout | None = None
        self._loss_inputs: LossInputs | None = None
        self._head_is_checked = False
        self._loss_is_checked = False  # whether a loss has run this class's `_compute_loss`, or the warning was logged
        describe_run(self, base_model)

    def _own_config(self, model: Any, args: Any) -> Any:
        """Return `args` as a TROLL config: the default for `None`, and a copy for a config of TRL."""
        if args is None:
            model_id = model if isinstance(model, str) else model.config.name_or_path
            return self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        return args if isinstance(args, self._config_class) else self._config_class.from_trl(args)

    def _make_trust_region(self, args: Any) -> TrustRegion:
        """Make the trust region. A subclass may return its own; the config's trust region is then unused."""
        return args.make_trust_region()

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def train(self, *args, **kwargs):
        if self.adaptive_rate is not None and self.adaptive_rate not in self.callback_handler.callbacks:
            self.add_callback(self.adaptive_rate)  # here, since it must follow the guard's callback
        return super().train(*args, **kwargs)

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _trl_scores_old_policy(self) -> bool:
        """Return whether TRL scores the next rollout with the current weights, before it scores a reference."""
        raise NotImplementedError

    def _is_old_policy(self, batch: dict[str, Any], log_probs: torch.Tensor) -> bool:
        """Return whether TRL's ratio divides by the recorded `log_probs` `(B, C)` for this rollout `batch`."""
        raise NotImplementedError

    def _log_ratio(self, log_probs: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        """Return the log-ratio that TRL forms from `log_probs` `(B, C)` and the column `_old_log_probs`: `(B, C)`, or
        `(B, 1)` for one ratio per completion."""
        raise NotImplementedError

    def _keep_engine_policy(self, engine_policy: EnginePolicy, *generated: Any) -> None:
        """Have `engine_policy` keep what TRL's `_generate` returned."""
        raise NotImplementedError

    # -- Rollout: record the old policy -----------------------------------------------------------------------------

    def _has_old_policy(self) -> bool:
        """Return whether rollout batches have an old policy. If not, every update uses fresh completions: π = p."""
        return self._trl_scores_old_policy() or self.engine_policy is not None

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        reshard(self.model)
        self._rollout = rollout = _Rollout(self._trl_scores_old_policy())
        try:
            with explain_lost_server(self.args):
                batch = super()._generate_and_score_completions(*args, **kwargs)
        finally:
            self._rollout = None
        if self.engine_policy is not None:
            self._metrics[self._mode]["troll/unscored_tokens"].append(self.engine_policy.add_to(batch))
        elif self._has_old_policy():
            if rollout.log_probs is None or not self._is_old_policy(batch, rollout.log_probs):
                raise RuntimeError(
                    "The first log-probabilities that were computed in this rollout are not those that TRL's ratio "
                    "divides by. Either a subclass scores before TRL does, or this untested version of TRL "
                    "scores in another order."
                )
            if rollout.support is not None:
                batch[TOKEN_IDS], batch[LOG_PROBS] = rollout.support.token_ids, rollout.support.log_probs
            else:
                batch[SAMPLED_LOG_PROBS] = rollout.log_probs  # RLOO keeps only their sum over a completion
        return batch

    def _generate(self, *args, **kwargs):
        generated = super()._generate(*args, **kwargs)
        if self.engine_policy is not None:
            self._keep_engine_policy(self.engine_policy, *generated)
        return generated

    # -- Score: the rollout's policy, a reference, or the policy in a loss ------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> Scores:
        trl = super()._get_per_token_logps_and_entropies

        def score(scored_by: Callable) -> Scores:
            return trl(self._with_positions(scored_by), input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        if self._loss_inputs is not None:
            return self._score_policy(score, model, logits_to_keep, self._loss_inputs)
        if self._rollout is None:  # TRL's loss on fresh completions, or a user's own scoring
            return score(model)
        if self._rollout.awaits_old_policy:
            self._rollout.awaits_old_policy = False
            return self._score_old_policy(score, model, logits_to_keep, self._rollout)
        return self._score_reference(score, model, self._rollout)

    def _score_old_policy(self, score: Callable, model: Callable, length: int, rollout: _Rollout) -> Scores:
        """Score the policy that sampled a rollout, and keep its log-probabilities and support in `rollout`."""
        if self.engine_policy is not None:  # the engine's numbers are the old policy, so no model runs
            rollout.log_probs = self.engine_policy.log_probs(length)
            return rollout.log_probs.nan_to_num(0.0), None, None
        if self.support_size and self._has_old_policy():  # RLOO scores an old policy even if no trust region acts
            selection = {"support_size": self.support_size, "tail_mass": self.args.tail_mass}
            scores, support = self._score_sparse(score, model, length, **selection)
            rollout.support = trimmed(support)
        else:
            scores = score(model)
        rollout.log_probs = scores[0]
        return scores

    def _score_reference(self, score: Callable, model: Callable, rollout: _Rollout) -> Scores:
        """Score a rollout with a reference model, and remove differences from the old policy that are only rounding."""
        log_probs, *others = score(model)
        if rollout.log_probs is not None and rollout.log_probs.shape == log_probs.shape:
            # A token whose old policy is unknown is not in the loss, so any finite number will do
            log_probs = ignore_rounding(log_probs, rollout.log_probs).masked_fill(rollout.log_probs.isnan(), 0.0)
        return log_probs, *others

    def _with_positions(self, model: Callable) -> Callable:
        """Wrap `model` to count positions from a row's first token. TRL passes no positions: a model with absolute
        positions would count a row's padding, and would not score the distribution that it sampled from."""
        if not self._takes_positions:
            return model

        def positioned_model(**model_inputs):
            positions = (model_inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # (B, T)
            return model(position_ids=positions, **model_inputs)

        return positioned_model

    def _score_sparse(
        self, score: Callable[[Callable], Scores], model: Callable, length: int, **query: Any
    ) -> tuple[Scores, SparseDistribution]:
        """Return TRL's scores of `model` by `score`, and the model's sparse distributions `(B, length, K)` of the
        completions. `query` has `support_size` and `tail_mass` to select a support, or the `token_ids` of a given
        support."""
        captured: list[SparseDistribution] = []  # one for each chunk of rows that TRL scores

        def sparse_model(**model_inputs):
            if not self._head_is_checked:
                self._head_is_checked = check_head(
                    model, model_inputs, length, self.support_size, self.args.temperature
                )
            output = model(**model_inputs, **query, check_finite=False)
            # Clones: a view would keep the prompts' positions in memory
            ids, log_probs = (x[:, -length:].clone() for x in (output.token_ids, output.sparse_log_probs))
            captured.append(SparseDistribution(ids, log_probs))
            # Omit the supports, which TRL would keep in memory during its loss
            return SparseCausalLMOutput(log_probs=output.log_probs, entropy=output.entropy, aux_loss=output.aux_loss)

        scores = score(sparse_model)
        return scores, SparseDistribution.concatenate(captured)

    # -- Loss: TRL's, on changed inputs -----------------------------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not self._loss_is_checked:  # `_compute_loss` of this class has not run
            self._loss_is_checked = True
            logger.warning(
                f"{type(self).__name__}._compute_loss does not call `super()._compute_loss(model, inputs)`: its loss "
                "has no trust region, and nothing limits its ratios."
            )
        return loss

    def _compute_loss(self, model, inputs):
        self._loss_is_checked = True
        if not self._has_old_policy():
            mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
            self.troll_metrics[self._mode].add_idle(mask)
            return super()._compute_loss(model, inputs)
        if (column := LOG_PROBS if self.support_size else SAMPLED_LOG_PROBS) not in inputs:
            raise ValueError(
                f"A batch lacks `{column}`, its old policy: neither a trust region nor a clip would limit its ratios. "
                "Keep the columns of the rollout batch."
            )
        # A copy: with `num_iterations` the buffered micro-batch is read again
        self._loss_inputs = inputs = LossInputs(inputs)
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
        if not inputs.masked or "advantages" not in inputs.read:
            raise RuntimeError(
                "TRL's loss has not scored the policy, or has not read its advantages after that, "
                "so nothing bounds the policy. Install a tested version of TRL."
            )
        return loss

    def _score_policy(self, score: Callable, model: Callable, length: int, inputs: LossInputs) -> Scores:
        """Score the policy in a loss. Return the bounded policy's `log π(a)` `(B, C)` in place of `log p(a)`, and
        change what TRL's loss reads from `inputs` after this call: see the class."""
        if inputs.masked:
            raise RuntimeError(
                "The policy was scored twice in one loss: the trust region would act twice. Score after "
                "`super()._compute_loss(model, inputs)` has returned."
            )
        if self.support_size:
            scores, support = self._score_sparse(score, model, length, token_ids=inputs[TOKEN_IDS])
            policy = support.log_probs  # (B, C, K + 1)
        else:
            scores = score(model)
            policy = scores[0].unsqueeze(-1)  # (B, C, 1)
        _, entropies, *others = scores
        if entropies is not None:
            entropies = entropies.masked_fill(~inputs.mask, 0.0)

        bounded = self._bound(policy, inputs)
        log_pi = bounded.log_probs  # (B, C)
        shift = self._limit_log_ratio(log_pi, None if bounded.weight is None else HIGHEST_LOG_RATIO, inputs)
        self._change_advantages(bounded, inputs)
        self._change_reference(log_pi, shift, inputs)
        inputs.read.clear()
        return log_pi, entropies, *others

    def _bound(self, policy: torch.Tensor, inputs: LossInputs) -> TrustRegionOutput:
        """
        Bound the `policy`, log-probabilities `(B, C, S)` with gradient. Return the trust region's output, all `(B, C)`,
        with harmless values at positions that the loss ignores. The log-probability is NaN where policy or old policy
        has a NaN. Fill in `inputs.masked`.
        """
        if policy.dtype != torch.float32:  # the trust region would mistake rounding for steps of the policy
            raise TypeError(
                f"The model's log-probabilities are {policy.dtype}, not float32: a wrapper of the model casts its "
                "outputs. Make the wrapper keep the dtype."
            )
        old = inputs[LOG_PROBS] if self.support_size else inputs[SAMPLED_LOG_PROBS].unsqueeze(-1)  # (B, C, S)
        # `project` raises on NaN, which on one rank would leave the other ranks waiting. So mask such positions here,
        # and restore their NaN after the projection
        bad = policy.detach().isnan().any(-1) | old.isnan().any(-1)
        ignored = ~inputs.mask | bad
        inputs.masked["log_probs"] = policy[..., 0].masked_fill(ignored, 0.0)
        names = (
            SAMPLED_LOG_PROBS,
            "ref_per_token_logps",
            "sampling_per_token_logps",
            "importance_sampling_ratio",
            "advantages",
        )
        for name in names:  # a column (B,) or (B, 1) is per completion, and has no positions to mask
            if inputs.get(name) is not None and inputs[name].shape == ignored.shape:
                inputs.masked[name] = inputs[name] = inputs[name].masked_fill(ignored, 0.0)
        inputs.masked["advantages"] = advantages = inputs["advantages"].reshape(len(old), -1)  # (B, 1) or (B, C)

        policy, old = keep_nothing(policy, ignored), keep_nothing(old, ignored)
        if self.engine_policy is not None and self.support_size:
            old = cap_rest_mass(old, policy)  # the engine's rest has a floor, which would count as movement
        bounded = checked_output(self.trust_region, policy, old, advantages)
        if bounded.weight is not None and self._sums_over_completions:
            raise ValueError(
                f"`trust_region`: {type(self.trust_region).__name__} gives a `weight` for each token, but this "
                "trainer's ratio and advantage belong to a whole completion. Use it in GRPO."
            )
        self.troll_metrics[self._mode].add(inputs.mask, bounded.token_stats)
        if self.adaptive_rate is not None and self._mode == "train":
            self.adaptive_rate.add(inputs.mask, bounded.token_stats["policy_kl"], advantages)
        return TrustRegionOutput(
            bounded.log_probs.masked_fill(ignored, 0.0).masked_fill(bad & inputs.mask, math.nan),
            None if bounded.regression is None else bounded.regression.masked_fill(ignored, 0.0),
            weight=None if bounded.weight is None else bounded.weight.detach().masked_fill(ignored, 1.0),
        )

    def _limit_log_ratio(self, log_pi: torch.Tensor, highest: float | None, inputs: LossInputs) -> torch.Tensor:
        """Shift the old log-probabilities of `inputs` so that TRL's log-ratio of `log_pi` `(B, C)` is in float32's
        range. Return the shift, `(B, C)` or `(B, 1)`."""
        log_ratio = self._log_ratio(log_pi, inputs).detach()
        shift = log_ratio - log_ratio.clamp(LOWEST_LOG_RATIO, highest)
        old = inputs[self._old_log_probs]
        inputs[self._old_log_probs] = old + (shift if old.dim() > 1 else shift.squeeze(1))
        return shift

    def _change_advantages(self, bounded: TrustRegionOutput, inputs: LossInputs) -> None:
        """Put `w·A − α·R/r` in place of the advantages `A` of `inputs`."""
        advantages = inputs.masked["advantages"]  # (B, 1) or (B, C)
        if bounded.weight is not None:
            advantages = advantages * bounded.weight
        if bounded.regression is not None and self.args.regression_coef != 0:
            regression = bounded.regression
            if self._sums_over_completions:
                regression = regression.sum(1, keepdim=True)
            inverse_ratio = (-self._log_ratio(bounded.log_probs, inputs)).exp()
            advantages = advantages - self.args.regression_coef * regression * inverse_ratio
        inputs["advantages"] = advantages if advantages.shape[1] > 1 else advantages.squeeze(1)

    def _change_reference(self, log_pi: torch.Tensor, shift: torch.Tensor, inputs: LossInputs) -> None:
        """Put `log π(a) + d` in place of the reference's log-probabilities, if `inputs` has any: TRL subtracts `log
        π(a)`, and computes its KL from `d`. `d` is `ref − log p(a)`, rescaled by [`rescale_kl`] if TRL multiplies the
        KL by the ratio."""
        ref, log_p = inputs.masked.get("ref_per_token_logps"), inputs.masked["log_probs"]  # (B, C)
        if ref is None:
            return
        log_ref_ratio = ignore_rounding(ref, log_p.detach()) - log_p
        if self.args.use_bias_correction_kl:
            policy_log_ratio = self._log_ratio(log_p, inputs) + shift  # undoes the shift of the old log-probabilities
            log_ref_ratio = rescale_kl(log_ref_ratio, policy_log_ratio - self._log_ratio(log_pi, inputs))
        inputs["ref_per_token_logps"] = log_pi + log_ref_ratio

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

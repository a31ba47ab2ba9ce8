"""TrollTrainer: every method of TRL's trainers that TROLL overrides, in the order in which TRL calls them."""

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from accelerate.utils import is_peft_model

from troll_trl.trainers.arithmetic_check import check_arithmetic
from troll_trl.trainers.config import TrollOptions
from troll_trl.trainers.engine_policy import EngineOldPolicyCache
from troll_trl.trainers.engine_rows import cap_rest_mass
from troll_trl.trainers.evaluation_means import CountedEvaluation
from troll_trl.trainers.kernel_choice import add_head
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.model_card import DPPO
from troll_trl.trainers.old_policy import (
    LOG_PROBS,
    OLD_POLICY_KEY,
    TOKEN_IDS,
    TRL_OLD_LOG_PROBS,
    OldPolicyCache,
    Pass,
    Scores,
    join_rows,
    with_dense,
)
from troll_trl.trainers.rollout_sampling import SampledAsConfigured
from troll_trl.trainers.run_start import checked_arguments, describe_run
from troll_trl.trainers.sharding import keep_output_dtypes, reshard
from troll_trl.trainers.step_check import check_steps
from troll_trl.trainers.trl_compat import METRICS, check_made, check_running, check_trl
from troll_trl.trainers.trust_region_model import TrustRegionModel, apply_trust_region
from troll_trl.trainers.vllm import check_server, check_vllm, explain_lost_server, server_url
from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput


class TrollTrainer(CountedEvaluation, SampledAsConfigured):
    """
    Mixin that turns a TRL trainer into its TROLL counterpart, for trainers that sample completions and clip a ratio.

    TRL's own `compute_loss` reads what the trust region makes of `log p(a)`. With the projection, it gets `log π(a)`,
    and with DPPO's mask `log p(a)` with less gradient, both with an infinite clip range. With the penalty, it gets
    `log p(a)` itself and a finite clip range. `compute_loss` of this class adds the regression.

    The methods below override TRL's and the Trainer's. They are thin, and hand on arguments that a newer TRL may add.
    [`~troll_trl.resilience.resilient_trainer.ResilientTrainer`] is put before this class for a run that is to survive
    bad numbers and interruptions; the method needs nothing of it. Each piece of state has one owner:

    - `trust_region`: what bounds the policy;
    - `recorder` ([`OldPolicyCache`]): the old policy of a rollout, and which of the four passes TRL makes ([`Pass`]);
    - `troll_metrics` (`dict[str, TrollMetrics]`): by mode, what the trust region did since the last log line;
    - `_trust_region_model` ([`TrustRegionModel`]): what TRL's loss scores in place of the policy, while it runs;
    - `_evaluation` ([`EvaluationTotals`]): what a running evaluation has counted, for [`CountedEvaluation`];
    - `switched_off` (`frozenset[str]`): the parts of `trl_compat.RELIABILITY` that have moved, and have no effect.

    A trainer defines `_config_class`, `_name`, `_aggregate` and `_keep_engine_policy`.
    """

    _config_class: type[TrollOptions]
    _name: str
    columns_of_old_policy = (LOG_PROBS,)  # what we add to a micro-batch, `(B, C, S)`
    # TRL's, declared for the type checker
    beta: float
    reward_funcs: list[Any]
    _buffered_inputs: Any

    # -- Construction -----------------------------------------------------------------------------------------------

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        args = self._own_config(model, args)
        self.switched_off = check_trl(type(self), engine=args.old_policy == "engine")
        check_vllm(args)
        self.trust_region = self._make_trust_region(args)
        if args.masks:
            self._name, self._paper = "DPPO", DPPO  # for the model card
        elif args.penalizes:
            self._name = "TROLL's regression"
        given = checked_arguments(super().__init__, model, reward_funcs, args, *others, **kwargs)
        super().__init__(*given.args, **given.kwargs)
        self.switched_off |= check_made(self, engine=args.old_policy == "engine")
        self.switched_off = check_steps(self, self.switched_off)
        for function in getattr(self, "reward_funcs", ()):  # they start in the background, while the model is prepared
            getattr(function, "start_workers", lambda: None)()

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # If the trust region needs no support, TRL's own head serves
        self.support_size = add_head(self.accelerator, base_model, args) if self.trust_region.needs_support else 0
        if not self.trust_region.clips:  # the trust region takes the place of the clip, whose range becomes infinite
            self.epsilon_low = self.epsilon_high = math.inf

        self.troll_metrics = {mode: TrollMetrics(self.accelerator, self.trust_region) for mode in ("train", "eval")}
        self.recorder = self._make_recorder(args)
        self._trust_region_model: TrustRegionModel | None = None
        self._arithmetic_checked: set[str] = set()  # modes, "train" and "eval"
        describe_run(self, base_model, given)

    def _own_config(self, model: Any, args: Any) -> Any:
        """The config that the caller gave, as one of ours; the caller's stays as it is."""
        if args is None:
            model_id = model if isinstance(model, str) else model.config.name_or_path
            return self._config_class(f"{model_id.split('/')[-1]}-{self._name}")
        return copy.copy(args) if isinstance(args, self._config_class) else self._config_class.from_trl(args)

    def _make_recorder(self, args: Any) -> OldPolicyCache:
        selection = (self.support_size, args.tail_mass, args.temperature)
        if args.old_policy == "trainer":
            return OldPolicyCache(*selection)
        if args.vllm_mode == "server" and self.accelerator.is_main_process:
            check_server(self.vllm_generation.vllm_client.get_server_info(), server_url(args), self.support_size)
        return EngineOldPolicyCache(self.accelerator, self.vllm_generation, *selection)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    # -- What a trainer defines -------------------------------------------------------------------------------------

    def _make_trust_region(self, args: Any) -> TrustRegion:
        """What bounds the policy. A subclass may return a trust region of its own; the config's is then unused."""
        return args.make_trust_region()

    def _has_old_policy(self) -> bool:
        """Whether TRL scores the next rollout with the current weights. If it does not, neither do we."""
        return not self.args.trust_region_idle

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """The loss that TRL's `compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`."""
        raise NotImplementedError

    def _reference_kl(self, log_probs: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | None:
        """TRL's estimate of KL(p ‖ reference) `(B, C)`, from `log p(a)` `(B, C)`; `None` if TRL's loss has none."""
        return None

    def _keep_engine_policy(self, recorder: EngineOldPolicyCache, *generated: Any) -> None:
        """Have `recorder` keep what TRL's `_generate` returned."""
        raise NotImplementedError

    # -- Rollout: keep the old policy -------------------------------------------------------------------------------

    def _prepare_inputs(self, *args, **kwargs):
        inputs = super()._prepare_inputs(*args, **kwargs)
        device = self.accelerator.device
        # The rows of a whole rollout batch are joined at once: until then, each row keeps the whole batch in memory
        rollout_batch = getattr(self, "_buffered_inputs", None) if self.model.training else None
        join_rows(rollout_batch or [inputs], device)
        if OLD_POLICY_KEY not in inputs:
            return inputs
        return with_dense(inputs, inputs[OLD_POLICY_KEY].to(device, non_blocking=True))

    def _generate_and_score_completions(self, *args, **kwargs) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        reshard(self.model)
        with explain_lost_server(self.args), self.recorder.rollout(self.model, self._has_old_policy()):
            output = super()._generate_and_score_completions(*args, **kwargs)
        if (unscored := self.recorder.add_to(output)) is not None:
            self._metrics_of(mode)["troll/unscored_tokens"].append(unscored)
        return output

    def _generate(self, *args, **kwargs):
        generated = super()._generate(*args, **kwargs)
        if isinstance(self.recorder, EngineOldPolicyCache):
            self._keep_engine_policy(self.recorder, *generated)
        return generated

    # -- The four passes ----------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> Scores:
        trl = super()._get_per_token_logps_and_entropies

        def score(scored_by: Any) -> Scores:
            return trl(scored_by, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        purpose = self.recorder.pass_of(model)
        if purpose is Pass.OLD_POLICY:
            return self.recorder.record(score, model, logits_to_keep)
        if purpose is Pass.ENGINE:
            return self.recorder.answer(logits_to_keep), None, None
        if purpose is Pass.LOSS:
            bounds = self._trust_region_model  # `None` if the trust region is idle
            return score(model if bounds is None else bounds.wrap(model, logits_to_keep))
        log_probs, entropies, aux_loss = score(model)  # `Pass.REFERENCE`
        return self.recorder.snap_to_old_policy(log_probs), entropies, aux_loss

    # -- Loss: replace the ratio's policy by the bounded one --------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        mode = "train" if self.model.training else "eval"
        loss_mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()  # (B, C)
        if (old := self._old_policy_of(inputs)) is None:  # idle: π = p, with divergences and regression 0
            self.troll_metrics[mode].add_idle(loss_mask)
            return super().compute_loss(model, inputs, *args, **kwargs)
        if mode not in self._arithmetic_checked:
            check_arithmetic(self, inputs, mode)
            self._arithmetic_checked.add(mode)
        advantages = inputs["advantages"].reshape(len(loss_mask), -1)  # (B, 1) or (B, C)
        trust_region_model = TrustRegionModel(self._bound, *old, loss_mask, advantages)
        loss = self._bounded_loss(trust_region_model, model, inputs, *args, **kwargs)
        self.troll_metrics[mode].add(loss_mask, trust_region_model.bounded.token_stats)
        return loss + self._terms_of_policy(trust_region_model, loss_mask, inputs, mode)

    def _bounded_loss(self, trust_region_model: TrustRegionModel, model, inputs, *args, **kwargs) -> torch.Tensor:
        """TRL's loss of a micro-batch, with `trust_region_model` in place of the policy."""
        # A reference KL in TRL's loss would be the bounded policy's; `_terms_of_policy` adds the policy's own
        beta, self.beta, self._trust_region_model = self.beta, 0.0, trust_region_model
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.beta, self._trust_region_model = beta, None
        if not hasattr(trust_region_model, "bounded"):
            raise RuntimeError(
                "The loss has not scored the policy with the model, so nothing bounds it. If you override "
                "`_compute_loss`, call TRL's in it. For a loss of your own, override `compute_loss`."
            )
        return loss

    def _terms_of_policy(
        self, trust_region_model: TrustRegionModel, mask: torch.Tensor, inputs: dict[str, Any], mode: str
    ) -> torch.Tensor:
        """What is added to TRL's surrogate, a scalar: the regression, and the unprojected policy's reference KL."""
        terms = torch.zeros((), device=mask.device)
        regression = trust_region_model.bounded.regression
        if regression is not None and self.args.regression_coef != 0:
            terms = terms + self.args.regression_coef * self._aggregate(regression, mask, inputs, mode)
        kl = self._reference_kl(trust_region_model.policy_log_probs, mask, inputs)
        if kl is not None:
            totals = torch.stack([(kl.detach() * mask).sum(), mask.sum()])
            totals = self.accelerator.reduce(totals, reduction="sum")
            self._metrics_of(mode)["kl"].append((totals[0] / totals[1].clamp(min=1.0)).item())
            terms = terms + self.beta * self._aggregate(kl, mask, inputs, mode)
        return terms

    def _bound(self, policy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        """Apply the trust region. An engine's floor of the rest mass says only that this mass is small."""
        if self.args.old_policy == "engine" and self.trust_region.needs_support:
            old = cap_rest_mass(old, policy)
        return apply_trust_region(self.trust_region, policy, old, advantages)

    def _old_policy_of(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Old log-probabilities `(B, C, S)` of a micro-batch and their support; `None` if policies are equal."""
        column = LOG_PROBS if self.trust_region.needs_support else TRL_OLD_LOG_PROBS
        if column in inputs:
            old = inputs[column]
            return (old, inputs[TOKEN_IDS]) if self.trust_region.needs_support else (old.unsqueeze(-1), None)
        if self._has_old_policy():
            raise ValueError(
                f"A batch lacks `{column}`, its old policy: neither a trust region nor a clip would limit its ratios. "
                "Keep the columns of the rollout batch."
            )
        return None

    # -- Evaluate and log -------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args, **kwargs):
        self.troll_metrics["eval"].pop()  # a prediction, or an evaluation that failed, leaves some
        return super().evaluation_loop(*args, **kwargs)

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

    def check_running_parts(self) -> None:
        """Switch off what needs parts of TRL that exist only in a training, if they have moved."""
        self.switched_off = check_running(self, self.switched_off)

    def _metrics_of(self, mode: str) -> dict[str, list[float]]:
        """TRL's metrics since the last log line; if they have moved, a dictionary that nobody reads."""
        return defaultdict(list) if METRICS in self.switched_off else self._metrics[mode]

    def _counters(self) -> dict[str, Any]:
        """What counts between two log lines of the training, by name. Checkpoints keep its counts."""
        return {"trust_region": self.troll_metrics["train"]}

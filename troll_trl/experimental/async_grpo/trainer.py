"""AsyncTrollGRPOTrainer: TRL's asynchronous GRPO with a trust region around the engine's policy in place of a clip."""

import math
from typing import Any

import torch
import trl
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from troll_trl.compat import TESTED, check_class, check_instance, install, untested
from troll_trl.experimental.async_grpo.config import AsyncTrollGRPOConfig
from troll_trl.trainers.engine_policy import NO_LOG_PROB
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.model_card import DPPO, TROLL
from troll_trl.trainers.sharding import keep_output_dtypes
from troll_trl.trainers.vllm import check_server
from troll_trl.trust_region import HIGHEST_LOG_RATIO
from troll_trl.trust_region.regions import TrustRegionOutput, apply_trust_region


class AsyncTrollGRPOTrainer(AsyncGRPOTrainer):
    """
    TRL's `AsyncGRPOTrainer` with a trust region in place of the clip: DPPO's mask (arXiv 2602.04879), or the penalty,
    which is the regression of TROLL (arXiv 2510.03817) on two outcomes. The old policy of each token is the engine's,
    whichever weights sampled the token.

    TRL's own `compute_loss` computes the loss, with an infinite clip range, from the log-probabilities that the trust
    region returns. TRL reads the advantages before it scores the policy, so the weight and the regression cannot enter
    through the advantages, as they do in [`~troll_trl.trainers.troll_trainer.TrollTrainer`]. Instead, a mask's weight
    scales the gradient of `log p(a)`, and the regression is added to TRL's loss, averaged in the same way. The
    arguments are the same as in TRL's trainer.

    Overrides `compute_loss`; `log`, which adds the `troll/…` metrics; `train`, which asks the server how it computes
    log-probabilities; and `create_accelerator_and_postprocess`. Sets `epsilon_low` and `epsilon_high`. Reads
    `current_gradient_accumulation_steps`, `_metrics`, and from the batch `(1, L)` `token_index`, `old_log_probs`,
    `advantages` and `global_n_tokens`.
    """

    _tag_names = ["trl", "async-grpo", "troll"]
    _name = "AsyncTROLL"
    _paper = TROLL

    def __init__(self, model: str, reward_funcs=None, args: AsyncTrollGRPOConfig | None = None, *others, **kwargs):
        if untested("trl"):
            raise ImportError(
                f"Asynchronous training is experimental in TRL, and was tested with trl {TESTED['trl'][-1]}. Version "
                f"{trl.__version__} may average or clip differently. {install('trl')}."
            )
        if args is None:
            args = AsyncTrollGRPOConfig(f"{model.split('/')[-1]}-{self._name}")
        if not isinstance(args, AsyncTrollGRPOConfig):
            raise TypeError(f"`args` must be an AsyncTrollGRPOConfig, got {type(args).__name__}.")
        check_class(type(self))
        self.trust_region = args.region
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        check_instance(self)
        self.epsilon_low = self.epsilon_high = math.inf  # the trust region replaces the clip
        if args.trust_region == "mask":
            self._name = "AsyncDPPO"
            self._paper = DPPO  # for the model card
        self.troll_metrics = TrollMetrics(self.accelerator, self.trust_region)
        self.accelerator.print(f"TROLL: a trust region around the engine's policy, {self.trust_region.describe()}.")

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    def train(self, *args, **kwargs):
        if isinstance(self.rollout_worker, AsyncRolloutWorker):  # TRL's own worker, which only the main process has
            self.vllm_client.wait_for_server_ready()
            check_server(self.vllm_client.get_server_info(), self.args.vllm_server_base_url)
        return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        selected = inputs["token_index"] >= 0  # (1, L), the M trained tokens and padding
        index, old, advantages = (inputs[name][selected] for name in ("token_index", "old_log_probs", "advantages"))
        bounded = TrustRegionOutput(torch.empty(0))

        def bounded_model(**model_inputs):
            nonlocal bounded
            output = model(**model_inputs)
            log_probs, output.entropy = (x.flatten()[index] for x in (output.log_probs, output.entropy))  # (M,)
            bounded = self._bound(log_probs, old, advantages)
            output.log_probs = bounded.log_probs
            return output

        # Several samples may share a position but differ in their old policies: give TRL one log-probability per sample
        inputs = {**inputs, "token_index": torch.where(selected, selected.cumsum(1) - 1, -1)}
        loss = super().compute_loss(bounded_model, inputs, return_outputs, num_items_in_batch)
        if bounded.regression is None or self.args.regression_coef == 0:
            return loss
        # Average the regression as TRL's `compute_loss` averages its loss
        tokens_per_rank = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        regression = bounded.regression.sum() / tokens_per_rank / self.current_gradient_accumulation_steps
        return loss + self.args.regression_coef * regression

    def _bound(self, log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TrustRegionOutput:
        """Apply the trust region to `log_probs`, `old` log-probabilities and `advantages`, all `(M,)`. The result is
        `(1, M)`, and its log-probabilities already include the weight."""
        scored = old.masked_fill(old <= NO_LOG_PROB, math.nan)
        self._check_finite({"of the policy": log_probs, "of the engine": scored, "advantages": advantages})
        log_probs, old, advantages = log_probs.unsqueeze(0), old.unsqueeze(0), advantages.unsqueeze(0)
        bounded = apply_trust_region(self.trust_region, log_probs.unsqueeze(-1), old.unsqueeze(-1), advantages)
        self.troll_metrics.add(torch.ones_like(old), bounded.token_stats)
        if bounded.weight is not None:
            bounded.log_probs = _scale_gradient(bounded.log_probs, old, bounded.weight.detach())
        return bounded

    def _check_finite(self, values: dict[str, torch.Tensor]) -> None:
        """Raise a `ValueError` on all ranks if a number is NaN or infinite on any. TRL's metrics skip NaN."""
        counts = torch.stack([(~x.detach().isfinite()).sum() for x in values.values()])
        counts = self.accelerator.reduce(counts, reduction="sum").tolist()
        if any(counts):
            found = ", ".join(f"{count} {name}" for name, count in zip(values, counts, strict=True) if count)
            raise ValueError(
                f"NaN or infinite numbers at step {self.state.global_step}: {found}. If they are log-probabilities of "
                "the policy, resume from the last checkpoint with a lower learning rate. If they are the engine's, "
                "look at the server's log; if they are advantages, at the reward functions."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics, except `clip_ratio/…`, and the `troll/…` metrics. The latter are reduced over ranks, so
        every rank must call this."""
        metrics: dict[str, Any] = self._metrics["train"]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:  # always 0
            del metrics[name]
        logs.update(self.troll_metrics.pop())
        super().log(logs, start_time)


def _scale_gradient(log_probs: torch.Tensor, old: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `log_probs` `(1, M)` with their gradient multiplied by `weight`. A token of weight 0 gets its `old` value,
    and no ratio overflows: 0 times an infinite ratio would be NaN."""
    fixed = log_probs.detach()
    value = torch.where(weight == 0, old, torch.minimum(fixed, old + HIGHEST_LOG_RATIO))
    return value + weight * (log_probs - fixed)

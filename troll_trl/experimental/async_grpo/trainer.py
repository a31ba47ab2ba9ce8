"""AsyncTrollGRPOTrainer: TRL's asynchronous GRPO with a trust region around the engine's policy in place of a clip."""

import contextlib
import copy
import math
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from troll_trl.experimental.async_grpo.arithmetic_check import check_async_arithmetic
from troll_trl.experimental.async_grpo.config import AsyncTrollGRPOConfig
from troll_trl.experimental.async_grpo.engine import EngineRolloutLoop
from troll_trl.experimental.async_grpo.queue import CheckedQueue
from troll_trl.experimental.async_grpo.trl_compat import check_async_made, check_async_trl
from troll_trl.experimental.async_grpo.worker import StopEvent, WatchedRolloutLoop, check_worker
from troll_trl.lm_head import SparseCausalLMOutput
from troll_trl.resilience.checkpoint import CheckpointedTrainer
from troll_trl.trainers.engine_rows import cap_rest_mass, sparse_of
from troll_trl.trainers.kernel_choice import add_head
from troll_trl.trainers.metrics import TrollMetrics
from troll_trl.trainers.model_card import DPPO, TROLL
from troll_trl.trainers.sharding import keep_output_dtypes
from troll_trl.trainers.trust_region_model import apply_trust_region, not_finite
from troll_trl.trainers.vllm import check_health, check_sampling, check_server, explain_server
from troll_trl.trust_region.regions import TrustRegion, TrustRegionOutput

logger = get_logger(__name__)


class AsyncTrollGRPOTrainer(CheckpointedTrainer, AsyncGRPOTrainer):
    """
    TRL's `AsyncGRPOTrainer` with a trust region in place of the clip: TROLL's projection (arXiv 2510.03817) or DPPO's
    mask (arXiv 2602.04879). With `trust_region="penalty"` the clip stays, and TROLL's regression is added. The old
    policy is the engine's, token by token, whichever weights it sampled with.

    TRL's own `compute_loss` computes the loss from what the trust region makes of each token's `log p(a)`, with an
    infinite clip range. This class overrides

    - `compute_loss`: bounds the policy, adds the regression, and raises on all ranks if the policy or what bounds it is
      NaN;
    - `log`: adds the `troll/…` metrics, reduced over ranks, and without a clip leaves out `clip_ratio/…`, which would
      always be 0;
    - `train`: asks the server whether its answers will have what the trust region needs, and explains a lost one;
    - `_save_checkpoint`: passes over groups that were dropped, and saves as [`CheckpointedTrainer`];
    - `create_accelerator_and_postprocess`: has FSDP2 keep float32 log-probabilities.

    The worker that TRL makes runs a loop of ours ([`WatchedRolloutLoop`]). If the trust region reads a support, the
    loop asks the engine for the most likely tokens. A sample whose log-probabilities are incomplete is dropped and
    counted. The arguments are the same as in TRL's trainer. A `rollout_worker` of your own needs [`sample_log_probs`]
    unless mask or penalty are binary.
    """

    _tag_names = ["trl", "async-grpo", "troll"]
    _name = "AsyncTROLL"
    _paper = TROLL

    # TRL's, declared for the type checker
    rollout_queue: Any
    rollout_worker: Any
    _trained_groups: set[int]

    def __init__(self, model: str, reward_funcs=None, args: AsyncTrollGRPOConfig | None = None, *others, **kwargs):
        check_async_trl()
        if args is None:
            args = AsyncTrollGRPOConfig(f"{model.split('/')[-1]}-{self._name}")
        elif not isinstance(args, AsyncTrollGRPOConfig):
            given = f"{type(args).__module__}.{type(args).__name__}"
            raise TypeError(f"`args` must be an AsyncTrollGRPOConfig, got {given}.")
        args = copy.copy(args)  # the caller's stays as it is
        args.enable_jit_checkpoint = False  # our handler of SIGTERM takes its place
        self.trust_region = self._make_trust_region(args)
        with explain_server(args.vllm_server_base_url):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        check_async_made(self)
        self._arithmetic_checked = False
        if not self.trust_region.clips:  # it takes the place of the clip
            self.epsilon_low = self.epsilon_high = math.inf
        if args.masks:
            self._name, self._paper = "AsyncDPPO", DPPO
        elif args.penalizes:
            self._name = "TROLL's regression"

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self.support_size = add_head(self.accelerator, base_model, args) if self.trust_region.needs_support else None
        self._trust_region_metrics = TrollMetrics(self.accelerator, self.trust_region)
        self._watches_server = isinstance(self.rollout_worker, AsyncRolloutWorker)  # false on other ranks
        if self._watches_server:
            self._prepare_worker()
        if self.rollout_queue is not None:  # the main process has one
            self.rollout_queue = CheckedQueue(
                self.rollout_queue, self.support_size, self._is_stale, self._check_worker, self._warn_while_waiting
            )
        self.set_up_checkpoints()
        self.accelerator.print(f"TROLL: a trust region around the engine's policy, {self.trust_region.describe()}.")

    def _make_trust_region(self, args: AsyncTrollGRPOConfig) -> TrustRegion:
        """What bounds the policy. A subclass may return a trust region of its own."""
        return args.make_trust_region()

    def _prepare_worker(self):
        worker = self.rollout_worker
        options = worker._loop_kwargs
        options["min_p"] = options.get("min_p") or 0.0  # TRL leaves `None` out of its requests
        requests = {"temperature": 1.0, **options}
        check_sampling({"temperature": self.args.temperature}, engine_is_old_policy=True, requests=requests)
        worker._stop_event_mp = StopEvent(worker._mp_ctx)
        if type(worker) is AsyncRolloutWorker:  # TRL's own
            worker._loop_cls = WatchedRolloutLoop
            options["hang_seconds"] = self.args.heartbeat_stale_after_s
            if self.support_size is not None:
                worker._loop_cls = EngineRolloutLoop
                options["support_size"] = self.support_size

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        keep_output_dtypes(self.accelerator)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if not self._watches_server:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        url = self.vllm_client.server_url
        with explain_server(url):
            self.vllm_client.wait_for_server_ready()
            check_server(self.vllm_client.get_server_info(), self.vllm_client.server_url, self.support_size)
        if resume_from_checkpoint:
            with contextlib.suppress(Exception):  # there is one only if the run was killed while it sent weights
                self.vllm_client.finish_weight_update(timeout=60)
        with explain_server(url, every_error=True):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_worker(self):
        if self._watches_server:
            check_worker(self.rollout_worker)

    def _warn_while_waiting(self):
        logger.warning(
            "No sample for a minute: completions are long, a reward function, a tool or an environment is slow or "
            f"hangs, or every sample is dropped (`max_staleness` is {self.args.max_staleness})."
        )
        if self._watches_server:
            check_health(self.vllm_client.server_url)  # `train` explains its error

    def _is_stale(self, sample: RolloutSample) -> bool:
        """Whether TRL drops the sample as soon as it has it."""
        return self.model_version - sample.model_version > self.args.max_staleness

    def _save_checkpoint(self, model, trial):
        # TRL saves the first prompt that was not trained on as the next one. A group that was dropped never will be
        trained = self._trained_groups
        self._trained_groups = trained | getattr(self.rollout_queue, "dropped_groups", set())
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._trained_groups = trained

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        selected = inputs["token_index"] >= 0  # (1, M) and padding
        index, rows = inputs["token_index"][selected], inputs["old_log_probs"][selected]  # (M,), (M,) or (M, 2K)
        advantages = inputs["advantages"][selected].unsqueeze(0)  # (1, M)
        if not self._arithmetic_checked:
            check_async_arithmetic(self, inputs)
            self._arithmetic_checked = True
        bounded = TrustRegionOutput(torch.empty(0))

        def trust_region_model(**model_inputs):
            nonlocal bounded
            output, policy, old = self._policies(model, model_inputs, index, rows)
            self._check_finite(policy)
            bounded = apply_trust_region(self.trust_region, policy, old, advantages)
            self._check_bounded(bounded)
            return SparseCausalLMOutput(log_probs=bounded.log_probs, entropy=output.entropy, aux_loss=output.aux_loss)

        # The callable returns the M selected positions, of which one may serve several samples: TRL takes each once
        inputs = {**inputs, "token_index": torch.where(selected, selected.cumsum(1) - 1, -1)}
        if rows.dim() == 2:
            inputs["old_log_probs"] = inputs["old_log_probs"][..., 0]
        loss = super().compute_loss(trust_region_model, inputs, return_outputs, num_items_in_batch)
        self._trust_region_metrics.add(torch.ones_like(advantages), bounded.token_stats)
        if bounded.regression is None or self.args.regression_coef == 0:
            return loss
        return loss + self.args.regression_coef * self._aggregate(bounded.regression, inputs)

    def _aggregate(self, values: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss that TRL's `compute_loss` makes of per-token losses `values` `(1, M)`."""
        tokens_per_rank = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        return values.sum() / tokens_per_rank / self.current_gradient_accumulation_steps

    def _policies(
        self, model, model_inputs: dict[str, Any], index: torch.Tensor, rows: torch.Tensor
    ) -> tuple[SparseCausalLMOutput, torch.Tensor, torch.Tensor]:
        """The model's output `(1, M)` at the positions `index` `(M,)`, its policy and the old policy `(1, M, S)`."""
        if self.support_size is None:
            output = model(**model_inputs)
            log_probs, entropy = (x.flatten()[index].unsqueeze(0) for x in (output.log_probs, output.entropy))
            output = SparseCausalLMOutput(entropy=entropy, aux_loss=output.aux_loss)
            return output, log_probs.unsqueeze(-1), rows[None, :, None]
        old = sparse_of(rows.unsqueeze(0), model_inputs["shift_labels"].flatten()[index].unsqueeze(0))  # (1, M, K)
        output = model(**model_inputs, token_ids=old.token_ids, token_index=index, check_finite=False)
        return output, output.sparse_log_probs, cap_rest_mass(old.log_probs, output.sparse_log_probs)

    def _check_finite(self, policy: torch.Tensor):
        """Raise on all ranks if a log-probability `(1, M, S)` is NaN, or a sampled token's is infinite."""
        not_finite = policy.isnan().any(-1) | ~policy[..., 0].isfinite()
        if bad := self.accelerator.reduce(not_finite.sum(), reduction="sum").item():
            raise ValueError(
                f"The policy's log-probabilities of {bad} tokens are not finite at step {self.state.global_step}. The "
                "weights or activations have overflowed: resume from the last checkpoint with a lower learning rate, "
                "or train in bfloat16 or float32 rather than float16."
            )

    def _check_bounded(self, bounded: TrustRegionOutput):
        """Raise on all ranks if the trust region made a NaN or an infinity of finite log-probabilities."""
        if bad := self.accelerator.reduce(not_finite(bounded).sum(), reduction="sum").item():
            raise ValueError(
                f"`trust_region`: {type(self.trust_region).__name__} made NaN or infinity of {bad} tokens at step "
                f"{self.state.global_step}. It must return finite numbers. An unused slot is −∞ in both policies, and "
                "−∞ − (−∞) is NaN."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        if not self.trust_region.clips:
            for name in [name for name in metrics if name.startswith("clip_ratio/")]:
                del metrics[name]
        if metrics_of_region := self._trust_region_metrics.pop():
            logs.update(metrics_of_region)
            dropped = 0
            if self.rollout_queue is not None:  # the main process alone has a queue
                dropped, self.rollout_queue.dropped = self.rollout_queue.dropped, 0
            logs["troll/dropped_samples"] = broadcast_object_list([dropped], from_process=0)[0]
        super().log(logs, start_time)

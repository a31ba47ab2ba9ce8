"""TrollGRPOTrainer: what differs from TRL's GRPOTrainer, and nothing else."""

from typing import Any

import torch
from trl import GRPOTrainer

from troll_trl.resilience.resilient_trainer import ResilientTrainer
from troll_trl.trainers.config import TrollGRPOConfig
from troll_trl.trainers.model_card import TROLL
from troll_trl.trainers.trl_compat import with_parameters_of
from troll_trl.trainers.troll_trainer import TrollTrainer
from troll_trl.trainers.trust_region_model import snap_to_reference


class TrustRegionGRPO(TrollTrainer, GRPOTrainer):
    """The method alone: GRPO with a trust region, without what [`TrollGRPOTrainer`] adds for long runs."""

    _tag_names = ["trl", "grpo", "troll"]
    _name = "TROLL"
    _paper = TROLL
    _config_class = TrollGRPOConfig

    def _has_old_policy(self) -> bool:
        corrects = bool(self.args.use_vllm and self.args.vllm_importance_sampling_correction)  # then TRL always scores
        return super()._has_old_policy() or corrects

    def _keep_engine_policy(self, recorder, _prompts, completion_ids, tool_mask, _completions, log_probs, *_):
        if log_probs is None:
            raise ValueError(
                "`rollout_func` returned no `logprobs`, and with `old_policy='engine'` they are the old policy. Return "
                "those that `trainer.vllm_generation.generate` gives, or use `old_policy='trainer'`."
            )
        recorder.keep(completion_ids, log_probs, tool_mask)

    def _reference_kl(self, log_probs: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | None:
        if self.beta == 0.0:
            return None
        log_ratio = snap_to_reference(inputs["ref_per_token_logps"], log_probs.detach()) - log_probs
        kl = log_ratio.exp() - log_ratio - 1
        if self.args.use_bias_correction_kl:
            weight = log_probs - inputs["old_per_token_logps"]
            if self.args.importance_sampling_level == "sequence":
                weight = ((weight * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            kl = kl * weight.exp()
        return kl

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], mode: str) -> torch.Tensor:
        """
        The loss that TRL's `compute_loss` makes of per-token losses `values` `(B, C)` under `mask` `(B, C)`: the same
        averages, one per loss type, scaled for gradient accumulation.
        """
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        values = values * mask
        if self.args.loss_type == "dapo":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes  # per rollout batch
            if mode == "train":
                tokens = tokens * accumulation / self.args.steps_per_generation  # per update
            return values.sum() / tokens
        if self.args.loss_type == "grpo":
            loss = (values.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        elif self.args.loss_type == "bnpo":
            loss = values.sum() / mask.sum().clamp(min=1.0)
        elif self.args.loss_type == "dr_grpo":
            loss = values.sum() / (values.size(0) * self.args.max_completion_length)
        else:  # luspo: the config refuses any other
            loss = values.sum(-1).mean()
        return loss / accumulation

    def get_off_policy_mask(*args, **kwargs) -> torch.Tensor:  # TRL's is static: a caller may pass no `self`
        if args and isinstance(args[0], TrustRegionGRPO):
            self, args = args[0], args[1:]
            # The projection stays near the old policy by construction; the drift to be masked is the policy's own
            if self._trust_region_model is not None:
                kwargs["per_token_logps"] = self._trust_region_model.policy_log_probs
        return GRPOTrainer.get_off_policy_mask(*args, **kwargs)


class TrollGRPOTrainer(ResilientTrainer, TrustRegionGRPO):
    """
    GRPO with [TROLL](https://huggingface.co/papers/2510.03817) (Trust Region Optimization for Large Language Models): a
    differentiable projection of every token's distribution onto a KL trust region around the old policy replaces the
    clip of the probability ratio.

    Per token, with policy `p`, old policy `q`, projection `π` and advantage `A`, the loss is
    `−π(a)/q(a)·A + α·KL(p ‖ stopgrad π)`, aggregated as `loss_type` does. TRL's own `compute_loss` computes it from
    `log π(a)` in place of `log p(a)`, with an infinite clip range. Loss types, sequence-level ratios, masks, entropy
    bonus, vLLM correction and MoE loss are therefore TRL's.

    With `trust_region="mask"`, [DPPO](https://huggingface.co/papers/2602.04879) takes the place of TROLL: a token that
    has moved too far with its advantage loses its gradient, and there is no regression. With `trust_region="penalty"`,
    TRL's clip stays, and the regression is added for tokens that have left the trust region.

    [`~troll_trl.trainers.troll_trainer.TrollTrainer`] overrides what any trainer needs, and
    [`~troll_trl.resilience.resilient_trainer.ResilientTrainer`] keeps a long run alive. Two parts of GRPO read the
    unprojected policy: `get_off_policy_mask` and the reference KL. TRL's metric `policy_loss` is the surrogate alone:
    the regression and the reference KL are added after it.

    The arguments are the same as in [`~trl.GRPOTrainer`], except for one:

    Args:
        args ([`TrollGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A plain `GRPOConfig` gets TROLL's defaults.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl.rewards import accuracy_reward
    >>> from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

    >>> trainer = TrollGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=TrollGRPOConfig(steps_per_generation=8, kl_bound=0.05),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```
    """

    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
